"""Methods of the cookbook do what their formulas say, beyond that they train."""

from __future__ import annotations

import csv
import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers.recipes import COOKBOOK, MLP, SGD, data_of, load, plugin, train, weights_of
from helpers.small_runs import Crash, CrashAfter
from safetensors.torch import load_file as load_tensors
from torch.nn.functional import cross_entropy, log_softmax
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ensemblekit as ek
from ensemblekit.core.losses import CrossEntropy

# anchored


def test_anchored_members_stay_closer_to_their_start_the_stronger_the_pull_is(tmp_path):
    start = parameters_to_vector(ek.build_model(MLP, (1, 8, 8), 10, seed=0).parameters()).detach()
    distances = []
    for strength in (0, 50, 500):
        table = {"name": "anchored", "strength": strength}
        run = train("anchored", tmp_path / f"{strength}", {"epochs": 10}, method=table)
        distances.append(float((weights_of(load("anchored", run))[0] - start).norm()))
    assert distances[0] > 1.2 * distances[1] > 1.2**2 * distances[2] > 0


def test_the_anchored_penalty_is_that_of_the_formula():
    weights, start = torch.randn(2, 3, 7)
    penalty = plugin("anchored", "anchored", strength=0.3).weight_penalty(weights, start, num_members=5, num_samples=40)
    by_hand = [0.3 / 40 / 5 * float(torch.dist(*pair)) ** 2 for pair in zip(weights, start, strict=True)]
    assert penalty.tolist() == pytest.approx(by_hand)


# SAM


def test_a_step_of_sam_is_that_of_the_formula(tmp_path):
    run = train("sam", tmp_path / "run", {"epochs": 1, "batch_size": 120}, method={"name": "sam", "radius": 0.5})
    batch = data_of(run, "train")
    network = ek.build_model(MLP, (1, 8, 8), 10, seed=0)

    def gradient(at):
        vector_to_parameters(at, network.parameters())
        objective = cross_entropy(network(batch.inputs), batch.targets) / 2  # two members
        return parameters_to_vector(torch.autograd.grad(objective, list(network.parameters())))

    start = parameters_to_vector(network.parameters()).detach().clone()
    first = gradient(start)
    expected = start - 0.1 * gradient(start + 0.5 * first / first.square().sum().sqrt())
    actual = weights_of(load("sam", run))[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(actual, start - 0.1 * first, atol=1e-5)


# adaptive GNCL


def test_adaptive_gncl_raises_lambda_for_equal_members_and_lowers_it_for_very_different_ones():
    method = plugin("adaptive_gncl", "adaptive_gncl", step=0.4)
    targets = torch.tensor([0, 1, 0])
    equal = torch.zeros(2, 3, 2)
    apart = torch.tensor([[[9.0, 0.0]] * 3, [[0.0, 9.0]] * 3])  # the mean is undecided, each member is often wrong
    weights = []
    for outputs in (equal, equal, equal, apart, apart, apart):
        ensemble = SimpleNamespace(outputs=lambda outputs=outputs: outputs, targets=targets, loss=CrossEntropy())
        method.epoch_trained(ensemble)
        weights.append(method.state()["weight"])
    assert weights == pytest.approx([0.4, 0.8, 1.0, 0.6, 0.2, 0.0], abs=1e-9)


def test_adaptive_gncl_keeps_lambda_with_the_model(tmp_path):
    table = {"name": "adaptive_gncl", "share": 0.99, "step": 0.25}
    run = train("adaptive_gncl", tmp_path / "run", method=table)
    assert load("adaptive_gncl", run).methods[0].state() == {"weight": 0.5}  # two epochs of little diversity


# views


def test_members_of_random_subspaces_see_only_their_share_of_the_columns(tmp_path):
    table = {"name": "random_subspaces", "share": 0.3}
    run = train("random_subspaces", tmp_path / "run", method=table, data={"name": "diabetes"})
    ensemble, inputs = load("random_subspaces", run), data_of(run).inputs
    seen = torch.zeros(2, inputs.shape[1], dtype=torch.bool)
    for column in range(inputs.shape[1]):
        changed = inputs.clone()
        changed[:, column] += 1
        seen[:, column] = (ensemble.member_outputs(changed) != ensemble.member_outputs(inputs)).any(dim=(1, 2))
    assert seen.sum(dim=1).tolist() == [3, 3]
    assert seen[0].tolist() != seen[1].tolist()


def test_noisy_views_are_normal_differ_between_members_and_end_with_training():
    method, inputs = plugin("augmented_views", "noisy_views", noise=0.2), torch.randn(1000, 3, 8)
    random = torch.Generator().manual_seed(0)
    views = method.member_inputs(inputs, lambda *shape: torch.rand(2, *shape, generator=random), training=True)
    noise = (views - inputs) / 0.2
    assert noise.mean().abs() < 0.05
    assert noise.std() == pytest.approx(1, abs=0.05)
    assert (noise.abs() < 1).double().mean() == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.03)
    assert torch.corrcoef(noise.flatten(1))[0, 1].abs() < 0.05
    assert method.member_inputs(inputs, None, training=False) is None


# temperature


def test_the_temperature_minimises_the_loss_of_the_validation_data(tmp_path):
    run = train("temperature", tmp_path / "run", {"epochs": 8, "optimizer": SGD | {"lr": 1.0}}, method="temperature")
    kept, ensemble = run.outputs("validation"), load("temperature", run)
    mean, fitted = kept.outputs.mean(dim=0).double(), float(ensemble.fitted)

    def nll(temperature):
        return float(-log_softmax(mean / temperature, dim=1)[range(len(mean)), kept.targets].mean())

    grid = torch.logspace(-1.5, 1.5, 2001, dtype=torch.float64).tolist()
    assert nll(fitted) <= min(map(nll, grid)) + 1e-6
    assert nll(fitted) < nll(1.0) - 1e-3
    assert run.combiner().metrics(kept)["nll"] == pytest.approx(nll(fitted), rel=1e-4)
    torch.testing.assert_close(ensemble(data_of(run).inputs), run.outputs("test").outputs.mean(dim=0) / fitted)


def test_the_temperature_stays_finite_if_every_sample_is_right_or_wrong():
    method = plugin("temperature", "temperature", limit=20)
    outputs = torch.tensor([[[3.0, -3.0], [-3.0, 3.0]]])
    assert float(method.fit_combiner(outputs, torch.tensor([0, 1]))) == pytest.approx(1 / 20, rel=1e-3)
    assert float(method.fit_combiner(outputs, torch.tensor([1, 0]))) == pytest.approx(20, rel=1e-3)


# logger


def test_the_logger_writes_each_epoch_once_also_if_the_run_is_resumed(tmp_path):
    table = {"name": "csv_logger", "columns": ["train_objective", "test_loss"]}
    logger = COOKBOOK / "logger.py"
    with pytest.raises(Crash):
        train("logger", tmp_path / "run", {"epochs": 3}, CrashAfter(3, 1), extensions=[table])
    with (tmp_path / "run" / "epochs.csv").open("a") as file:
        file.write("3,0.0,0.0\n")  # as if the run had been killed between this line and its checkpoint
    run = ek.resume(tmp_path / "run", plugins=[logger], progress=False)
    with (run.path / "epochs.csv").open(newline="") as file:
        written = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    assert written == [{name: line[name] for name in ("epoch", *table["columns"])} for line in lines]
    assert [row["epoch"] for row in written] == [1, 2, 3]


# mixture of experts

GATE = {"name": "gate", "role": "auxiliary", "model": {"name": "mlp", "hidden": [4]}}


def mixture(tmp_path):
    tables = {"method": "mixture_of_experts", "ensemble": {"groups": [{"members": 3}, GATE]}}
    return train("mixture_of_experts", tmp_path / "run", {"epochs": 4}, **tables)


def test_the_objective_of_a_mixture_of_experts_is_that_of_the_formula():
    method, loss = plugin("mixture_of_experts", "mixture_of_experts"), CrossEntropy()
    outputs, gate, target = torch.randn(3, 5, 4), torch.randn(1, 5, 3), torch.randint(4, (5,))
    combined = method.combine(outputs, {"gate": gate}, loss)
    for sample in range(5):
        shares, label = gate[0, sample].softmax(dim=0), int(target[sample])
        likelihood = sum(shares[i] * outputs[i, sample].softmax(dim=0)[label] for i in range(3))
        assert float(method.ensemble_loss(combined, target, loss)[sample]) == pytest.approx(-math.log(likelihood))
    assert not method.member_loss(outputs).any()


def test_a_loaded_mixture_of_experts_predicts_with_its_gate(tmp_path):
    run = mixture(tmp_path)
    ensemble, inputs = load("mixture_of_experts", run), data_of(run).inputs
    *members, gate = ensemble.members
    with torch.no_grad():
        shares = gate(inputs).softmax(dim=1)
        probabilities = torch.stack([member(inputs).softmax(dim=1) for member in members], dim=1)
    expected = torch.einsum("bi,bic->bc", shares, probabilities)
    torch.testing.assert_close(ensemble.predict_proba(inputs), expected, rtol=1e-4, atol=1e-6)


def test_a_mixture_of_experts_without_a_gate_is_refused_with_the_group_to_add(tmp_path):
    with pytest.raises(ek.EnsemblekitError, match='needs an auxiliary group "gate" with 2 outputs, and there is none'):
        train("mixture_of_experts", tmp_path / "run", method="mixture_of_experts")


# student


def student(tmp_path, outputs=10):
    group = {"name": "student", "role": "auxiliary", "outputs": outputs, "model": {"hidden": [4]}}
    tables = {"method": "online_student", "ensemble": {"groups": [{"members": 3}, group]}}
    return train("student", tmp_path / "run", **tables)


def test_only_the_student_is_kept_and_predicts(tmp_path):
    run = student(tmp_path)
    ensemble, inputs = load("student", run), data_of(run).inputs
    (network,) = ensemble.members
    assert network.state_dict()["1.weight"].shape == (4, 64)  # hidden layer of the student, not of a member
    assert {name.split(".")[1] for name in load_tensors(run.path / "model.safetensors")} == {"0"}
    torch.testing.assert_close(ensemble(inputs), network(inputs).detach())
    assert len(run.outputs("test").outputs) == 1


def test_a_student_with_another_number_of_outputs_is_refused(tmp_path):
    with pytest.raises(ek.EnsemblekitError, match='needs an auxiliary group "student" with 10 outputs; it has 4'):
        student(tmp_path, outputs=4)


def test_the_loss_of_the_student_is_that_of_the_formula_and_does_not_teach_the_members():
    method = plugin("student", "online_student", share=0.3, temperature=2.0)
    outputs, own = torch.randn(3, 5, 4, requires_grad=True), torch.randn(1, 5, 4, requires_grad=True)
    target = torch.randint(4, (5,))
    losses = method.ensemble_loss(outputs, {"student": own}, target, CrossEntropy())
    teacher = torch.distributions.Categorical(probs=(outputs / 2).softmax(dim=2).mean(dim=0))
    divergence = torch.distributions.kl_divergence(teacher, torch.distributions.Categorical(logits=own[0] / 2))
    expected = 0.7 * cross_entropy(own[0], target, reduction="none") + 0.3 * 2**2 * divergence
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()
    assert outputs.grad is None
    assert own.grad.any()


# decorrelated features


def feature_correlation(path, strength):
    """How strongly the features of two trained members are correlated on the test data, on average."""
    table = {"name": "feature_decorrelation", "strength": strength}
    tables = {"method": table, "model": {"name": "feature_network", "hidden": 8}}
    run = train(
        "feature_decorrelation", path, {"epochs": 20, "evaluate_every": 20, "optimizer": SGD | {"lr": 1.0}}, **tables
    )
    inputs = data_of(run, "train").inputs
    with torch.no_grad():
        features = [member(inputs)[:, 10:] for member in load("feature_decorrelation", run).members]
    between = torch.cov(torch.cat(features, dim=1).T, correction=0)[:8, 8:]
    return float(between.square().sum()), features, run


def test_the_penalty_makes_covariances_between_members_smaller_and_the_members_still_learn(tmp_path):
    free, _, _ = feature_correlation(tmp_path / "free", 0.0)
    bound, _, run = feature_correlation(tmp_path / "bound", 1.0)
    assert bound < 0.5 * free
    assert run.metrics["test_accuracy"] > 0.5


def test_the_penalty_of_covariances_is_that_of_the_formula():
    features = torch.randn(3, 20, 4, dtype=torch.float64)
    method = plugin("feature_decorrelation", "feature_decorrelation", strength=0.7)
    losses = method.ensemble_loss({"features": features}, num_members=3)
    matrix = torch.cov(features.transpose(1, 2).flatten(0, 1), correction=0)  # 12 variables: member by member
    blocks = matrix.unflatten(0, (3, 4)).unflatten(2, (3, 4)).square().sum(dim=(1, 3))
    expected = 0.7 / (2 * 3 * 2) * sum(float(blocks[i, j]) for i in range(3) for j in range(3) if i != j)
    assert losses.tolist() == pytest.approx([expected] * 20)


def test_the_penalty_of_covariances_needs_a_model_with_features(tmp_path):
    with pytest.raises(ek.EnsemblekitError, match='needs outputs called "features"'):
        train("feature_decorrelation", tmp_path / "run", method="feature_decorrelation")
