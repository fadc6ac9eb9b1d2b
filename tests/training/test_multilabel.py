"""Multi-label targets end to end: from Python and tables, through training, to predictions and reports."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import last_error, run

import ensemblekit as ek
from ensemblekit.core.errors import DataError, SpecError
from ensemblekit.inference.prediction import predict_files

RANDOM = torch.Generator().manual_seed(0)
INPUTS = torch.randn(300, 6, generator=RANDOM)
LABELS = INPUTS @ torch.randn(6, 4, generator=RANDOM) > 1.0
NAMES = ["red", "green", "blue", "none"]


def spec(**changes: object) -> dict:
    training = {"epochs": 15, "batch_size": 32, "optimizer": {"name": "adam", "lr": 0.02}}
    model = {"name": "mlp", "hidden": [16]}
    engine = {"name": "sequential", "device": "cpu"}
    return {
        "data": "given",
        "model": model,
        "ensemble": {"members": 3},
        "training": training,
        "engine": engine,
    } | changes


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "labels.csv"
    rows = [
        ",".join(f"{value:.5f}" for value in x) + "," + ",".join(str(int(y)) for y in labels)
        for x, labels in zip(INPUTS.tolist(), LABELS.tolist(), strict=True)
    ]
    path.write_text("\n".join([",".join([*"abcdef", *NAMES]), *rows]))
    return path


@pytest.fixture(scope="module")
def trained(table, tmp_path_factory) -> ek.Run:
    data = {"name": "table", "path": str(table), "target": NAMES, "task": "multilabel"}
    return ek.train(spec(data=data), tmp_path_factory.mktemp("runs") / "run", progress=False)


def test_labels_of_a_table_are_learned_with_binary_cross_entropy(trained):
    assert trained.spec.loss.name == "bce"
    metrics = trained.metrics
    assert metrics["test_micro_f1"] > 0.85
    assert metrics["test_label_accuracy"] > 0.9
    assert metrics["test_accuracy"] > metrics["test_mean_member_accuracy"] - 0.05
    assert {"train_accuracy", "train_loss", "validation_macro_f1"} <= set(trained.history[-1])


def test_the_ensemble_predicts_labels_and_their_probabilities(trained):
    ensemble = trained.ensemble
    assert ensemble.classes == tuple(NAMES)
    inputs = torch.randn(5, 6)
    probabilities, predicted = ensemble.predict_proba(inputs), ensemble.predict(inputs)
    assert probabilities.shape == (5, 4)
    assert torch.equal(predicted, probabilities >= 0.5)
    assert torch.allclose(probabilities, ensemble.member_outputs(inputs).mean(dim=0).sigmoid())


def test_predictions_for_a_file_name_the_labels(trained, table):
    records = [one.to_dict() for one in predict_files(trained.ensemble, [table], members=True)]
    shown = [name for name in records[0] if name.startswith("probability")]
    assert shown == [f"probability[{name}]" for name in NAMES]
    for record in records[:50]:
        expected = [name for name in NAMES if record[f"probability[{name}]"] >= 0.5]
        assert record["labels"] == ";".join(expected)
        assert 0 <= record["agreement"] <= 1
        assert {"member_labels[0]", "member_labels[2]"} <= set(record)
    right = [
        record["labels"] == ";".join(name for name, has in zip(NAMES, labels, strict=True) if has)
        for record, labels in zip(records, LABELS.tolist(), strict=True)
    ]
    assert np.mean(right) > 0.7


def test_the_run_can_be_evaluated_compared_and_reported(trained, table, tmp_path):
    again = ek.evaluate_run(trained.path, per_class=True)
    assert again["test_micro_f1"] == pytest.approx(trained.metrics["test_micro_f1"])
    assert [row["class"] for row in again["classes"]] == NAMES
    on_file = ek.evaluate_run(trained.path, data=table)
    assert on_file["test_label_accuracy"] > 0.9
    other = ek.train(trained.spec, tmp_path / "other", progress=False)
    row = ek.compare([trained.path, other.path]).table()[0]
    assert row["accuracy"] == pytest.approx(trained.metrics["test_accuracy"])
    assert row["nll"] == pytest.approx(trained.metrics["test_nll"], rel=1e-5)
    assert "labels are all right" in ek.report(trained.path).read_text()


def test_the_commands_show_a_run_on_labels(trained):
    shown = run("evaluate", str(trained.path))
    assert shown.exit_code == 0
    assert "micro f1" in shown.stdout.replace("_", " ").lower()
    assert "green" in shown.stdout


@pytest.mark.parametrize(
    "labels", [LABELS, LABELS.long(), LABELS.numpy(), LABELS.int().tolist()], ids=lambda y: type(y)
)
def test_integers_and_booleans_in_columns_are_labels(labels, tmp_path):
    settings = {"epochs": 1, "batch_size": 32}
    trained = ek.train(spec(training=settings), tmp_path / "run", progress=False, data=(INPUTS, labels))
    assert trained.spec.loss.name == "bce"
    assert trained.ensemble.info.task == "multilabel"
    kept = trained.outputs("test")
    assert torch.equal(kept.targets, LABELS[kept.index].float())


def test_real_numbers_in_columns_are_still_values(tmp_path):
    settings = {"epochs": 1, "batch_size": 32}
    trained = ek.train(spec(training=settings), tmp_path / "run", progress=False, data=(INPUTS, LABELS.float()))
    assert trained.ensemble.info.task == "regression"


def test_integers_other_than_0_and_1_in_columns_are_refused(tmp_path):
    with pytest.raises(DataError, match="expected one class index per sample"):
        ek.train(spec(), tmp_path / "run", progress=False, data=(INPUTS, 2 * LABELS.long()))


def test_a_table_with_another_number_in_a_label_is_refused_with_its_line(table, tmp_path):
    broken = tmp_path / "broken.csv"
    broken.write_text(table.read_text().rpartition(",")[0] + ",3")
    data = {"name": "table", "path": str(broken), "target": NAMES, "task": "multilabel"}
    with pytest.raises(DataError, match="expected 0 or 1, got 3") as error:
        ek.train(spec(data=data), tmp_path / "run", progress=False)
    assert 'line 301, column "none"' in error.value.where


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "gaussian_nll"])
def test_losses_of_other_tasks_are_refused(loss, table):
    data = {"name": "table", "path": str(table), "target": NAMES, "task": "multilabel"}
    with pytest.raises(SpecError, match=r'but the task of "table" is multilabel[^"]*use loss = "bce"'):
        ek.load_spec(spec(data=data, training={"loss": loss}))


@pytest.mark.parametrize("method", ["divloss", "diversity_cooperation"])
def test_methods_that_compare_distributions_over_classes_are_refused(method, table):
    data = {"name": "table", "path": str(table), "target": NAMES, "task": "multilabel"}
    with pytest.raises(SpecError, match="needs logits as outputs"):
        ek.load_spec(spec(data=data, method=method))


def test_labels_need_a_list_of_columns(table):
    result = run("validate", "digits", "--set", f'data={{name="table",path="{table}",target="red",task="multilabel"}}')
    assert result.exit_code == 2
    assert "needs a list of target columns" in last_error(result) + result.stderr


@pytest.mark.parametrize(
    "method", [{"name": "gncl", "lambda": 0.5}, {"name": "gncl", "mode": "exact"}, {"name": "smcl"}]
)
@pytest.mark.parametrize("engine", ["stacked", "threaded"])
def test_methods_and_engines_train_on_labels(method, engine, tmp_path):
    settings = {"epochs": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.05}}
    data = ((INPUTS[:200], LABELS[:200]), (INPUTS[200:], LABELS[200:]))
    runs = [
        ek.train(
            spec(training=settings, method=method, engine={"name": name, "device": "cpu"}),
            tmp_path / name,
            progress=False,
            data=data,
        )
        for name in ("sequential", engine)
    ]
    assert runs[1].metrics["test_loss"] == pytest.approx(runs[0].metrics["test_loss"], rel=1e-3)


@pytest.mark.parametrize("combiner", ["mean", "median", "probabilities", "weighted"])
def test_combiners_work_on_labels(combiner, tmp_path):
    settings = {"epochs": 3, "batch_size": 32, "optimizer": {"name": "adam", "lr": 0.02}}
    table = spec(training=settings, ensemble={"members": 3, "combiner": combiner})
    trained = ek.train(table, tmp_path / "run", progress=False, data=(INPUTS, LABELS))
    kept = trained.outputs("test")
    if combiner == "probabilities":
        expected = kept.outputs.sigmoid().mean(dim=0)
        assert torch.allclose(trained.combiner().probabilities(kept.outputs), expected, atol=1e-6)
    assert trained.metrics["test_nll"] < 4 * 0.6931


def test_a_vote_over_classes_is_refused_for_labels(tmp_path):
    table = spec(ensemble={"members": 3, "combiner": "vote"})
    with pytest.raises(SpecError, match="combines predictions of classes"):
        ek.train(table, tmp_path / "run", progress=False, data=(INPUTS, LABELS))


def test_a_label_that_no_training_sample_has_is_said(tmp_path):
    labels = torch.cat([LABELS[:, :2], torch.zeros(300, 1, dtype=torch.bool)], dim=1)
    settings = {"epochs": 1, "batch_size": 32}
    trained = ek.train(spec(training=settings), tmp_path / "run", progress=False, data=(INPUTS, labels))
    assert any("no training sample has label 2 of 0 to 2" in notice for notice in trained.notices)


def test_metrics_of_integers_in_columns_are_those_of_labels():
    outputs = torch.randn(2, 300, 4, generator=RANDOM)
    assert ek.evaluate(outputs, LABELS) == ek.evaluate(outputs, LABELS.float(), "bce")
