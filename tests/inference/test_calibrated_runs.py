"""Runs that are calibrated or have prediction sets: kept, used everywhere, undone, and refused where that is wrong."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_runs import small_spec, training
from helpers.tiny_runs import content

import ensemblekit as ek
from ensemblekit.core.errors import DataError, NumericError, RunError, UsageError
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.inference.prediction import predict_files
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.outputs import KeptOutputs

DIGITS = {"name": "digits", "limit_train": 500, "limit_test": 300, "validation_fraction": 0.3}
DIABETES = {"name": "diabetes", "validation_fraction": 0.3}
MLP = {"name": "mlp", "hidden": [16]}
FILE = "calibration.json"


def spec(**changes: Any) -> dict[str, Any]:
    return small_spec(**{"data": DIGITS, "model": MLP, "training": training(epochs=8), **changes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained runs that no test changes."""
    folder = tmp_path_factory.mktemp("trained")
    ek.train(spec(), folder / "digits", progress=False)
    ek.train(spec(data=DIABETES), folder / "diabetes", progress=False)
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "digits", tmp_path / "run"))


@pytest.fixture
def regression(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "diabetes", tmp_path / "regression"))


def inputs(path: Path) -> torch.Tensor:
    opened = ek.open_run(path)
    return torch.cat([batch.inputs for batch in ek.load_data(opened.spec.data, opened.spec.seed).test.batches(1000)])


def test_everything_that_reads_a_calibrated_run_uses_its_calibration(run):
    plain, x = ek.load(run), inputs(run)
    before = ek.evaluate_run(run)
    temperature = ek.calibrate(run, "temperature").temperature
    ensemble, opened = ek.load(run), ek.open_run(run)
    expected = (plain(x) / temperature).softmax(dim=-1)
    torch.testing.assert_close(ensemble.predict_proba(x), expected, rtol=1e-4, atol=1e-6)
    assert (ensemble.predict(x) == plain.predict(x)).all()
    kept = opened.outputs("test")
    torch.testing.assert_close(opened.combiner().probabilities(kept.outputs), expected, rtol=1e-3, atol=1e-5)
    nll = float(torch.nn.functional.nll_loss(expected.double().log(), kept.targets))
    evaluated = ek.evaluate_run(run)
    assert (evaluated.combiner, evaluated.calibration) == ("mean", "temperature")
    assert evaluated["test_nll"] == pytest.approx(nll, rel=1e-4)
    assert evaluated["test_nll"] != pytest.approx(before["test_nll"], rel=1e-3)
    assert evaluated["test_accuracy"] == before["test_accuracy"]
    comparison = ek.compare([run])
    assert comparison.table()[0]["nll"] == pytest.approx(nll, rel=1e-4)
    assert any(f"calibrated: temperature {temperature:.4g}, for the combiner mean" in note for note in comparison.notes)
    page = ek.report(run, run / "report.html").read_text()
    assert f"calibrated: temperature {temperature:.4g}" in page


def test_a_comparison_tells_a_calibrated_run_from_one_that_is_not(run, runs):
    ek.calibrate(run)
    ek.conform(run, 0.2)
    rows = {row["calibration"]: row for row in ek.compare([run, runs / "digits"]).table()}
    assert rows.keys() == {"none", "temperature"}
    assert rows["none"]["nll"] != pytest.approx(rows["temperature"]["nll"], rel=1e-3)
    assert (rows["none"]["conformal"], rows["temperature"]["conformal"]) == ("none", "lac 0.2")
    assert rows["none"]["coverage"] is None
    assert rows["temperature"]["coverage"] > 0.6


def test_copies_of_a_calibrated_ensemble_are_calibrated(run):
    ek.calibrate(run, "isotonic")
    ensemble, x = ek.load(run), inputs(run)[:20]
    for other in (copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))):
        assert other.predict_proba(x).equal(ensemble.predict_proba(x))


def test_undo_leaves_the_run_exactly_as_it_was(run):
    before = content(run)
    assert not ek.undo_calibrate(run)
    ek.calibrate(run, "beta")
    ek.conform(run, 0.2)
    assert content(run).keys() - before.keys() == {FILE}
    assert ek.undo_conform(run)
    assert ek.load(run).conformal is None
    assert ek.load(run).calibration is not None
    assert ek.undo_calibrate(run)
    assert not ek.undo_conform(run)
    assert content(run) == before


def test_a_calibration_is_deterministic_and_does_not_depend_on_test_data(run, monkeypatch):
    first = ek.calibrate(run, "vector").to_dict()
    file = (run / FILE).read_bytes()
    outputs = RunLoader.outputs

    def validation_only(self: RunLoader, split: str, data: Any = None) -> KeptOutputs:
        assert split == "validation"
        return outputs(self, split, data)

    monkeypatch.setattr(RunLoader, "outputs", validation_only)
    assert ek.calibrate(run, "vector").to_dict() == first
    assert (run / FILE).read_bytes() == file


def test_the_gain_shown_is_that_of_cross_fitting_and_not_of_the_fit(run):
    found = ek.calibrate(run, "isotonic")
    opened = ek.open_run(run)
    kept = opened.outputs("validation")
    fitted = torch.nn.functional.nll_loss(opened.combiner().log_probabilities(kept), kept.targets)
    assert found.after["nll"] > float(fitted) + 0.05
    flat = found.to_dict()
    assert flat["nll_after"] == found.after["nll"]
    assert {
        f"{name}_{when}" for name in ("nll", "ece", "adaptive_ece", "brier") for when in ("before", "after")
    } <= set(flat)
    assert all(not isinstance(value, dict | list) for value in flat.values())


@pytest.mark.parametrize("name", ["mean", "probabilities", "vote", "median", "weighted"])
def test_calibration_and_sets_work_after_every_combiner_which_is_named(tmp_path, name):
    ek.train(spec(ensemble={"members": 3, "combiner": name}), tmp_path / "run", progress=False)
    found = ek.calibrate(tmp_path / "run")
    assert found.combiner == found.to_dict()["combiner"] == name
    assert found.after["nll"] < found.before["nll"]
    assert ek.conform(tmp_path / "run", 0.2, "aps").combiner == name
    evaluated = ek.evaluate_run(tmp_path / "run")
    assert evaluated.combiner == name
    assert evaluated["test_coverage"] > 0.65


def test_stochastic_passes_and_boosting_can_be_calibrated(tmp_path):
    dropout = spec(model={**MLP, "dropout": 0.3}, method={"name": "dropout", "passes": 3})
    for name, changed in {"dropout": dropout, "boosting": spec(method="boosting")}.items():
        ek.train(changed, tmp_path / name, progress=False)
        for members in (False, True):
            ek.calibrate(tmp_path / name, members=members)
            assert ek.evaluate_run(tmp_path / name).calibration == "temperature"


@pytest.mark.parametrize("name", ["probabilities", "vote", "median", "weighted"])
def test_another_combiner_gives_the_metrics_of_a_run_trained_with_it(run, tmp_path, name):
    ek.train(spec(ensemble={"members": 3, "combiner": name}), tmp_path / "other", progress=False)
    ek.calibrate(run)  # of the run's own combination
    found = ek.evaluate_run(run, combiner=name)
    assert (found.combiner, found.calibration) == (name, None)
    assert found == pytest.approx(ek.open_run(tmp_path / "other").metrics, rel=1e-5, abs=1e-9)
    x, targets = inputs(run), ek.open_run(run).outputs("test").targets
    elsewhere = ek.evaluate_run(run, combiner=name, data=(x[:50], targets[:50]))
    assert elsewhere == pytest.approx(ek.evaluate_run(tmp_path / "other", data=(x[:50], targets[:50])), rel=1e-4)


def test_the_runs_own_combiner_is_calibrated_as_without_naming_it(run):
    ek.calibrate(run)
    assert ek.evaluate_run(run, combiner="mean") == pytest.approx(ek.evaluate_run(run), rel=1e-4, abs=1e-6)


def test_a_combiner_that_cannot_combine_the_run_is_refused(regression, run):
    with pytest.raises(UsageError, match="combines predictions of classes"):
        ek.evaluate_run(regression, combiner="vote")
    with pytest.raises(ek.EnsemblekitError, match="not a registered combiner"):
        ek.evaluate_run(run, combiner="nonsense")


def test_sets_are_predicted_in_python_and_printed_by_predict(tmp_path):
    table = tmp_path / "table.csv"
    random = np.random.default_rng(0)
    x = random.normal(size=(600, 2))
    labels = np.where(x[:, 0] + random.normal(size=600) > 0, "yes", "no")
    table.write_text("a,b,label\n" + "".join(f"{a},{b},{label}\n" for (a, b), label in zip(x, labels, strict=True)))
    data = {"name": "table", "path": str(table), "target": "label", "validation_fraction": 0.3}
    ek.train(spec(data=data, training=training(epochs=2)), tmp_path / "run", progress=False)
    ek.conform(tmp_path / "run", 0.1, "aps")
    ensemble = ek.load(tmp_path / "run")
    found = [prediction.to_dict() for prediction in predict_files(ensemble, [table])]
    sets = [set(filter(None, record["set"].split(" | "))) for record in found]
    assert np.mean([label in chosen for label, chosen in zip(labels, sets, strict=True)]) > 0.8
    assert {len(chosen) for chosen in sets} >= {1, 2}
    prepared = ensemble.spec.data.prepare(table, ensemble.preparation).inputs
    assert [set(chosen) for chosen in ensemble.predict_sets(prepared)] == sets
    assert ensemble.predict_sets(prepared[7:8]) == ensemble.predict_sets(prepared)[7:8]  # whatever the batch


def test_the_coverage_of_evaluate_compare_and_the_sets_agree(run):
    for score in ("lac", "aps", "raps"):
        ek.conform(run, 0.2, score)
        metrics = ek.evaluate_run(run, per_class=True)
        row = ek.compare([run]).table()[0]
        assert row["coverage"] == pytest.approx(metrics["test_coverage"], abs=0.004)  # one sample of 300 may differ
        assert row["mean_set_size"] == pytest.approx(metrics["test_mean_set_size"], abs=0.02)
        assert sum(entry["count"] for entry in metrics["set_sizes"]) == 300
        shares = [entry["coverage"] * entry["count"] for entry in metrics["classes"]]
        assert sum(shares) / 300 == pytest.approx(metrics["test_coverage"])
    ek.conform(run, 0.2)
    targets = ek.open_run(run).outputs("test").targets
    sets = ek.load(run).predict_sets(inputs(run))
    covered = [str(int(target)) in chosen for target, chosen in zip(targets, sets, strict=True)]
    assert np.mean(covered) == pytest.approx(ek.evaluate_run(run)["test_coverage"], abs=0.004)


@pytest.mark.parametrize("score", ["absolute", "normalised"])
def test_intervals_of_a_regression_cover_and_are_printed(regression, tmp_path, score):
    found = ek.conform(regression, 0.2, score)
    metrics, kept = ek.evaluate_run(regression), ek.open_run(regression).outputs("test")
    assert 0.6 < metrics["test_coverage"] <= 1
    ensemble, x = ek.load(regression), inputs(regression)
    low, high = ensemble.predict_interval(x)
    covered = (low <= kept.targets) & (kept.targets <= high)
    assert float(covered.double().mean()) == pytest.approx(metrics["test_coverage"], abs=0.02)
    assert float((high - low).mean()) == pytest.approx(metrics["test_mean_interval_width"], rel=1e-3)
    torch.testing.assert_close((low + high) / 2, ensemble.predict(x).double())
    assert (float((high - low).std()) > 1) == (score == "normalised")
    file = tmp_path / "new.csv"
    file.write_text(",".join("abcdefghij") + "\n" + ",".join(str(float(value)) for value in x[0]) + "\n")
    (answer,) = predict_files(ensemble, [file])
    assert answer.answer["low"] == pytest.approx(float(low[0]), rel=1e-4)
    assert answer.answer["high"] == pytest.approx(float(high[0]), rel=1e-4)
    assert found.to_dict()["expected_coverage"] >= 0.8


def test_split_conformal_intervals_are_the_quantile_of_the_validation_errors(regression):
    found = ek.conform(regression, 0.1)
    opened = ek.open_run(regression)
    kept = opened.outputs("validation")
    errors = np.sort((kept.targets - opened.combiner().combine(kept.outputs)).abs().flatten().numpy())
    rank = int(np.ceil(0.9 * (len(errors) + 1)))
    assert found.conformal.thresholds[0] == pytest.approx(errors[rank - 1], rel=1e-6)


def test_the_threshold_of_a_calibrated_run_comes_from_cross_fitted_probabilities(run):
    plain = ek.conform(run, 0.1).conformal.thresholds
    renewed = ek.calibrate(run)
    assert any("fitted again" in notice for notice in renewed.notices)
    kept = json.loads((run / FILE).read_text())["conformal"]["thresholds"]
    found = ek.conform(run, 0.1)
    assert list(found.conformal.thresholds) == kept != list(plain)
    assert found.calibration == "temperature"
    assert any("cross-fitted" in notice for notice in found.notices)
    assert any("not guaranteed" in notice for notice in found.notices)
    ek.undo_calibrate(run)
    assert json.loads((run / FILE).read_text())["conformal"]["thresholds"] == list(plain)


def damages(file: Path) -> dict[str, bytes]:
    original = file.read_bytes()
    edited = original.replace(b'"kind": "temperature"', b'"kind": "temperatura"')
    return {"edited": edited, "cut": original[: len(original) // 2], "empty": b"", "other": b"[]"}


@pytest.mark.faults
def test_a_damaged_calibration_is_named_with_a_fix_that_works(run):
    ek.calibrate(run)
    for damaged in damages(run / FILE).values():
        (run / FILE).write_bytes(damaged)
        for use in (ek.load, ek.evaluate_run, ek.conform, lambda path: ek.open_run(path).combiner()):
            with pytest.raises(RunError, match=r"calibration\.json") as caught:
                use(run)
            assert "calibrate" in caught.value.fix
            assert "--undo" in caught.value.fix
    assert ek.undo_calibrate(run)
    assert not (run / FILE).exists()
    ek.load(run)
    (run / FILE).write_bytes(b"{")
    ek.calibrate(run)  # replaces it
    assert ek.load(run).calibration is not None


@pytest.mark.faults
def test_a_calibration_of_other_weights_is_refused(run, tmp_path):
    ek.train(spec(seed=1), tmp_path / "other", progress=False)
    ek.calibrate(tmp_path / "other")
    shutil.copy(tmp_path / "other" / FILE, run / FILE)
    with pytest.raises(RunError, match="fitted to other weights"):
        ek.load(run)


@pytest.mark.faults
def test_a_finished_run_resumes_with_its_calibration_also_after_its_model_was_rebuilt(run):
    ek.calibrate(run)
    expected = ek.load(run).predict_proba(inputs(run))
    before = (run / FILE).read_bytes()
    ek.resume(run, progress=False)
    (run / "model.safetensors").unlink()
    ek.resume(run, progress=False)
    assert (run / FILE).read_bytes() == before
    assert ek.load(run).predict_proba(inputs(run)).equal(expected)


def test_more_epochs_end_the_calibration(run):
    ek.calibrate(run)
    ek.resume(run, progress=False, epochs=9)
    assert not (run / FILE).exists()
    assert ek.load(run).calibration is None


@pytest.mark.faults
def test_a_run_in_use_is_not_changed(run):
    with RunDirectory.open(run).lock(), pytest.raises(RunError, match="in use"):
        ek.calibrate(run)
    assert not (run / FILE).exists()


@pytest.mark.faults
def test_a_run_without_validation_data_is_refused(tmp_path):
    ek.train(spec(data={**DIGITS, "validation_fraction": 0}), tmp_path / "run", progress=False)
    for use in (ek.calibrate, ek.conform):
        with pytest.raises(UsageError, match="no validation data") as caught:
            use(tmp_path / "run")
        assert "validation_fraction" in caught.value.fix


@pytest.mark.faults
def test_a_regression_is_not_calibrated_and_has_no_sets(regression):
    with pytest.raises(UsageError, match="regression") as caught:
        ek.calibrate(regression)
    assert "conform" in caught.value.fix
    with pytest.raises(UsageError, match='no score "lac" for regression'):
        ek.conform(regression, score="lac")
    with pytest.raises(UsageError, match="no prediction sets"):
        ek.load(regression).predict_sets(inputs(regression))


@pytest.mark.faults
def test_wrong_arguments_are_refused_with_what_is_possible(run):
    with pytest.raises(UsageError, match="temperatur") as caught:
        ek.calibrate(run, "temperatur")
    assert '"temperature"' in caught.value.fix
    with pytest.raises(UsageError, match="only a temperature"):
        ek.calibrate(run, "beta", members=True)
    with pytest.raises(UsageError, match='no score "absolute" for classification'):
        ek.conform(run, score="absolute")
    for error in (0, 1, -0.1, float("nan")):
        with pytest.raises(UsageError, match="the error is"):
            ek.conform(run, error)
    with pytest.raises(UsageError, match="433 validation samples are too few"):
        ek.conform(run, 0.001)
    with pytest.raises(UsageError, match="no prediction sets"):
        ek.load(run).predict_sets(inputs(run))
    with pytest.raises(UsageError, match="no prediction intervals"):
        ek.load(run).predict_interval(inputs(run))


def nan(kept: KeptOutputs) -> KeptOutputs:
    outputs = kept.outputs.clone()
    outputs[1, 3, 0] = float("nan")
    return replace(kept, outputs=outputs)


@pytest.mark.faults
@pytest.mark.parametrize("use", [ek.calibrate, ek.conform])
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (nan, NumericError, "not finite"),
        (lambda kept: replace(kept, targets=torch.full_like(kept.targets, 2)), DataError, "are of class 2"),
        (lambda kept: KeptOutputs(kept.outputs[:, :7], kept.targets[:7], kept.index[:7]), DataError, "7 validation"),
    ],
    ids=["nan", "one class", "too few"],
)
def test_validation_outputs_that_nothing_can_be_fitted_to_are_refused(run, monkeypatch, use, change, error, text):
    outputs = RunLoader.outputs
    monkeypatch.setattr(RunLoader, "outputs", lambda self, *arguments: change(outputs(self, *arguments)))
    with pytest.raises(error, match=text):
        use(run)
    assert not (run / FILE).exists()
