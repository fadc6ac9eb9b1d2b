"""The projection to many ranks comes from the committed measurements, by a model that finds known numbers again."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
from helpers.places import ROOT

SCRIPTS = ROOT / "tests" / "benchmarks"


@pytest.fixture
def projection(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("rank_projection")


def test_the_page_has_the_tables_of_the_committed_results(projection, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rank_projection.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        projection.main()
    assert ended.value.code is None


def test_a_page_that_is_out_of_date_is_noticed(projection, monkeypatch, tmp_path):
    page = tmp_path / "ranks.md"
    page.write_text(projection.PAGE.read_text().replace("| 1,000 |", "| 1,001 |"))
    monkeypatch.setattr(projection, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["rank_projection.py", "--check"])
    with pytest.raises(SystemExit, match="out of date"):
        projection.main()


def test_the_fit_finds_latency_and_bandwidth_again(projection):
    known = projection.Model(latency=100e-6, bandwidth=2e9, cores=2)
    rows = [
        {
            "machine": "CPU, 2 cores, torch",
            "kind": "loopback",
            "ranks": str(ranks),
            "bytes": str(size),
            "seconds": str(known.ring(ranks, size, oversubscribed=True)),
        }
        for ranks in (2, 4, 8)
        for size in (256, 51_200, 1_638_400)
    ]
    found = projection.fitted(rows)
    assert (found.latency, found.bandwidth) == pytest.approx((known.latency, known.bandwidth))


def test_a_ring_has_a_round_for_each_other_rank_and_a_tree_for_each_doubling(projection):
    model = projection.Model(latency=1.0, bandwidth=float("inf"), cores=2)
    assert [model.ring(ranks) for ranks in (2, 8, 1000)] == [1, 7, 999]
    assert [model.tree(ranks) for ranks in (2, 8, 1000)] == [1, 3, 10]
    assert model.ring(8, oversubscribed=True) == 28


def test_random_delays_slow_a_ring_down_by_the_same_factor_at_any_length(projection):
    slow = {ranks: projection.jittered_ring(ranks, 0.5) / (ranks - 1) for ranks in (64, 1000)}
    assert slow[64] == pytest.approx(slow[1000], rel=0.1)
    assert projection.jittered_ring(64, 0.0) == 63
