"""Who is taken to be lost, judged by a store that answers or does not."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from ensemblekit.ranks.process import Process
from ensemblekit.ranks.watch import Watch, announce

PROCESSES = [replace(Process.here(rank, "gloo"), machine=f"machine {rank}", host=f"host{rank}") for rank in range(3)]


@pytest.fixture
def watch() -> Watch:
    store = HashStore()
    for rank in range(3):
        announce(store, rank)
    return Watch(store, PROCESSES, 1, lambda loss: None)


def test_a_rank_whose_store_does_not_answer_says_that_it_is_cut_off_itself(watch):
    now = time.monotonic()
    watch.contact = now - 6.1
    watch.heard = {0: now - 6.3, 1: now - 6.1, 2: now - 6.5}
    assert watch._find_loss(6.0).what.startswith(f"rank 1 (process {os.getpid()} on host1) is cut off from the others")


def test_a_rank_that_is_silent_while_the_store_answers_is_named(watch):
    now = time.monotonic()
    watch.contact = now - 0.2
    watch.heard = {0: now - 0.3, 1: now - 0.2, 2: now - 6.5}
    assert watch._find_loss(6.0).what.startswith(f"rank 2 (process {os.getpid()} on host2) timed out")
    assert watch._find_loss(7.0) is None


def test_without_torchrun_the_first_rank_hosts_the_store_and_is_named(watch):
    watch.host = PROCESSES[0]
    watch.contact = time.monotonic() - 6.1
    assert "rank 0" in watch._find_loss(6.0).what


def test_what_a_rank_has_told_counts_more_than_that_others_were_interrupted(watch):
    failure = '{{"line": "{}", "exit_code": {}, "interrupted": {}}}'.format
    watch.news |= {"failure/0": failure("saved", 143, "true"), "failure/2": failure("disk full", 7, "false")}
    loss = watch._find_loss(6.0)
    assert (loss.what, loss.exit_code, loss.is_told) == ("rank 2: disk full", 7, True)
    watch.news["failure/2"] = ""
    loss = watch._find_loss(6.0)
    assert (loss.what, loss.exit_code, loss.is_told) == ("saved", 143, True)


def test_only_one_rank_of_a_machine_has_the_word():
    store = HashStore()
    for rank in range(2):
        announce(store, rank)
    processes = [Process.here(rank, "gloo") for rank in range(2)]
    watches = [Watch(store, processes, rank, lambda loss: None) for rank in range(2)]
    for watch in watches:
        watch.start()
    try:
        assert [watch.has_word for watch in reversed(watches)] == [True, False]
    finally:
        for watch in watches:
            watch.stop()
