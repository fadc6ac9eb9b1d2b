"""The benchmark measures in turn, reports its measurements, and compares equal work."""

from __future__ import annotations

import csv
import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from click.testing import Result
from helpers import commands
from torch.nn.functional import cross_entropy

from ensemblekit.bench import contestants, measurement, timing, workloads
from ensemblekit.bench.contestants import NAIVE, contest_of, naive_loop
from ensemblekit.bench.measurement import auto_choice, measure
from ensemblekit.bench.naive_loop import NAIVE_LOSSES
from ensemblekit.bench.peak_memory import peak_memory
from ensemblekit.bench.report import CSV_COLUMNS, auto_line
from ensemblekit.bench.timing import GemmMeter, Timing, count_flops, interleaved
from ensemblekit.bench.workloads import Workload, all_workloads
from ensemblekit.engines import threaded
from ensemblekit.engines.selection import Choice
from ensemblekit.engines.sequential import SequentialEngine
from ensemblekit.export import formats
from ensemblekit.spec.sections import ENGINES

CPU = torch.device("cpu")
TRAINING = [workload for workload in all_workloads().values() if workload.kind == "training"]


SMALL_MODELS: dict[str, dict[str, object]] = {
    "mlp": {"hidden": [4]},
    "resnet": {"width": 2, "blocks": 2},
    # a hand-written loop does not tell stochastic layers the number of the step, so they would sample other numbers
    "binary_resnet": {"width": 2, "blocks": 2, "stochastic": False},
    "mobilenet_v3_tiny": {},
}


def smaller(workload: Workload) -> Workload:
    """A workload of the same kind that takes no time."""
    model = SMALL_MODELS[workload.spec["model"]["name"]]
    method = {"at_epochs": [2, 3]} if workload.name.startswith("snapshot") else {}
    ensemble = {} if method else {"members": 3}
    small = replace(workload, batch_size=4, input_shape=(1, 8, 8), num_outputs=3, steps=1, rounds=2)
    return small.changed(model=model, ensemble=ensemble, method=method)


TINY = smaller(all_workloads()["tiny-16"])


@pytest.fixture
def small_ones(monkeypatch) -> None:
    """The command measures three tiny workloads, two of them when it is to be quick."""
    names = ("tiny-16", "small-weighted", "data-pipeline")
    known = {name: replace(all_workloads()[name], steps=1, rounds=2, batch_size=4) for name in names}
    small = {name: smaller(known[name]) if known[name].spec else known[name] for name in names}
    quick = {name: small[name] for name in names[:2]}
    monkeypatch.setattr(workloads, "all_workloads", lambda quick_ones=False: quick if quick_ones else small)


def run(*arguments: str) -> Result:
    return commands.run("bench", *arguments)


def test_contestants_take_turns_after_a_warm_up_of_each():
    calls: list[str] = []
    work = {name: lambda name=name: calls.append(name) for name in "ab"}
    timings = interleaved(work, rounds=3, between=lambda: calls.append("|"))
    assert "".join(calls) == "ab" + "ab|" * 3
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 3, "b": 3}


def test_time_is_taken_after_the_device_has_finished(monkeypatch):
    clock = [0.0]

    def pass_time(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    work = {"a": lambda: pass_time(1), "b": lambda: pass_time(4)}
    timings = interleaved(work, rounds=2, between=lambda: pass_time(100), synchronise=lambda: pass_time(2))
    assert timings["a"].seconds == (3.0, 3.0)
    assert timings["b"].seconds == (6.0, 6.0)


def test_medians_and_half_the_interquartile_range_describe_the_rounds():
    rounds = Timing((9.0, 1.0, 2.0, 3.0, 4.0))
    assert rounds.median == 3
    assert rounds.spread == (4 - 2) / 2
    assert rounds.divided_by(2).seconds == (4.5, 0.5, 1.0, 1.5, 2.0)
    assert Timing((5.0,)).spread == 0


def test_the_arithmetic_of_a_linear_layer_is_counted_forward_and_backward():
    weight = torch.zeros(3, 5, requires_grad=True)
    inputs = torch.ones(7, 3, requires_grad=True)
    assert count_flops(lambda: (inputs @ weight).sum().backward()) == 3 * 2 * 7 * 3 * 5


def test_the_peak_is_the_best_rate_of_matrix_products_and_convolutions(monkeypatch):
    times = iter([0, 2, 2, 3, 3, 7, 10, 12, 12, 16, 16, 24])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))
    meter = GemmMeter(CPU)
    meter.measure()
    flops = {name: count_flops(compute) for name, (_, compute) in meter.products.items()}
    assert flops == {"matmul": 2 * 1024**3, "convolution": 2 * 16 * 16**2 * 256 * 256 * 9}
    assert meter.rates == {"matmul": flops["matmul"], "convolution": flops["convolution"] / 2}
    assert meter.best_rate == flops["convolution"] / 2 > flops["matmul"]


@pytest.mark.parametrize("workload", TRAINING, ids=lambda workload: workload.name)
def test_the_hand_written_loop_computes_the_same_as_the_engines(workload):
    """Two steps of both from the same weights end with the same outputs of every member."""
    small = smaller(workload)
    batch, weights = small.batch(CPU), small.sample_weights(CPU)
    by_hand, members = small.members(CPU), small.members(CPU)
    loop = naive_loop(small, by_hand)
    engine = SequentialEngine(members, small.objective(), small.settings(CPU))
    for step in range(2):
        expected, _ = engine.train_step(batch, weights, small.learning_rate, step)
        torch.testing.assert_close(loop.step(batch.inputs, batch.targets, weights), expected)
    outputs = torch.stack([member.network.eval()(batch.inputs) for member in by_hand])
    torch.testing.assert_close(outputs, engine.predict(batch.inputs), rtol=1e-4, atol=1e-5)


def test_the_coupled_loss_is_half_the_ensembles_and_half_the_members():
    outputs = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2, 4])
    members = sum(cross_entropy(member, targets) for member in outputs) / 3
    expected = (cross_entropy(outputs.mean(0), targets) + members) / 2
    torch.testing.assert_close(NAIVE_LOSSES["coupled"](list(outputs), targets, None), expected)


@pytest.mark.parametrize("name", sorted(all_workloads()))
def test_every_workload_can_be_made_and_described_to_another_process(name):
    workload = all_workloads()[name]
    assert Workload.from_table(json.loads(json.dumps(workload.to_table()))) == workload
    if workload.spec:
        assert workload.run_spec.ensemble.members in (8, 16, 64)
    assert f" {name}" in run("--help").output.replace("\n", " ")


@pytest.mark.parametrize("name", ["inference-16", "data-pipeline"])
def test_every_contestant_of_inference_and_of_the_data_pipeline_runs(name):
    workload = replace(all_workloads()[name], batch_size=4, steps=2)
    workload = smaller(workload) if workload.spec else workload
    with ExitStack() as stack:
        rounds = {name: make(stack) for name, make in contest_of(workload, CPU).makers.items()}
        assert list(rounds) == [NAIVE, "ensemblekit", *(["onnxruntime"] if name.startswith("inference") else [])]
        for work in rounds.values():
            work()


def test_without_its_extra_onnxruntime_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    contest = contest_of(smaller(all_workloads()["inference-16"]), CPU)
    assert list(contest.makers) == [NAIVE, "ensemblekit"]
    assert "pip install 'ensemblekit[onnx]'" in contest.cannot_run["onnxruntime"]


def test_kept_copies_do_not_count_as_useful_arithmetic():
    snapshot = smaller(all_workloads()["snapshot-16"])
    assert [slot.frozen for slot in snapshot.members(CPU)] == [True, True, False]
    alone = snapshot.changed(method={"at_epochs": [2]})
    assert contest_of(snapshot, CPU).flops_of_step() == contest_of(alone, CPU).flops_of_step() > 0


def test_ratios_compare_medians_with_the_naive_one_and_auto_with_the_best(monkeypatch):
    timings = {"naive": Timing((4.0, 8.0, 6.0)), "sequential": Timing((3.0,) * 3), "stacked": Timing((2.0,) * 3)}
    monkeypatch.setattr(measurement, "interleaved", lambda *_: timings)
    monkeypatch.setattr(contestants, "choose_engine", lambda *_: Choice("sequential", {}))
    meter = measurement.GemmMeter(CPU)
    meter.rates["convolution"] = 100.0
    monkeypatch.setattr(measurement, "GemmMeter", lambda _: meter)
    result = measure(replace(TINY, steps=2), CPU, with_memory=False)
    assert {entry.contestant: entry.ratio for entry in result.entries if not entry.cannot_run} == {
        "naive": 1,
        "sequential": 2,
        "stacked": 3,
    }
    flops = contest_of(TINY, CPU).flops_of_step()
    assert [entry.gemm_fraction for entry in result.entries[:3]] == [flops / s / 100 for s in (3, 1.5, 1)]
    assert (result.auto.engine, result.auto.times_the_best) == ("sequential", 1.5)


def test_the_choice_of_auto_is_described():
    timings = {"naive": Timing((1.0,)), "threaded": Timing((6.0,)), "stacked": Timing((4.0,))}
    right = auto_line(auto_choice("stacked", 0.52, timings))
    assert right == "auto would choose stacked (the fastest) after 0.5 s of measuring"
    wrong = auto_line(auto_choice("threaded", 1, timings))
    assert "threaded (1.50× the time of the fastest)" in wrong


def test_an_engine_that_cannot_run_is_named_with_the_reason(small_ones, monkeypatch, tmp_path):
    monkeypatch.setattr(threaded, "num_cores", lambda: 1)
    result = run("--quick", "--only", "tiny-16", "--output", str(tmp_path / "out.csv"))
    assert result.exit_code == 0, result.stderr
    assert "threaded cannot run this workload: there is only one core" in result.output
    notes = [row["note"] for row in csv.DictReader((tmp_path / "out.csv").read_text().splitlines())]
    assert notes == ["", "", "", "there is only one core"]


def test_peak_memory_is_measured_in_a_process_of_its_own():
    large = replace(smaller(all_workloads()["small-convolutions"]), batch_size=2048)
    images = 2048 * 2 * 8 * 8 * 4  # activations of one layer of one member: two channels of float32
    process = 200 * 2**20  # less than a Python process holds once it has imported torch, which must not be counted
    assert 3 * 3 * images < peak_memory(large, NAIVE) < process


def test_the_csv_has_a_row_for_each_contestant_with_date_machine_and_command(small_ones, tmp_path):
    path = tmp_path / "bench.csv"
    result = run("--quick", "--only", "tiny-16", "--output", str(path))
    assert result.exit_code == 0, result.stderr
    reader = csv.DictReader(path.read_text().splitlines())
    rows = list(reader)
    assert tuple(reader.fieldnames) == CSV_COLUMNS
    assert [row["contestant"] for row in rows] == ["naive", *ENGINES]
    for row in rows:
        assert row["command"] == "ensemblekit bench --quick --only tiny-16"
        assert f"torch {torch.__version__}" in row["machine"]
        assert row["auto_choice"] in ENGINES
        assert float(row["median_seconds"]) > 0
        assert row["peak_memory_mb"] == ""
    assert rows[0]["ratio_to_naive"] == "1"


def test_json_has_every_round(small_ones):
    result = run("--quick", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert [entry["name"] for entry in found["workloads"]] == ["tiny-16", "small-weighted"]
    contestants = found["workloads"][0]["contestants"]
    assert all(len(entry["seconds"]) == 2 for entry in contestants)
    assert contestants[0]["ratio_to_naive"] == 1
    assert found["workloads"][0]["auto"]["engine"] in ENGINES
    assert found["gemm_flops_per_second"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "tiny-61"], 'no workload "tiny-61"; --only; did you mean "tiny-16"? allowed: data-pipeline'),
        (["--quick", "--only", "data-pipeline"], 'workload "data-pipeline" is too large for --quick'),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(small_ones, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_file_that_cannot_be_written_is_found_before_anything_is_measured(small_ones, tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "measure", lambda *_, **__: pytest.fail("it measured first"))
    result = run("--output", str(tmp_path / "missing" / "bench.csv"))
    assert result.exit_code == 2
    assert "cannot be written: No such file or directory" in result.stderr
