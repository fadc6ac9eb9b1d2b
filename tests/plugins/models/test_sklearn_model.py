"""Estimators of scikit-learn become networks that predict exactly what they do, from tensors alone."""

from __future__ import annotations

import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from ensemblekit_models.fitted_networks import pair, precise
from ensemblekit_models.sklearn_estimators import KINDS, rounded_down
from ensemblekit_models.sklearn_model import Sklearn
from safetensors.torch import load, save
from sklearn.datasets import load_diabetes, load_digits

import ensemblekit as ek
from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.losses import MSE, NLL, CrossEntropy, Exponential, GaussianHinge
from ensemblekit.members.folding import FoldedMember

SEED = 5
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
SMALL = {
    "random_forest": {"n_estimators": 12},
    "extra_trees": {"n_estimators": 12},
    "gradient_boosting": {"n_estimators": 4, "max_depth": 2},
    "decision_tree": {"max_depth": 9},
    "logistic_regression": {"C": 0.3},
    "ridge": {"alpha": 2.0},
    "nearest_neighbors": {"n_neighbors": 4},
    "gaussian_nb": {"var_smoothing": 1e-6},
}
CLASSIFIERS = [name for name, kind in KINDS.items() if kind.classifier]
REGRESSORS = [name for name, kind in KINDS.items() if kind.regressor]


def digits(num_classes=10):
    images, classes = load_digits(return_X_y=True)
    inputs = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    targets = torch.from_numpy(classes).long()
    return inputs[targets < num_classes], targets[targets < num_classes]


def diabetes():
    inputs, values = load_diabetes(return_X_y=True)
    values = (values - values.mean()) / values.std()
    return torch.from_numpy(inputs).float() * 20, torch.from_numpy(values).float().unsqueeze(1)


def sample_weights(size):
    """Weights of which about a third is 0, as bagging gives them."""
    return torch.from_numpy(np.random.default_rng(0).poisson(1.0, size) * 1.25).float()


def fitted(name, data, loss, weights=None, num_outputs=None, seed=SEED, **fields):
    """A fitted network, and the estimator fitted by scikit-learn itself."""
    inputs, targets = data
    for_classes = not targets.is_floating_point()
    num_outputs = num_outputs or (int(targets.max()) + 1 if for_classes else targets.shape[1])
    parameters = fields.pop("parameters", SMALL[name])
    model = Sklearn(estimator=name, parameters=parameters, **fields)
    network = model.build(tuple(inputs.shape[1:]), num_outputs)
    model.fit(network, inputs, targets, weights, loss, seed)
    return network.eval(), own_estimator(name, data, weights, parameters, seed)


def own_estimator(name, data, weights, parameters, seed):
    """The estimator as a user of scikit-learn would fit it."""
    inputs, targets = data[0].flatten(1).numpy().astype(np.float64), data[1].numpy()
    module, _, cls = KINDS[name].location(data[1].dtype == torch.int64).partition(":")
    estimator = getattr(import_module(f"sklearn.{module}"), cls)(**parameters)
    if "random_state" in estimator.get_params():
        estimator.set_params(random_state=seed % 2**32)
    if name == "logistic_regression":
        estimator.set_params(max_iter=1000)
    targets = targets.ravel() if targets.ndim == 2 and targets.shape[1] == 1 else targets
    if weights is None or name == "nearest_neighbors":
        return estimator.fit(inputs, targets)
    used = weights.numpy() > 0
    return estimator.fit(inputs[used], targets[used], sample_weight=weights.numpy().astype(np.float64)[used])


def predicted(estimator, inputs):
    flat = inputs.flatten(1).numpy().astype(np.float64)
    values = estimator.predict_proba(flat) if hasattr(estimator, "predict_proba") else estimator.predict(flat)
    return torch.from_numpy(np.asarray(values).reshape(len(flat), -1)).double()


def without_ties(estimator, inputs):
    """The samples whose farthest neighbour is nearer than the next sample: with others scikit-learn chooses one."""
    k = estimator.n_neighbors
    distances, _ = estimator.kneighbors(inputs.flatten(1).numpy(), n_neighbors=k + 1)
    return torch.from_numpy(distances[:, k - 1] < distances[:, k] - 1e-9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", [name for name in CLASSIFIERS if name != "nearest_neighbors"])
def test_probabilities_of_digits_equal_those_of_scikit_learn(name, weighted):
    inputs, targets = digits()
    weights = sample_weights(1200) if weighted else None
    network, estimator = fitted(name, (inputs[:1200], targets[:1200]), NLL(), weights, smoothing=0, softmax=True)
    expected = predicted(estimator, inputs)
    torch.testing.assert_close(network.predictions(inputs), expected, **CLOSE)
    torch.testing.assert_close(network(inputs).double(), expected, **CLOSE)
    if weighted:
        plain = predicted(own_estimator(name, (inputs[:1200], targets[:1200]), None, SMALL[name], SEED), inputs)
        assert not torch.allclose(plain, expected, atol=1e-3)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", [name for name in REGRESSORS if name != "nearest_neighbors"])
def test_values_of_diabetes_equal_those_of_scikit_learn(name, weighted):
    inputs, targets = diabetes()
    weights = sample_weights(300) if weighted else None
    network, estimator = fitted(name, (inputs[:300], targets[:300]), MSE(), weights)
    torch.testing.assert_close(network(inputs).double(), predicted(estimator, inputs), **CLOSE)


@pytest.mark.parametrize("parameters", [{}, {"n_neighbors": 3, "weights": "distance"}, {"n_neighbors": 4, "p": 1}])
def test_nearest_neighbors_equal_those_of_scikit_learn_where_these_are_unique(parameters):
    inputs, targets = digits()
    network, estimator = fitted(
        "nearest_neighbors", (inputs[:1200], targets[:1200]), NLL(), smoothing=0, softmax=True, parameters=parameters
    )
    unique = without_ties(estimator, inputs)
    assert unique.float().mean() > 0.8
    torch.testing.assert_close(
        network(inputs)[unique].double(), predicted(estimator, inputs)[unique], rtol=0, atol=1e-6
    )
    inputs, targets = diabetes()
    network, estimator = fitted("nearest_neighbors", (inputs[:300], targets[:300]), MSE(), parameters=parameters)
    unique = without_ties(estimator, inputs)
    assert unique.float().mean() > 0.8
    torch.testing.assert_close(
        network(inputs)[unique].double(), predicted(estimator, inputs)[unique], rtol=0, atol=1e-6
    )


def test_equally_near_neighbors_all_vote():
    inputs = torch.tensor([[0.0], [1.0], [-1.0], [5.0]])
    network, _ = fitted(
        "nearest_neighbors", (inputs, torch.tensor([0, 1, 2, 2])), NLL(), smoothing=0, parameters={"n_neighbors": 2}
    )
    torch.testing.assert_close(network(torch.tensor([[0.0]])), torch.full((1, 3), 1 / 3))


def test_nearest_neighbors_vote_with_their_sample_weights():
    inputs, targets = diabetes()
    weights = sample_weights(len(inputs))
    network, _ = fitted("nearest_neighbors", (inputs, targets), MSE(), weights, parameters={"n_neighbors": 3})
    used = weights > 0
    distances = (inputs[:20].double().unsqueeze(1) - inputs[used].double()).square().sum(-1)
    nearest = distances.argsort(dim=1)[:, :3]
    votes, values = weights[used][nearest], targets[used][nearest].squeeze(-1)
    torch.testing.assert_close(network(inputs[:20]).squeeze(1), (votes * values).sum(1) / votes.sum(1))


@pytest.mark.parametrize("name", ["decision_tree", "random_forest", "extra_trees", "ridge", "nearest_neighbors"])
def test_several_values_equal_those_of_scikit_learn(name):
    inputs, targets = diabetes()
    targets = torch.cat([targets, inputs[:, :1] * targets, -targets], dim=1)
    network, estimator = fitted(name, (inputs, targets), MSE())
    torch.testing.assert_close(network(inputs[:50]).double(), predicted(estimator, inputs[:50]), **CLOSE)


@pytest.mark.parametrize("loss", [Exponential(), GaussianHinge(), CrossEntropy(), MSE(), NLL()], ids=lambda x: x.name)
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_outputs_mean_the_smoothed_probabilities_for_every_loss(name, loss):
    inputs, targets = digits(num_classes=2)
    outputs = 1 if loss.takes == "margins" else 2
    network, estimator = fitted(name, (inputs[:300], targets[:300]), loss, num_outputs=outputs, smoothing=0.01)
    assert network(inputs).shape == (len(inputs), outputs)
    expected = 0.99 * predicted(estimator, inputs) + 0.01 / 2
    torch.testing.assert_close(loss.probabilities(network(inputs)).double(), expected, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(network(inputs), loss.from_probabilities(expected).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_outputs_are_finite_without_smoothing(name):
    inputs, targets = digits()
    network, _ = fitted(name, (inputs[:500], targets[:500]), CrossEntropy(), smoothing=0)
    assert network(inputs).isfinite().all()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_class_without_training_samples_gets_its_share_of_the_smoothing_alone(name):
    inputs, targets = digits()
    seen = (targets != 3) & (targets != 9)
    network, estimator = fitted(name, (inputs[seen], targets[seen]), NLL(), num_outputs=10, smoothing=0.1)
    outputs = network(inputs[:40])
    torch.testing.assert_close(outputs[:, [3, 9]], torch.full((40, 2), 0.01))
    kept = [0, 1, 2, 4, 5, 6, 7, 8]
    if name != "nearest_neighbors":
        expected = 0.9 * predicted(estimator, inputs[:40]) + 0.01
        torch.testing.assert_close(outputs[:, kept].double(), expected, **CLOSE)


def test_the_exponential_loss_of_gradient_boosting_is_converted_too():
    inputs, targets = digits(num_classes=2)
    parameters = {"loss": "exponential", "n_estimators": 5, "subsample": 0.5, "init": "zero"}
    network, estimator = fitted("gradient_boosting", (inputs, targets), NLL(), smoothing=0, parameters=parameters)
    torch.testing.assert_close(network(inputs).double(), predicted(estimator, inputs), **CLOSE)


@pytest.mark.parametrize("name", ["decision_tree", "random_forest", "extra_trees", "gradient_boosting"])
def test_inputs_next_to_a_threshold_take_the_branch_that_scikit_learn_takes(name):
    rng = np.random.default_rng(1)
    # neighbouring float32 numbers, whose means are no float32; nearer ones than 1e-7 would not be split
    steps = rng.integers(0, 40, (400, 3)).astype(np.int32)
    inputs = torch.from_numpy((np.float32(10).view(np.int32) + steps).view(np.float32))
    targets = torch.from_numpy(rng.integers(0, 3, 400))
    network, estimator = fitted(name, (inputs, targets), NLL(), smoothing=0, parameters={})
    trees = [estimator] if name == "decision_tree" else np.ravel(estimator.estimators_)
    thresholds = np.concatenate([tree.tree_.threshold for tree in trees])
    assert (thresholds != thresholds.astype(np.float32)).any()
    near = torch.from_numpy((np.float32(10).view(np.int32) + np.arange(-2, 43, dtype=np.int32)).view(np.float32))
    grid = torch.cartesian_prod(near[::3], near, near[::5])
    torch.testing.assert_close(network(grid).double(), predicted(estimator, grid), **CLOSE)


def test_rounding_down_keeps_every_comparison_with_a_float32():
    rng = np.random.default_rng(0)
    thresholds = np.concatenate([rng.normal(size=1000), rng.normal(size=1000).astype(np.float32), [0.0, 1e300, -1e-60]])
    down = rounded_down(thresholds)
    assert down.dtype == np.float32
    nearest = np.clip(thresholds, -3e38, 3e38).astype(np.float32)
    for direction in (np.float32(-np.inf), nearest, np.float32(np.inf)):
        number = np.nextafter(nearest, direction)
        np.testing.assert_array_equal(number.astype(np.float64) <= thresholds, number <= down)


def test_a_pair_of_float32_keeps_14_digits():
    values = torch.randn(1000, dtype=torch.float64)
    assert pair(values).dtype == torch.float32
    torch.testing.assert_close(precise(pair(values)), values, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_a_fitted_network_is_restored_from_a_file_of_its_buffers(name):
    data, loss = (digits(), CrossEntropy()) if KINDS[name].classifier else (diabetes(), MSE())
    network, _ = fitted(name, (data[0][:200], data[1][:200]), loss)
    assert not list(network.parameters())
    assert all(buffer.dtype != torch.float64 for buffer in network.buffers())  # which not every device has
    saved = load(save(network.state_dict()))
    fresh = Sklearn(estimator=name, parameters=SMALL[name]).build(tuple(data[0].shape[1:]), network.num_outputs)
    assert saved.keys() == fresh.state_dict().keys()
    for buffer_name, value in saved.items():
        setattr(fresh, buffer_name, value)
    torch.testing.assert_close(fresh(data[0]), network(data[0]), rtol=0, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_predictions_do_not_need_scikit_learn(name, monkeypatch):
    data, loss = (digits(), CrossEntropy()) if KINDS[name].classifier else (diabetes(), MSE())
    network, _ = fitted(name, (data[0][:100], data[1][:100]), loss)
    for module in [module for module in sys.modules if module.partition(".")[0] == "sklearn"]:
        monkeypatch.setitem(sys.modules, module, None)
    table = {"name": "sklearn", "estimator": name, "parameters": SMALL[name]}
    fresh = ek.build_model(table, tuple(data[0].shape[1:]), network.num_outputs)
    fresh.store(network.state_dict())
    torch.testing.assert_close(fresh(data[0][:9]), network(data[0][:9]), rtol=0, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_networks_work_on_the_meta_device_and_are_zero_before_they_are_fitted(name):
    model = Sklearn(estimator=name)
    network = ek.build_model({"name": "sklearn", "estimator": name}, (1, 4, 4), 3)
    assert torch.equal(network(torch.rand(5, 1, 4, 4)), torch.zeros(5, 3))
    inputs, targets = torch.randn(60, 1, 4, 4), torch.arange(60) % 3
    values = torch.nn.functional.one_hot(targets).float()
    if KINDS[name].classifier:
        model.fit(network, inputs, targets, None, CrossEntropy(), 0)
    else:
        model.fit(network, inputs, values, None, MSE(), 0)
    assert network.to("meta")(torch.empty(5, 1, 4, 4, device="meta")).shape == (5, 3)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_samples_do_not_depend_on_their_batch_and_folding_changes_nothing(name):
    inputs, targets = digits()
    network, _ = fitted(name, (inputs[:300], targets[:300]), CrossEntropy())
    together = network(inputs[:20])
    torch.testing.assert_close(torch.cat([network(sample) for sample in inputs[:20].split(1)]), together)
    with torch.no_grad():
        torch.testing.assert_close(FoldedMember(network, True)(inputs[:20], None)[0], together)


def test_the_seed_decides_a_random_estimator():
    data, other_seed = digits(), SEED + 1
    first, again, other = (fitted("random_forest", data, CrossEntropy(), seed=s)[0] for s in (SEED, SEED, other_seed))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    assert not torch.allclose(first(data[0]), other(data[0]))
    fitted("random_forest", data, CrossEntropy(), seed=2**62)  # longer than the seeds of NumPy


def spec(data="digits", **model):
    tables = {"data": {"name": data}, "model": {"name": "sklearn", **model}, "ensemble": {"members": 2}}
    return ek.load_spec(tables)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ("digits", {"estimator": "svm"}, "model.estimator"),
        ("digits", {"parameters": {"n_estimator": 3}}, r'n_estimator: is not a parameter.*did you mean "n_estimators"'),
        ("digits", {"parameters": {"n_estimators": 0}}, "'n_estimators' parameter of RandomForestClassifier must be"),
        ("digits", {"parameters": {"random_state": 0}}, "derived from the seed"),
        ("digits", {"parameters": {"max_depth": [3]}}, "model.parameters"),
        ("digits", {"estimator": "nearest_neighbors", "parameters": {"metric": "cosine"}}, "allowed: n_neighbors"),
        ("digits", {"estimator": "ridge"}, '"ridge" predicts values'),
        ("diabetes", {"estimator": "gaussian_nb"}, '"gaussian_nb" predicts classes'),
        ("digits", {"smoothing": 1.0}, "model.smoothing"),
        ("digits", {"softmax": True}, "takes raw outputs"),
    ],
)
def test_wrong_parameters_are_problems_of_the_spec(data, model, message):
    with pytest.raises(ek.EnsemblekitError, match="(?s)" + message):
        spec(data, **model)


def test_right_parameters_are_accepted():
    spec("diabetes", estimator="decision_tree", parameters={"criterion": "absolute_error"})
    spec(estimator="gradient_boosting", parameters={"learning_rate": 0.2, "max_depth": 2, "max_features": "sqrt"})
    spec("diabetes", estimator="gradient_boosting", parameters={"loss": "huber"})
    spec("diabetes", estimator="ridge")


def test_one_value_is_all_that_gradient_boosting_predicts():
    model = Sklearn(estimator="gradient_boosting")
    (problem,) = model.check_data(spec("diabetes"), DataInfo("regression", (4,), 3))
    assert "predicts one value" in problem.what


def test_a_single_class_is_reported_with_the_words_of_scikit_learn():
    with pytest.raises(ek.DataError, match=r"cannot fit .logistic_regression.*class"):
        fitted("logistic_regression", (torch.randn(9, 2), torch.zeros(9).long()), CrossEntropy(), num_outputs=3)


def test_a_loss_with_an_unknown_meaning_of_outputs_is_refused():
    class Odd(CrossEntropy):
        def from_probabilities(self, probabilities):
            return probabilities.sin()

    with pytest.raises(ek.PluginError, match="turns probabilities into outputs"):
        fitted("gaussian_nb", digits(), Odd())


def test_estimators_that_hardly_differ_are_noted():
    (note,) = spec(estimator="gaussian_nb").model.notes(spec(estimator="gaussian_nb"))
    assert "hardly differ" in note
    assert not list(spec().model.notes(spec()))
