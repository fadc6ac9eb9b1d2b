"""AdaBoost: its updates equal those of scikit-learn and of the paper, and runs with it do what they say."""

from __future__ import annotations

import math
import signal

import numpy as np
import pytest
import torch
from ensemblekit_methods.adaboost import samme_r_update, samme_update
from helpers.plain_training import train_plainly
from helpers.small_runs import Crash, CrashAfter, CrashOnSave, SignalAfter, assert_same_run, small_spec, training
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.ensemble import AdaBoostClassifier
from sklearn.tree import DecisionTreeClassifier

import ensemblekit as ek
from ensemblekit.core.errors import Interrupted, SpecError, UsageError
from ensemblekit.core.losses import MSE, CrossEntropy
from ensemblekit.core.objective import Objective

ROUNDS = 8
DATA = {"name": "digits", "limit_train": 200, "limit_test": 100}
QUICK = training(epochs=4, batch_size=20, optimizer={"name": "sgd", "lr": 0.5})
"""Ten steps in an epoch; each member becomes better than guessing."""
PLAIN = {"data": DATA, "model": {"name": "mlp", "hidden": [8]}}


def alphas(run) -> list[float]:
    """The weights of the members' votes that a trained model has."""
    return load_file(run / "model.safetensors")["methods.adaboost.alphas"].tolist()


class Recording(AdaBoostClassifier):
    """Remembers the weights that each round starts with, and the classes that its estimator predicts."""

    def _boost(self, iboost, X, y, sample_weight, random_state):
        result = super()._boost(iboost, X, y, sample_weight, random_state)
        self.rounds = [*getattr(self, "rounds", []), (sample_weight.copy(), self.estimators_[-1].predict(X))]
        return result


@pytest.mark.parametrize("shrinkage", [1.0, 0.5])
def test_samme_weights_samples_and_votes_as_scikit_learn_does_on_the_same_predictions(shrinkage):
    inputs, classes = load_digits(return_X_y=True)
    theirs = Recording(DecisionTreeClassifier(max_depth=2), n_estimators=ROUNDS, learning_rate=shrinkage)
    theirs.fit(inputs, classes)
    assert len(theirs.rounds) == ROUNDS
    weights = torch.ones(len(classes), dtype=torch.float64)
    for (before, predicted), vote in zip(theirs.rounds, theirs.estimator_weights_, strict=True):
        expected = torch.from_numpy(before) / before.sum()
        torch.testing.assert_close(weights / len(classes), expected, rtol=1e-12, atol=0)
        wrong = torch.from_numpy(predicted != classes)
        alpha, weights = samme_update(weights, wrong, 10, shrinkage)
        assert alpha == pytest.approx(vote, rel=1e-12)
        assert float(weights.mean()) == pytest.approx(1, rel=1e-12)


def test_samme_predicts_as_scikit_learn_does():
    inputs, classes = load_digits(return_X_y=True)
    theirs = AdaBoostClassifier(DecisionTreeClassifier(max_depth=2), n_estimators=ROUNDS).fit(inputs, classes)
    one_hot = [np.eye(10)[estimator.predict(inputs)] for estimator in theirs.estimators_]
    method = ek.methods()["adaboost"].load()()
    method.load_state({"alphas": torch.from_numpy(theirs.estimator_weights_)})
    outputs = torch.from_numpy(np.stack(one_hot))
    combined = Objective([method], CrossEntropy()).predict(outputs)
    votes = sum(weight * votes for weight, votes in zip(theirs.estimator_weights_, one_hot, strict=True))
    expected = torch.from_numpy(votes / theirs.estimator_weights_.sum())
    torch.testing.assert_close(combined.softmax(dim=-1), expected, rtol=0, atol=2e-6)
    assert (combined.argmax(dim=-1).numpy() == theirs.predict(inputs)).all()


def older_samme_r(weights: np.ndarray, probabilities: np.ndarray, classes: np.ndarray, rate: float) -> np.ndarray:
    """The update of scikit-learn before version 1.6, from Zhu et al. 2009, algorithm 4, written sample by sample."""
    num_classes = probabilities.shape[1]
    updated = []
    for weight, row, true in zip(weights, probabilities, classes, strict=True):
        coding = [1.0 if index == true else -1 / (num_classes - 1) for index in range(num_classes)]
        clipped = [max(float(value), np.finfo(np.float64).eps) for value in row]
        exponent = sum(code * math.log(value) for code, value in zip(coding, clipped, strict=True))
        updated.append(weight * math.exp(-rate * (num_classes - 1) / num_classes * exponent))
    return np.array(updated) / sum(updated)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_samme_r_weights_samples_by_the_formula_of_the_paper(rate):
    inputs, classes = load_digits(return_X_y=True)
    inputs, classes = inputs[:300], classes[:300]
    ours, theirs = torch.ones(300, dtype=torch.float64), np.full(300, 1 / 300)
    for _ in range(ROUNDS):
        tree = DecisionTreeClassifier(max_depth=3, random_state=0).fit(inputs, classes, theirs)
        probabilities = tree.predict_proba(inputs)  # with exact zeros, which are clipped
        theirs = older_samme_r(theirs, probabilities, classes, rate)
        logs = torch.from_numpy(probabilities).log()
        ours = samme_r_update(ours, logs, torch.from_numpy(classes), rate)
        torch.testing.assert_close(ours / 300, torch.from_numpy(theirs), rtol=1e-9, atol=1e-15)


def test_samme_r_decides_by_the_sum_of_the_members_decisions():
    outputs = torch.randn(3, 50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    method = ek.methods()["adaboost"].load()(variant="samme.r")
    method.load_state({"alphas": torch.ones(3, dtype=torch.float64)})
    combined = Objective([method], CrossEntropy()).predict(outputs)
    logs = outputs.log_softmax(dim=-1)
    decision = (3 * (logs - logs.mean(dim=-1, keepdim=True))).mean(dim=0)  # (C-1)(log p - mean log p), over 3 members
    torch.testing.assert_close(combined.softmax(dim=-1), (decision / 3).softmax(dim=-1), rtol=1e-12, atol=0)


def test_a_member_that_only_guesses_has_no_vote_and_changes_no_weights():
    weights = torch.tensor([0.5, 1.0, 1.5, 1.0], dtype=torch.float64)
    alpha, after = samme_update(weights, torch.tensor([True, False, True, False]), 2)
    assert alpha == 0
    assert torch.equal(after, weights)


def test_if_nobody_has_a_vote_the_mean_predicts():
    outputs = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0))
    method = ek.methods()["adaboost"].load()()
    method.load_state({"alphas": torch.zeros(3, dtype=torch.float64)})
    torch.testing.assert_close(Objective([method], CrossEntropy()).predict(outputs), outputs.mean(dim=0))


def test_a_member_without_a_mistake_has_a_large_finite_vote_and_changes_no_weights():
    weights = torch.tensor([0.5, 1.0, 1.5, 1.0], dtype=torch.float64)
    alpha, after = samme_update(weights, torch.zeros(4, dtype=torch.bool), 3)
    assert alpha == pytest.approx(math.log(7) + math.log(2))  # of an error of 1/8
    assert torch.equal(after, weights)
    worse, _ = samme_update(weights, torch.tensor([True, False, False, False]), 3)
    assert worse <= alpha


@pytest.mark.parametrize("variant", ["samme", "samme.r"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_member_in_training_has_no_vote(variant, loss):
    outputs = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0))
    method = ek.methods()["adaboost"].load()(variant=variant)
    objective = Objective([method], MSE() if loss == "mse" else CrossEntropy())
    torch.testing.assert_close(objective.predict(outputs[:1]), outputs[0])
    method.load_state({"alphas": torch.tensor([2.0, 1.0], dtype=torch.float64)})
    torch.testing.assert_close(objective.predict(outputs), objective.predict(outputs[:2]))
    torch.testing.assert_close(objective.predict(outputs[2:], members=torch.tensor([2])), outputs[2])


def test_a_run_trains_each_member_on_the_weights_that_those_before_it_imply(tmp_path):
    """Each is the network that plain training with these weights gives: the same start, batches and optimizer."""
    settings = training(epochs=6, optimizer={"name": "sgd", "lr": 0.5})
    run = ek.train(small_spec(**PLAIN, method="adaboost", training=settings), tmp_path / "run", progress=False)
    data = ek.load_data(run.spec.data, run.spec.seed)
    inputs = torch.cat([batch.inputs for batch in data.train.batches(50)])
    weights, votes = torch.ones(len(inputs), dtype=torch.float64), []
    for member, network in enumerate(run.ensemble.members):
        epochs = range(2 * member + 1, 2 * member + 3)
        expected = train_plainly(run, member, epochs, weights.float()).eval()(inputs).detach()
        torch.testing.assert_close(network(inputs).detach(), expected, rtol=1e-4, atol=1e-5)
        wrong = expected.argmax(dim=-1) != data.train.targets
        error = float(weights[wrong].sum() / weights.sum())
        votes.append(math.log((1 - error) / error) + math.log(9))
        weights = weights * torch.where(wrong, math.exp(votes[-1]), 1.0)
        weights = (weights / weights.mean()).float().double()
        assert float(weights.std()) > 0.2
    assert alphas(tmp_path / "run") == pytest.approx(votes, rel=1e-5)
    last = load_file(max((tmp_path / "run" / "checkpoints").glob("*.safetensors")))
    torch.testing.assert_close(last["training.sample_weights"][:, 0], weights.float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("variant", ["samme", "samme.r"])
def test_all_engines_agree(variant, tmp_path):
    results = {}
    for engine in ("sequential", "threaded", "stacked"):
        method = {"name": "adaboost", "variant": variant}
        spec = small_spec(method=method, engine={"name": engine, "device": "cpu"}, training=QUICK)
        results[engine] = ek.train(spec, tmp_path / engine, progress=False).outputs("test").outputs
        assert all(alpha > 0.1 for alpha in alphas(tmp_path / engine))
    for engine in ("threaded", "stacked"):
        torch.testing.assert_close(results[engine], results["sequential"], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("variant", ["samme", "samme.r"])
@pytest.mark.parametrize(
    "stop",
    [CrashOnSave(1), CrashOnSave(2), CrashAfter(2, 2), SignalAfter(signal.SIGTERM, 1, 10)],
    ids=["after the first member", "second", "in its middle", "in the evaluation after the first"],
)
def test_a_resumed_run_is_bit_identical(variant, stop, tmp_path):
    spec = small_spec(method={"name": "adaboost", "variant": variant}, training=QUICK)
    ek.train(spec, tmp_path / "whole", progress=False)
    assert all(alpha > 0.1 for alpha in alphas(tmp_path / "whole"))
    spec["training"] = spec["training"] | {"checkpoint_every_minutes": 1e-9}
    with pytest.raises((Crash, Interrupted)):
        ek.train(spec, tmp_path / "part", progress=stop)
    ek.resume(tmp_path / "part", progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_it_cannot_be_trained_further_than_planned(tmp_path):
    ek.train(small_spec(method="adaboost"), tmp_path / "run", progress=False)
    with pytest.raises(UsageError, match='"adaboost" decides by the training data'):
        ek.resume(tmp_path / "run", progress=False, epochs=6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"training": training(epochs=2)}, "one epoch for each of 3 members"),
        ({"data": {"name": "diabetes"}}, 'the task of "diabetes" is regression'),
        ({"method": ["bagging", "adaboost"]}, 'cannot be combined with "bagging", which weights the samples too'),
        ({"method": ["adaboost", "gncl"]}, 'cannot be combined with "gncl"'),
    ],
    ids=["epochs", "regression", "bagging", "gncl"],
)
def test_what_cannot_work_is_refused_before_training(changes, said, tmp_path):
    with pytest.raises(SpecError, match=said):
        ek.train(small_spec(**{"method": "adaboost"} | changes), tmp_path / "run", progress=False)


def test_it_composes_with_adversarial_training(tmp_path):
    run = ek.train(small_spec(method=["adaboost", "adversarial"]), tmp_path / "run", progress=False)
    assert len(run.members) == 3
