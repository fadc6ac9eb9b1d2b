"""What fit trains: the same as a run of the same spec, decided by random_state alone, with nothing left on disk."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from sklearn.preprocessing import StandardScaler
from torch import nn

import ensemblekit as ek
from ensemblekit.core.errors import NumericError, SpecError
from ensemblekit.core.threads import one_thread
from ensemblekit.sklearn import EnsembleClassifier, EnsembleRegressor


def run_of(parameters, data, path, **changes):
    """The run of a spec with the parameters of an estimator, on the same rows for training and testing."""
    spec = {
        "seed": parameters["random_state"],
        "data": {"validation_fraction": changes.pop("validation_fraction", 0.0)},
        "model": parameters["model"],
        "method": changes.pop("method", "independent"),
        "ensemble": {"members": parameters["members"]},
        "training": {"batch_size": 32, **{key: parameters[key] for key in ("epochs", "optimizer")}, **changes},
        "engine": {"name": "stacked", "device": "cpu"},
    }
    with one_thread():
        return ek.train(spec, path, progress=False, data=(data, data))


@pytest.mark.parametrize("method", ["independent", {"name": "gncl", "lambda": 0.5}, "bagging"], ids=str)
def test_a_classifier_is_the_ensemble_of_a_run_of_the_same_spec(method, small, flowers, tmp_path):
    inputs, names = flowers
    estimator = EnsembleClassifier(method, **small).fit(inputs, names)
    prepared = StandardScaler().fit_transform(inputs).astype(np.float32)
    indices = np.unique(names, return_inverse=True)[1]
    run = run_of(small, (prepared, indices), tmp_path / "run", method=method)
    np.testing.assert_array_equal(estimator.prepare(inputs), prepared)
    for own, expected in zip(estimator.ensemble_.members, run.ensemble.members, strict=True):
        for name, value in expected.state_dict().items():
            assert torch.equal(own.state_dict()[name].to(value.dtype), value), name
    np.testing.assert_array_equal(estimator.predict_proba(inputs), run.ensemble.double().predict_proba(prepared))
    losses = [row["train_loss"] for row in run.history]
    assert [row["train_loss"] for row in estimator.history_] == losses


def test_a_regressor_is_the_ensemble_of_a_run_of_the_same_spec(small, patients, tmp_path):
    inputs, values = patients
    changes = {"validation_fraction": 0.2, "patience": 2, "keep": "best"}
    estimator = EnsembleRegressor(**{**small, "epochs": 8}, **changes).fit(inputs, values)
    run = run_of({**small, "epochs": 8}, (estimator.prepare(inputs), values), tmp_path / "run", **changes)
    expected = run.ensemble.double().predict(estimator.prepare(inputs)).squeeze(1)
    np.testing.assert_array_equal(estimator.predict(inputs), expected)
    assert len(estimator.history_) == len(run.history)
    assert estimator.metrics_["validation_loss"] == run.validation["validation_loss"]


def test_random_state_decides_every_bit(classifier, small, flowers):
    inputs, names = flowers
    again = EnsembleClassifier(**small).fit(inputs, names).predict_proba(inputs)
    np.testing.assert_array_equal(again, classifier.predict_proba(inputs))
    other = EnsembleClassifier(**{**small, "random_state": 1}).fit(inputs, names).predict_proba(inputs)
    assert np.abs(other - again).max() > 0.01


def test_an_instance_of_random_state_goes_on_and_none_is_another_seed_each_time(small, flowers):
    inputs, names = flowers
    shared = RandomState(3)
    fits = [EnsembleClassifier(**{**small, "random_state": state}) for state in (RandomState(3), shared, shared, None)]
    first, same, second, third = (fit.set_params(epochs=1).fit(inputs, names).predict_proba(inputs) for fit in fits)
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - second).max() > 1e-3
    assert np.abs(first - third).max() > 1e-3


def test_fit_leaves_nothing_behind(small, flowers, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    torch.manual_seed(5)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    EnsembleClassifier(**small, patience=2).fit(*flowers)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_row_of_weight_two_counts_as_two_rows(small, flowers):
    """Of several batches too, as far as the objective goes: the sum of the weighted losses is the same."""
    inputs, names = (part[::2] for part in flowers)  # 75 rows, in batches of 100 or 150
    weights = 1.0 + (np.arange(75) % 3 == 0)
    settings = {**small, "batch_size": 150, "epochs": 3}
    weighted = EnsembleClassifier(**settings).fit(inputs, names, sample_weight=weights)
    repeated = EnsembleClassifier(**settings).fit(
        inputs.repeat(weights.astype(int), 0), names.repeat(weights.astype(int))
    )
    np.testing.assert_array_equal(weighted.predict_proba(inputs), repeated.predict_proba(inputs))
    plain = EnsembleClassifier(**settings).fit(inputs, names)
    assert np.abs(plain.predict_proba(inputs) - weighted.predict_proba(inputs)).max() > 1e-3


def test_rows_of_weight_zero_do_not_exist(small, flowers):
    inputs, names = flowers
    weights = np.where(np.arange(150) % 3 == 1, 0.0, 1.0)
    weighted = EnsembleClassifier(**small).fit(inputs, names, sample_weight=weights)
    fewer = EnsembleClassifier(**small).fit(inputs[weights > 0], names[weights > 0])
    np.testing.assert_allclose(weighted.predict_proba(inputs), fewer.predict_proba(inputs), atol=1e-5)
    without_a_class = EnsembleClassifier(**small).fit(inputs, names, sample_weight=names != "setosa")
    assert list(without_a_class.classes_) == ["versicolor", "virginica"]


def test_class_weight_is_the_weight_of_the_rows_of_a_class(small, flowers):
    inputs, names = (part[:130] for part in flowers)
    by_class = {"versicolor": 4.0, "virginica": 0.5}
    unscaled = {**small, "scaling": None}  # means of columns would count the weights of rows, and not those of classes
    weighted = EnsembleClassifier(**unscaled, class_weight=by_class).fit(inputs, names)
    rows = [by_class.get(name, 1.0) for name in names]
    by_row = EnsembleClassifier(**unscaled).fit(inputs, names, sample_weight=rows)
    np.testing.assert_allclose(weighted.predict_proba(inputs), by_row.predict_proba(inputs), atol=1e-5)
    plain = EnsembleClassifier(**unscaled).fit(inputs, names)
    assert np.abs(plain.predict_proba(inputs) - weighted.predict_proba(inputs)).max() > 0.01
    balanced = EnsembleClassifier(**small, class_weight="balanced").fit(inputs, names)
    share = {"setosa": 130 / 150, "versicolor": 130 / 150, "virginica": 130 / 90}
    explicit = EnsembleClassifier(**small, class_weight=share).fit(inputs, names)
    np.testing.assert_allclose(balanced.predict_proba(inputs), explicit.predict_proba(inputs), atol=1e-5)
    for wrong in ({"tulip": 1.0}, "equal"):
        with pytest.raises(ValueError, match="class_weight"):
            EnsembleClassifier(**small, class_weight=wrong).fit(inputs, names)


def test_errors_name_the_parameter_and_the_estimator(small, flowers):
    with pytest.raises(SpecError) as raised:
        EnsembleClassifier({"name": "gncl", "lamda": 1}, epochs=-1).fit(*flowers)
    assert {problem.path for problem in raised.value.problems} == {"method.lamda", "training.epochs"}
    with pytest.raises(NumericError) as diverged:
        EnsembleClassifier(**{**small, "optimizer": {"lr": 1e30}}).fit(*flowers)
    assert "EnsembleClassifier.fit" in diverged.value.line
    assert "checkpoint" not in diverged.value.line
    with pytest.raises(ValueError, match="scaling"):
        EnsembleClassifier(scaling="minmax").fit(*flowers)
    with pytest.raises(ValueError, match="n_jobs"):
        EnsembleClassifier(n_jobs=0).fit(*flowers)


def test_verbose_prints_a_line_for_each_epoch(small, flowers, capsys):
    EnsembleClassifier(**small, verbose=True).fit(*flowers)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == small["epochs"]
    assert lines[-1].startswith("epoch 4/4")


def test_images_are_trained_as_they_are(small, classifier):
    generator = RandomState(0)
    classes = np.arange(40) % 2
    images = (generator.rand(40, 1, 8, 8) * 100 + 100 * classes[:, None, None, None]).astype(np.uint8)
    model = {"name": "resnet", "width": 4, "blocks": 1}
    estimator = EnsembleClassifier(**{**small, "model": model}).fit(images, classes)
    assert estimator.score(images, classes) == 1
    assert estimator.member_predict_proba(images).shape == (3, 40, 2)
    assert estimator.ensemble_.dtype == torch.float32
    engines = [fitted.ensemble_.spec.engine.name for fitted in (classifier, estimator)]
    assert engines == ["stacked", "sequential"]
    with pytest.raises(ValueError, match="infinity"):
        estimator.predict(np.full((1, 1, 8, 8), np.inf))


class Narrow(nn.Module):
    """A network that only computes in float32."""

    def __init__(self, input_shape, num_outputs):
        super().__init__()
        self.layer = nn.Linear(input_shape[0], num_outputs)

    def forward(self, inputs):
        return self.layer(inputs) @ torch.eye(self.layer.out_features)


def test_a_network_class_can_be_the_model(small, flowers):
    inputs, names = flowers
    estimator = EnsembleClassifier(**{**small, "model": Narrow, "epochs": 20}).fit(inputs, names)
    assert estimator.ensemble_.dtype == torch.float32  # its own matrix is not converted
    assert estimator.score(inputs, names) > 0.7
