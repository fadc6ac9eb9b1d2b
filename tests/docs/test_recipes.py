"""Each recipe of the cookbook does what its formula says, beyond that it trains."""

from __future__ import annotations

import csv
import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers.places import ROOT
from helpers.small_runs import Crash, CrashAfter
from safetensors.torch import load_file as load_tensors
from torch.nn.functional import cross_entropy, log_softmax
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ensemblekit as ek
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.registry import load_file

COOKBOOK = ROOT / "docs" / "cookbook"
MLP = {"name": "mlp", "hidden": [8], "batch_norm": False}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.0}
DIGITS = {"name": "digits", "limit_train": 120, "limit_test": 60}
TABLES = {"epochs": 2, "batch_size": 40, "optimizer": SGD}


def plugin(recipe, name, **parameters):
    """A plugin of a recipe by its name, with these parameters."""
    (info,) = [info for info in load_file(COOKBOOK / f"{recipe}.py") if info.name == name]
    return info.load()(**parameters)


def train(recipe, path, training=None, progress=False, **tables):
    """A short run on digits with a recipe; None as its name: without one."""
    spec = {
        "data": DIGITS,
        "model": MLP,
        "ensemble": {"members": 2},
        "engine": {"name": "sequential", "device": "cpu"},
        "training": TABLES | (training or {}),
    }
    plugins = [] if recipe is None else [COOKBOOK / f"{recipe}.py"]
    return ek.train(spec | tables, path, progress=progress, plugins=plugins)


def load(recipe, run):
    return ek.load(run.path, plugins=[COOKBOOK / f"{recipe}.py"])


def data_of(run, split="test"):
    return next(getattr(ek.load_data(run.spec.data, run.spec.seed), split).batches(10_000))


def weights_of(ensemble):
    return torch.stack([parameters_to_vector(member.parameters()).detach() for member in ensemble.members])


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


# heteroscedastic and quantile regression


def noisy_lines(path):
    """A file of y = x with noise of a standard deviation of 0.05 for x < 0 and of 1 for x > 0."""
    random = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(600, generator=random) - 1
    y = x + torch.where(x > 0, 1.0, 0.05) * torch.randn(600, generator=random)
    path.write_text("x,y\n" + "".join(f"{a:.6f},{b:.6f}\n" for a, b in zip(x.tolist(), y.tolist(), strict=True)))
    return {"name": "table", "path": str(path), "target": "y", "standardise_targets": True}


LONGER = {"epochs": 60, "evaluate_every": 60, "optimizer": {"name": "adam", "lr": 0.01}}


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_predicted_variance_is_that_of_the_noise_and_beats_a_constant_one(beta, tmp_path):
    tables = {"data": noisy_lines(tmp_path / "lines.csv"), "method": "gaussian_mixture"}
    loss = {"name": "beta_gaussian", "beta": beta}
    run = train("heteroscedastic", tmp_path / "run", LONGER | {"loss": loss}, **tables)
    ensemble, kept = load("heteroscedastic", run), run.outputs("test")
    inputs = data_of(run).inputs
    mean, log_variance = ensemble(inputs).double().unbind(dim=1)
    deviation, errors = (log_variance / 2).exp(), kept.targets[:, 0].double() - mean
    is_noisy = inputs[:, 0] > inputs[:, 0].mean()
    assert deviation[is_noisy].median() == pytest.approx(1, rel=0.4)  # in the units of the file
    assert deviation[~is_noisy].median() == pytest.approx(0.05, rel=1.0)
    constant = errors.square().mean()
    nll = 0.5 * (log_variance + errors.square() / deviation.square()).mean()
    assert nll < 0.5 * (constant.log() + 1) - 0.3
    assert run.metrics["test_mse"] == pytest.approx(float(constant), rel=1e-4)


def test_the_mixture_has_the_mean_and_the_variance_of_all_members_samples():
    mean, log_variance = torch.randn(2, 3, 4, 1, dtype=torch.float64)
    method = plugin("heteroscedastic", "gaussian_mixture")
    combined = method.combine({"mean": mean, "log_variance": log_variance})
    components = torch.distributions.Normal(mean[..., 0].T, (log_variance[..., 0].T / 2).exp())
    mixture = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.ones(4, 3)), components)
    torch.testing.assert_close(combined[:, 0], mixture.mean)
    torch.testing.assert_close(combined[:, 1].exp(), mixture.variance)


def test_the_loss_of_a_mean_and_a_variance_is_the_likelihood_and_beta_scales_its_gradient():
    outputs, target = torch.randn(5, 2, dtype=torch.float64, requires_grad=True), torch.randn(5, 1, dtype=torch.float64)
    likelihood = plugin("heteroscedastic", "beta_gaussian")(outputs, target)
    normal = torch.distributions.Normal(outputs[:, :1], (outputs[:, 1:] / 2).exp())
    torch.testing.assert_close(likelihood, -normal.log_prob(target)[:, 0] - 0.5 * math.log(2 * math.pi))
    (plain,) = torch.autograd.grad(likelihood.sum(), outputs)
    (scaled,) = torch.autograd.grad(
        plugin("heteroscedastic", "beta_gaussian", beta=1.0)(outputs, target).sum(), outputs
    )
    torch.testing.assert_close(scaled, plain * outputs[:, 1:].detach().exp())
    torch.testing.assert_close(scaled[:, :1], (outputs[:, :1] - target).detach())  # that of the squared error


def test_quantiles_cover_as_many_training_targets_as_they_say_and_follow_the_noise(tmp_path):
    tables = {"data": noisy_lines(tmp_path / "lines.csv")}
    run = train("quantile", tmp_path / "run", LONGER | {"loss": {"name": "pinball"}}, **tables)
    batch = data_of(run, "train")
    ensemble = load("quantile", run)
    low, median, high = ensemble(batch.inputs).unbind(dim=1)
    targets = ensemble.target_scaling.restore(batch.targets)[:, 0]
    covered = [float((targets <= quantile).double().mean()) for quantile in (low, median, high)]
    assert covered == pytest.approx([0.1, 0.5, 0.9], abs=0.06)
    is_noisy = batch.inputs[:, 0] > batch.inputs[:, 0].mean()
    assert (high - low)[is_noisy].median() > 5 * (high - low)[~is_noisy].median()
    assert torch.equal(ensemble.loss.point(ensemble(batch.inputs))[:, 0], median)


def test_the_pinball_loss_is_least_at_the_quantile():
    values = torch.arange(100, dtype=torch.float64)
    loss = plugin("quantile", "pinball", quantiles=(0.5, 0.8))
    candidates = torch.arange(100, dtype=torch.float64)
    losses = [loss(torch.stack([c, c]).expand(100, 2), values.unsqueeze(1)).mean() for c in candidates]
    at_half = plugin("quantile", "pinball", quantiles=(0.5,))
    halves = [at_half(c.expand(100, 1), values.unsqueeze(1)).mean() for c in candidates]
    torch.testing.assert_close(torch.stack(halves), torch.stack([(values - c).abs().mean() / 2 for c in candidates]))
    upper = torch.stack(losses) - torch.stack(halves)  # what is left is the loss of the quantile 0.8
    assert abs(int(upper.argmin()) - float(values.quantile(0.8))) <= 1


# hyper-deep ensembles


def test_groups_of_a_hyper_deep_ensemble_train_with_their_own_settings(tmp_path):
    groups = [{"members": 1}, {"members": 1, "optimizer": {"lr": 1e-9}}]
    ensemble = {"groups": groups, "combiner": "greedy_selection"}
    adamw = {"name": "adamw", "lr": 0.01, "weight_decay": 0.0}
    run = train("hyper_deep", tmp_path / "run", {"epochs": 10, "optimizer": adamw}, ensemble=ensemble)
    still = train(None, tmp_path / "still", {"epochs": 1, "optimizer": adamw | {"lr": 1e-9}}).outputs("test").outputs
    loaded, kept = load("hyper_deep", run), run.outputs("test")
    torch.testing.assert_close(kept.outputs[1], still[1], rtol=0, atol=1e-5)
    assert (kept.outputs[0] - still[0]).abs().mean() > 0.1
    assert loaded.fitted.tolist() == [1.0, 0.0]  # the member that has learned nothing is not selected
    torch.testing.assert_close(loaded(data_of(run).inputs), kept.outputs[0])


def test_greedy_selection_is_at_least_as_good_as_every_member_and_uses_complementary_ones():
    combiner, loss = plugin("hyper_deep", "greedy_selection", size=50), CrossEntropy()
    random = torch.Generator().manual_seed(0)
    target = torch.randint(3, (200,), generator=random)
    signal = 3 * torch.nn.functional.one_hot(target, 3)
    noise = torch.randn(4, 200, 3, generator=random) * torch.tensor([1.5, 1.5, 2.0, 20.0]).view(4, 1, 1)
    outputs = signal + noise
    weights = combiner.fit_combiner(outputs, target, loss)
    losses = loss(outputs, target).mean(dim=1)
    assert float(loss(combiner.combine(outputs, weights), target).mean()) < float(losses.min())
    assert weights.sum() == pytest.approx(1)
    assert weights[3] == 0
    assert (weights[:3] > 0).sum() >= 2
    alone = plugin("hyper_deep", "greedy_selection", size=1).fit_combiner(outputs, target, loss)
    assert alone.tolist() == [float(index == losses.argmin()) for index in range(4)]


# optimizers, augmentations and metrics


def test_steps_of_lion_are_those_of_the_formula():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = plugin("lion", "lion", lr=0.1, weight_decay=0.5).build([weight])
    expected, momentum = weight.detach().tolist(), [0.0] * 3
    for step in range(4):
        gradient = [math.sin(1 + step + index) for index in range(3)]
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        for i in range(3):
            sign = math.copysign(1, 0.9 * momentum[i] + 0.1 * gradient[i])
            expected[i] -= 0.1 * (sign + 0.5 * expected[i])
            momentum[i] = 0.99 * momentum[i] + 0.01 * gradient[i]
        assert weight.tolist() == pytest.approx(expected, rel=1e-5)


def test_runs_with_lion_agree_on_all_engines(tmp_path):
    outputs = {}
    for engine in ("sequential", "threaded", "stacked"):
        training, tables = {"optimizer": {"name": "lion", "lr": 0.001}}, {"engine": {"name": engine, "device": "cpu"}}
        outputs[engine] = train("lion", tmp_path / engine, training, **tables).outputs("test").outputs
    for engine in ("threaded", "stacked"):
        torch.testing.assert_close(outputs[engine], outputs["sequential"], rtol=1e-4, atol=1e-5)


def test_cutout_removes_one_square_of_each_image_and_nothing_else():
    augmentation, images = plugin("cutout", "cutout", size=3), torch.rand(200, 2, 8, 6) + 0.1
    sampled = augmentation.sample(200, torch.Generator().manual_seed(0))
    changed = augmentation.apply(images, sampled)
    removed = changed == 0
    assert torch.equal(changed[~removed], images[~removed])
    assert torch.equal(removed[:, 0], removed[:, 1])
    for image, centre in zip(removed[:, 0], (sampled * torch.tensor([8, 6])).long().tolist(), strict=True):
        rows, columns = (range(max(0, c - 1), min(length, c + 2)) for c, length in zip(centre, (8, 6), strict=True))
        assert image.nonzero().tolist() == [[row, column] for row in rows for column in columns]


def test_uniform_mixup_mixes_inputs_and_the_objective_by_the_same_share(tmp_path):
    mix, inputs = plugin("own_mixup", "uniform_mixup", least=0.6), torch.randn(50, 3)
    mixed, partner, share = mix.apply(inputs, mix.sample(50, torch.Generator().manual_seed(0)))
    assert sorted(partner.tolist()) == list(range(50))
    assert 0.6 <= float(share.min()) < 0.7 < 0.9 < float(share.max()) <= 1
    for index in range(50):
        expected = share[index] * inputs[index] + (1 - share[index]) * inputs[partner[index]]
        torch.testing.assert_close(mixed[index], expected)
    plain = train(None, tmp_path / "plain").outputs("test").outputs
    alone = train("own_mixup", tmp_path / "alone", {"mix": {"name": "uniform_mixup", "least": 1.0}})
    torch.testing.assert_close(alone.outputs("test").outputs, plain)  # each sample is mixed with nothing


def test_balanced_accuracy_is_that_of_scikit_learn(tmp_path):
    from sklearn.metrics import balanced_accuracy_score

    run = train("balanced_accuracy", tmp_path / "run", metrics=["balanced_accuracy"])
    kept = run.outputs("test")
    predicted = kept.outputs.mean(dim=0).argmax(dim=1)
    expected = balanced_accuracy_score(kept.targets.numpy(), predicted.numpy())
    assert run.metrics["test_balanced_accuracy"] == pytest.approx(expected)
