"""The benchmark of ranks: what a rank sends, how that compares with gradients, and what is printed."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import asdict, replace

import pytest
from helpers import commands

from ensemblekit.bench import ranks
from ensemblekit.bench.rank_report import CSV_COLUMNS, remarks, size
from ensemblekit.bench.ranks import (
    RankContestants,
    RankEntry,
    RankResult,
    RankSteps,
    RoundOnRank,
    all_reduce_bytes,
    rank_workloads,
)
from ensemblekit.bench.timing import Timing
from ensemblekit.bench.workloads import Workload, all_workloads
from ensemblekit.core.errors import UsageError
from ensemblekit.testing.several_ranks import run_on_ranks

MEMBERS, BATCH, CLASSES, STEPS = 3, 4, 5, 2
MOST_ON_A_RANK = 2


def tiny(name: str) -> Workload:
    workload = replace(all_workloads()[name], batch_size=BATCH, input_shape=(1, 8, 8), num_outputs=CLASSES, steps=STEPS)
    return workload.changed(model={"hidden": [4]}, ensemble={"members": MEMBERS})


@pytest.fixture(scope="module")
def rounds(tmp_path_factory) -> dict[str, list[dict[str, float]]]:
    """A round of a coupled and of an uncoupled workload on each of two ranks."""
    folder = tmp_path_factory.mktemp("rounds")

    def work() -> None:
        rank, found = int(os.environ["RANK"]), {}
        for name in ("tiny-16", "tiny-uncoupled"):
            steps = RankSteps(tiny(name), "sequential", rank, 2, int(os.environ["MASTER_PORT"]))
            found[name] = asdict(steps())
            assert steps.bare_exchange() > 0
            steps.close()
            os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # the second meeting uses other keys of the store
        (folder / f"{rank}.json").write_text(json.dumps(found))

    run_on_ranks(work, 2)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return {name: [rank[name] for rank in found] for name in found[0]}


def test_a_rank_sends_the_outputs_of_its_members_and_nothing_else(rounds):
    outputs = MOST_ON_A_RANK * BATCH * CLASSES * 4 * STEPS
    assert [rank["bytes_sent"] for rank in rounds["tiny-16"]] == [outputs] * 2
    losses = MOST_ON_A_RANK * 4 * STEPS
    assert [rank["bytes_sent"] for rank in rounds["tiny-uncoupled"]] == [outputs + losses] * 2


def test_time_in_exchanges_is_part_of_the_time(rounds):
    for rank in (*rounds["tiny-16"], *rounds["tiny-uncoupled"]):
        assert 0 < rank["seconds_in_exchanges"] < rank["seconds"]


class StubRank:
    def __init__(self, result: object) -> None:
        self.answer = result

    def begin(self, name: str) -> None:
        self.name = name

    def result(self) -> object:
        return "stacked" if self.name == "name_of_engine" else self.answer


def test_the_share_of_exchanges_is_that_of_all_ranks_and_bytes_are_those_of_the_busiest():
    contestants = RankContestants([StubRank(RoundOnRank(4.0, 1.0, 30)), StubRank(RoundOnRank(4.0, 3.0, 50))])
    contestants()
    contestants()
    assert contestants.engine == "stacked"
    assert contestants.share_in_exchanges == pytest.approx(0.5)
    assert contestants.bytes_per_round == 50


def test_a_ring_all_reduce_sends_each_gradient_almost_twice():
    assert all_reduce_bytes(2, 1000) == 4000
    assert all_reduce_bytes(1000, 1000) == pytest.approx(7992)
    assert all_reduce_bytes(1, 1000) == 0


def result() -> RankResult:
    entries = [
        RankEntry("one process", "threaded", 1, Timing((0.2, 0.2)), 1.0, 0.0, 0.0, 0.0),
        RankEntry("2 ranks", "stacked", 2, Timing((0.1, 0.1)), 2.0, 0.25, 409_600.0, 0.0005),
    ]
    return RankResult(all_workloads()["real-convolutions"], tuple(entries), 1_409_600)


def test_remarks_have_the_formula_and_the_ratio_to_gradients():
    text = "\n".join(remarks(result()))
    assert "the exchange itself takes 0.50 ms" in text
    assert "2 · (n − 1) / n · 4 · 1,409,600 bytes = 5.6 MB, 13.8 times as much" in text
    assert "16 ResNet-18" in text
    assert "718.6 MB, 1,754.3 times as much" in text


def test_sizes_are_readable():
    assert [size(512), size(409_600), size(718_579_968)] == ["0.5 kB", "409.6 kB", "718.6 MB"]


def test_only_training_is_measured_on_ranks():
    assert [workload.name for workload in rank_workloads([])] == list(ranks.WORKLOADS)
    assert {workload.name for workload in rank_workloads([], quick=True)} == set(ranks.QUICK_WORKLOADS)
    with pytest.raises(UsageError, match='no workload "inference-16" for ranks'):
        rank_workloads(["inference-16"])


def test_the_command_prints_a_table_json_and_csv(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks, "measure_ranks", lambda workload, report: replace(result(), workload=workload))
    shown = commands.run("bench", "--ranks", "--quick", "--output", str(tmp_path / "ranks.csv"))
    assert shown.exit_code == 0, shown.output
    assert "small-convolutions" in shown.stdout
    assert "2.00×" in shown.stdout
    assert "25.0 %" in shown.stdout
    rows = list(csv.DictReader((tmp_path / "ranks.csv").read_text().splitlines()))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert {row["command"] for row in rows} == {"ensemblekit bench --ranks --quick"}
    found = json.loads(commands.run("bench", "--ranks", "--only", "tiny-16", "--json").stdout)
    (workload,) = found["workloads"]
    assert [entry["speed"] for entry in workload["contestants"]] == [1.0, 2.0]
