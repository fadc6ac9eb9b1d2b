"""Kept outputs: what every member answered on validation and test data, without running a network again."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_runs import small_spec, training
from helpers.tiny_runs import SPEC, content, train, train_until
from safetensors.torch import load_file
from sklearn.datasets import load_diabetes

import ensemblekit as ek
from ensemblekit.core.errors import DataError, RunError, UsageError
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.inference.combining import Combiner
from ensemblekit.runs import outputs as outputs_file
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.outputs import KeptOutputs

GOLDEN = Path(__file__).parents[1] / "runs" / "golden"
DIGITS = small_spec()["data"] | {"validation_fraction": 0.2}
DIABETES = {"data": {"name": "diabetes", "validation_fraction": 0.2}, "model": {"name": "mlp", "hidden": [8]}}
KINDS: dict[str, dict[str, Any]] = {
    "classification": small_spec(data=DIGITS),
    "regression": small_spec(**DIABETES),
    "stochastic passes": small_spec(
        data=DIGITS, model={"name": "mlp", "hidden": [8], "dropout": 0.3}, method={"name": "dropout", "passes": 3}
    ),
    "boosting": small_spec(data=DIGITS, method="boosting", training=training(epochs=4)),
    "stacking": small_spec(data=DIGITS, method="stacking"),
    "snapshots": small_spec(data=DIGITS, method={"name": "snapshot", "cycles": 3}, training=training(epochs=6)),
    "the best epoch": small_spec(data=DIGITS, training=training(keep="best")),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "run").path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize("kind", KINDS)
def test_kept_outputs_are_those_of_the_loaded_ensemble_and_give_the_metrics_of_the_result(tmp_path, kind):
    ek.train(KINDS[kind], tmp_path / "run", progress=False)
    run, ensemble = ek.open_run(tmp_path / "run"), ek.load(tmp_path / "run")
    data = ek.load_data(run.spec.data, run.spec.seed)
    combiner = run.combiner()
    for name, split in (("test", data.test), ("validation", data.validation)):
        kept = run.outputs(name)
        inputs = torch.cat([batch.inputs for batch in split.batches(1000)])
        expected = ensemble.member_outputs(inputs)
        torch.testing.assert_close(kept.outputs, expected, rtol=1e-5, atol=1e-4 if kind == "regression" else 1e-5)
        torch.testing.assert_close(combiner.combine(kept.outputs), ensemble(inputs), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(combiner.combine(expected), ensemble.combine(expected), rtol=0, atol=0)
        targets = split.targets if data.target_scaling is None else data.target_scaling.restore(split.targets)
        assert kept.targets.equal(targets)
        assert kept.index.equal(split.indices)
        recorded = run.metrics if name == "test" else run.validation
        computed = {f"{name}_{metric}": value for metric, value in combiner.metrics(kept).items()}
        assert computed == pytest.approx(recorded, rel=1e-5, abs=1e-9)


def test_outputs_of_regression_are_in_the_original_units(tmp_path):
    inputs, progression = load_diabetes(return_X_y=True)
    spec = {"model": {"name": "mlp", "hidden": [8]}, "training": {"epochs": 2}, "ensemble": {"members": 2}}
    data = ((inputs, progression), (inputs[:50], progression[:50]))
    run = ek.train(spec, tmp_path / "run", progress=False, data=data)
    kept = run.outputs("test")
    torch.testing.assert_close(kept.targets.flatten(), torch.from_numpy(progression[:50]))
    torch.testing.assert_close(kept.outputs, run.ensemble.member_outputs(inputs[:50]))
    error = (run.combiner().combine(kept.outputs) - kept.targets).square().mean()
    assert float(error) == pytest.approx(run.metrics["test_mse"], rel=1e-5)


def test_probabilities_of_kept_outputs_are_the_ensemble_s(trained):
    run = ek.open_run(trained)
    kept = run.outputs("test")
    probabilities = run.combiner().probabilities(kept.outputs)
    torch.testing.assert_close(probabilities, kept.outputs.mean(dim=0).softmax(dim=-1))
    accuracy = (probabilities.argmax(dim=-1) == kept.targets).double().mean()
    assert float(accuracy) == run.metrics["test_accuracy"]


def test_the_index_numbers_samples_as_their_owner_does(tmp_path):
    inputs = torch.arange(60.0).view(60, 1).repeat(1, 2)
    test = inputs[:30] + 100
    spec = {"model": {"name": "mlp", "hidden": [2]}, "ensemble": {"members": 1}, "training": {"epochs": 1}}
    spec |= {"data": {"name": "given", "validation_fraction": 0.25, "limit_test": 7}}
    labels = torch.arange(60) % 3
    data = ((inputs, labels), (test, labels[:30]))
    run = ek.train(spec, tmp_path / "run", progress=False, data=data)
    kept = {"validation": (run.outputs("validation"), inputs), "test": (run.outputs("test"), test)}
    assert (len(kept["validation"][0]), len(kept["test"][0])) == (15, 7)
    for part, owned in kept.values():
        expected = run.ensemble.member_outputs(owned[part.index])
        torch.testing.assert_close(part.outputs, expected)
        assert part.targets.equal(part.index % 3)


def test_a_data_set_that_is_streamed_keeps_its_numbering(tmp_path):
    samples = [(torch.full((2,), float(number)), number % 2) for number in range(40)]
    for storage in ("stream", "memory"):
        dataset = InMemoryData(storage=storage, limit_test=5, validation_fraction=0.2).of(samples, samples)
        data = ek.load_data(dataset, 0)
        for split in (data.train, data.validation, data.test):
            inputs = torch.cat([batch.inputs for batch in split.batches(8)])
            assert inputs[:, 0].long().equal(split.indices)


def test_reading_kept_outputs_runs_no_network(run, monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a network was built or data was loaded")

    monkeypatch.setattr("ensemblekit.inference.kept_outputs.load_ensemble", refuse)
    monkeypatch.setattr("ensemblekit.inference.kept_outputs.load_data", refuse)
    (run / "model.safetensors").unlink()  # the weights are not even looked at
    opened = ek.open_run(run)
    assert opened.outputs("test").outputs.shape == (2, 20, 10)
    assert opened.outputs("validation").outputs.shape == (2, 288, 10)
    assert opened.combiner().num_members == 2


def test_a_run_without_validation_data_says_so(tmp_path):
    data = {"name": "digits", "limit_train": 40, "validation_fraction": 0}
    run = ek.train({**SPEC, "data": data, "training": {"epochs": 1}}, tmp_path / "run", progress=False)
    with pytest.raises(UsageError, match="the run has no validation data"):
        run.outputs("validation")
    with pytest.raises(UsageError, match=r'(?s)no outputs are kept for "tset".*did you mean "test"'):
        run.outputs("tset")


def test_an_unfinished_run_has_no_outputs(tmp_path):
    train_until(tmp_path / "run", 3)
    run = ek.open_run(tmp_path / "run")
    for ask in (run.outputs, run.combiner):
        with pytest.raises(RunError, match="the run has not finished"):
            ask()


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "pickle", "other tensors"])
def test_damaged_outputs_are_named_and_rebuilt(run, damage):
    file = run / "outputs.safetensors"
    before = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        flipped = before[:-9] + bytes([before[-9] ^ 1]) + before[-8:]
        changed = {"flipped": flipped, "cut": before[:-50], "pickle": b"cos\nsystem\n(S'true'\ntR."}
        other = (run / "model.safetensors").read_bytes()
        file.write_bytes(changed.get(damage, other))
    with pytest.raises(RunError, match=r"outputs\.safetensors") as caught:
        ek.open_run(run).outputs("test")
    assert caught.value.exit_code == 5
    assert f"ensemblekit resume {run} rebuilds it" in caught.value.fix
    resumed = ek.resume(run, progress=False)
    assert file.read_bytes() == before
    assert any("rebuilt from the checkpoints" in text and "outputs.safetensors" in text for text in resumed.notices)
    assert ek.open_run(run).outputs("test").outputs.shape == (2, 20, 10)


def test_a_run_whose_own_file_has_other_tensors_is_refused(run):
    directory = RunDirectory.open(run)
    kept = ek.open_run(run).outputs("test")
    directory.add_outputs({"test": replace(kept, index=kept.index[:-1])})
    with pytest.raises(RunError, match="the tensors of the test data do not fit"):
        ek.open_run(run).outputs("test")


def test_a_run_of_0_1_0_is_evaluated_once_and_keeps_its_outputs(tmp_path):
    path = Path(shutil.copytree(GOLDEN / "finished", tmp_path / "run"))
    computed = ek.open_run(path).outputs("test")
    result = json.loads((path / "result.json").read_text())
    assert result["outputs_sha256"] == ek.sha256_of_file(path / "outputs.safetensors")
    (path / "model.safetensors").rename(tmp_path / "weights")  # they are not needed any more
    again = ek.open_run(path)
    assert again.outputs("test").outputs.equal(computed.outputs)
    metrics = again.combiner().metrics(again.outputs("test"))
    assert {name: metrics[name] for name in ("loss", "accuracy", "brier")} == pytest.approx(
        {name: again.metrics[f"test_{name}"] for name in ("loss", "accuracy", "brier")}, rel=1e-5
    )
    (tmp_path / "weights").rename(path / "model.safetensors")
    ek.resume(path, progress=False)  # still finished, and intact
    assert ek.open_run(path).outputs("test").outputs.equal(computed.outputs)


def forget(path: Path) -> None:
    """Make a run one that has kept no outputs."""
    directory = RunDirectory.open(path)
    result = directory.read_result()
    directory.write_result({key: value for key, value in result.items() if key != "outputs_sha256"})
    (path / "outputs.safetensors").unlink()


def test_outputs_on_demand_equal_those_of_the_trainer(run):
    before = {split: ek.open_run(run).outputs(split) for split in ("test", "validation")}
    forget(run)
    for split, kept in before.items():
        computed = ek.open_run(run).outputs(split)
        torch.testing.assert_close(computed.outputs, kept.outputs)
        assert computed.targets.equal(kept.targets)
        assert computed.index.equal(kept.index)


def test_outputs_on_demand_do_not_write_to_a_directory_in_use(run):
    forget(run)
    before = {name: data for name, data in content(run).items() if name != ".lock"}
    with RunDirectory.open(run).lock():
        opened = ek.open_run(run)
        assert opened.outputs("test").outputs.shape == (2, 20, 10)
        assert opened.outputs("validation").outputs.shape == (2, 288, 10)
        assert {name: data for name, data in content(run).items() if name != ".lock"} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_outputs_on_demand_of_a_read_only_directory(run):
    forget(run)
    run.chmod(0o555)
    try:
        assert ek.open_run(run).outputs("test").outputs.shape == (2, 20, 10)
    finally:
        run.chmod(0o755)


def test_python_data_is_passed_again_for_outputs_on_demand(tmp_path):
    data = (torch.randn(50, 3), torch.arange(50) % 2)
    spec = {"model": {"name": "mlp", "hidden": [2]}, "training": {"epochs": 1, "keep_outputs": False}}
    run = ek.train(spec, tmp_path / "run", progress=False, data=data)
    assert not (tmp_path / "run" / "outputs.safetensors").exists()
    with pytest.raises(DataError, match="data passed in Python"):
        run.outputs("test")
    kept = run.outputs("test", data=data)
    assert kept.outputs.shape == (5, 10, 2)
    assert run.combiner().metrics(kept)["loss"] == pytest.approx(run.metrics["test_loss"], rel=1e-5)
    assert not (tmp_path / "run" / "outputs.safetensors").exists()
    with pytest.raises(DataError, match="not what the run was started with"):
        ek.open_run(run.path).outputs("test", data=(data[0] + 1, data[1]))


def test_outputs_that_are_too_large_are_not_kept_and_the_plan_says_so(tmp_path, monkeypatch):
    plans: list[Any] = []

    class Plans:
        def close(self) -> None: ...

        @ek.hookimpl
        def run_started(self, plan):
            plans.append(dict(plan))

    def train_with(limit: int, name: str) -> Path:
        for module in ("runs.outputs", "training.plan"):
            monkeypatch.setattr(f"ensemblekit.{module}.MAX_BYTES", limit)
        return ek.train(SPEC, tmp_path / name, progress=Plans()).path

    size = 2 * (20 + 288) * 10 * 4
    assert "outputs.safetensors" in content(train_with(size, "fits"))
    path = train_with(size - 1, "large")
    assert "outputs.safetensors" not in content(path)
    assert "outputs" not in plans[0]
    assert plans[1]["outputs"].startswith("not kept: 0 MiB, more than")
    assert ek.open_run(path).outputs("test").outputs.shape == (2, 20, 10)
    assert "outputs.safetensors" not in content(path)
    assert ek.resume(path, progress=False).status == "finished"


def test_a_run_that_is_trained_further_keeps_its_new_outputs(run):
    before = ek.open_run(run).outputs("test").outputs
    longer = ek.resume(run, progress=False, epochs=5)
    assert not longer.outputs("test").outputs.equal(before)
    computed = longer.combiner().metrics(longer.outputs("test"))["loss"]
    assert computed == pytest.approx(longer.metrics["test_loss"], rel=1e-6)


def test_the_file_has_float32_outputs_with_their_targets_and_index(run):
    tensors = load_file(run / "outputs.safetensors")
    parts = {f"{split}.{name}" for split in ("test", "validation") for name in ("outputs", "targets", "index")}
    assert tensors.keys() == parts
    assert tensors["test.outputs"].dtype == torch.float32


def test_a_combiner_of_fewer_members(trained):
    run = ek.open_run(trained)
    combiner, outputs = run.combiner(), run.outputs("test").outputs
    assert combiner.of_size(1).combine(outputs[:1]).equal(outputs[0])
    assert isinstance(combiner, Combiner)


def test_predictions_are_timed(trained):
    assert ek.open_run(trained).milliseconds_per_1000 > 0
    assert ek.open_run(GOLDEN / "finished").milliseconds_per_1000 is None


def test_large_targets_with_a_small_spread_keep_their_digits(tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(80, 2, generator=generator, dtype=torch.float64)
    targets = 1e9 + inputs.sum(dim=1)
    spec = {"model": {"name": "mlp", "hidden": [8]}, "training": {"epochs": 2}, "ensemble": {"members": 2}}
    run = ek.train(spec, tmp_path / "run", progress=False, data=((inputs, targets), (inputs, targets)))
    kept = run.outputs("test")
    torch.testing.assert_close(kept.targets.flatten(), targets, rtol=0, atol=1e-5)
    assert run.combiner().metrics(kept)["mse"] == pytest.approx(run.metrics["test_mse"], rel=1e-5)


def test_the_limit_is_512_mib():
    assert outputs_file.MAX_BYTES == 512 * 2**20
    assert "512 MiB" in type(ek.load_spec(SPEC).training).model_fields["keep_outputs"].description
    assert len(KeptOutputs(torch.zeros(1, 3, 2), torch.zeros(3), torch.arange(3))) == 3
