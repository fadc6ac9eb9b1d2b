"""Ranks compare where they are before a step, and stop and save together."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from ensemblekit.core.errors import RanksDifferError
from ensemblekit.data.loading import Batch
from ensemblekit.ranks.group import Group
from ensemblekit.training.interruption import StopRequest
from ensemblekit.training.meetings import Meetings

BATCH = Batch(torch.zeros(3, 1), torch.zeros(3), torch.tensor([2, 0, 1]))


class TwoRanks(Group):
    """The second rank says the same as the first, except for what was changed."""

    size = 2

    def __init__(self, **changes: Any) -> None:
        self.changes, self.meetings = changes, 0

    def gather_json(self, value: Any) -> list[Any]:
        self.meetings += 1
        return [value, {**value, **self.changes}]


@pytest.mark.parametrize(
    ("changes", "what"), [({"samples": 1}, "it has other samples in its batch"), ({"step": 5}, "it has another step")]
)
def test_a_rank_that_trains_on_something_else_is_named(changes, what):
    with pytest.raises(RanksDifferError) as raised:
        Meetings(TwoRanks(**changes), StopRequest()).meet(4, BATCH, is_due=False)
    assert raised.value.what == f"rank 1 differs from rank 0 at step 4: {what}"
    assert raised.value.exit_code == 7


def test_a_signal_that_reaches_one_rank_stops_all():
    stop = StopRequest()
    meetings = Meetings(TwoRanks(signal=int(signal.SIGTERM)), stop)
    assert not meetings.must_stop
    meetings.meet(0, BATCH, is_due=False)
    assert meetings.must_stop
    assert stop.exit_code == 143


def test_the_clock_of_the_first_rank_says_when_all_save():
    for is_due in (False, True):
        meetings = Meetings(TwoRanks(due=not is_due), StopRequest())
        meetings.meet(0, BATCH, is_due=is_due)
        assert meetings.must_save(not is_due) is is_due
        assert meetings.must_save(True) is False  # once


def test_ranks_meet_about_once_a_second_and_not_at_every_step():
    group = TwoRanks(seconds=0.1)
    meetings = Meetings(group, StopRequest())
    for step in range(41):
        meetings.meet(step, BATCH, is_due=False)
    assert group.meetings == 5  # before steps 0, 1, 11, 21 and 31
