"""Evaluation of a trained ensemble on its own data, on data passed in Python, and on bad data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.commands import last_error, run
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import ensemblekit as ek
from ensemblekit.core.errors import NumericError
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.runs.directory import RunDirectory

SPEC = {"model": {"name": "mlp", "hidden": [8]}, "ensemble": {"members": 2}, "training": {"epochs": 2}}
SPEC |= {"engine": {"name": "sequential"}}


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> ek.Run:
    path = tmp_path_factory.mktemp("digits") / "run"
    return ek.train(SPEC | {"data": {"name": "digits", "limit_train": 300}}, path, progress=False)


def images() -> tuple[np.ndarray, np.ndarray]:
    data = load_digits()
    return data.images[:, None].astype(np.float32) / 16, data.target


def test_the_classes_add_up_to_the_metrics(digits):
    metrics = ek.evaluate_run(digits.path, per_class=True)
    own = {name: metrics[name] for name in digits.metrics}
    assert own == pytest.approx(digits.metrics, rel=1e-4, abs=1e-6)
    confusion = torch.tensor(metrics["confusion"])
    assert float(confusion.diagonal().sum() / confusion.sum()) == pytest.approx(metrics["test_accuracy"])
    assert [entry["class"] for entry in metrics["classes"]] == list(digits.ensemble.classes or range(10))
    assert set(ek.evaluate_run(digits.path)) == set(digits.metrics)


@pytest.mark.parametrize(
    "form",
    [
        lambda inputs, classes: (inputs, classes),
        lambda inputs, classes: (inputs.astype(np.float64), classes.astype(np.int8)),
        lambda inputs, classes: TensorDataset(torch.from_numpy(inputs), torch.from_numpy(classes)),
        lambda inputs, classes: list(zip(inputs, classes, strict=True)),
        lambda inputs, classes: ((inputs[:9], classes[:9]), (inputs, classes)),
    ],
    ids=["arrays", "float64", "tensor data set", "samples", "the last part"],
)
def test_all_samples_of_python_data_are_evaluated(form, digits):
    inputs, classes = images()
    metrics = ek.evaluate_run(digits.path, data=form(inputs, classes))
    predicted = digits.ensemble.predict(inputs)
    labels = np.array(digits.ensemble.classes)[classes] if digits.ensemble.classes else torch.from_numpy(classes)
    assert metrics["test_accuracy"] == pytest.approx(float((predicted == labels).mean(dtype=float)))


def test_python_data_is_normalised_by_the_run_it_is_evaluated_with(tmp_path):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (60, 1, 4, 4), dtype=torch.uint8, generator=generator)
    classes = (pixels.float().mean(dim=(1, 2, 3)) > 128).long()
    spec = SPEC | {"data": {"name": "given", "normalise": True}}
    trained = ek.train(spec, tmp_path / "run", data=(pixels, classes), progress=False)
    some = ek.evaluate_run(trained.path, data=(pixels[:7], classes[:7]))
    expected = float((trained.ensemble.predict(pixels[:7]) == classes[:7]).double().mean())
    assert some["test_accuracy"] == pytest.approx(expected)
    split = ek.load_data(InMemoryData(normalise=True).of((pixels, classes)), seed=0).test
    batch = next(split.batches(100))
    own = float((trained.ensemble.predict(batch.inputs) == batch.targets).float().mean())
    assert trained.metrics["test_accuracy"] == pytest.approx(own)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda inputs, classes: (inputs[:, :, :7], classes), r"expected inputs of shape \(1, 8, 8\), got \(1, 7, 8\)"),
        (lambda inputs, classes: (inputs, classes + 5), "expected class indices from 0 to 9, got 10"),
        (lambda inputs, classes: (inputs, classes[:5]), "1797 inputs, but 5 targets"),
        (lambda inputs, classes: (inputs, np.where(classes, "x", "y")), "is not a class of the run|expected"),
        (lambda inputs, classes: inputs, "data cannot be of type ndarray"),
    ],
)
def test_data_that_does_not_fit_is_an_error(change, what, digits):
    with pytest.raises(ek.DataError, match=what):
        ek.evaluate_run(digits.path, data=change(*images()))


@pytest.mark.faults
def test_outputs_that_are_not_finite_are_exit_code_6(tmp_path):
    trained = ek.train(SPEC | {"data": {"name": "digits", "limit_train": 50}}, tmp_path / "run", progress=False)
    directory = RunDirectory.open(trained.path)
    tensors, metadata = directory.read_model()
    directory.write_model({name: value.float() * torch.inf for name, value in tensors.items()}, metadata)
    with pytest.raises(NumericError, match="2 members of 2 gave outputs that are not finite"):
        ek.evaluate_run(trained.path)
    for options in ((), ("--json",)):
        result = run("evaluate", str(trained.path), *options)
        assert (result.exit_code, result.stdout) == (6, "")
        assert "not finite" in last_error(result)
