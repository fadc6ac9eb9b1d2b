"""Recipes of the cookbook for parts of a run: combiner, optimizer, augmentations and metric."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.recipes import data_of, load, plugin, train

from ensemblekit.core.losses import CrossEntropy

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


def test_the_geometric_recall_is_that_of_scikit_learns_recalls(tmp_path):
    from sklearn.metrics import recall_score

    run = train("geometric_recall", tmp_path / "run", metrics=["geometric_recall"])
    kept = run.outputs("test")
    predicted = kept.outputs.mean(dim=0).argmax(dim=1)
    recalls = recall_score(kept.targets.numpy(), predicted.numpy(), average=None)
    assert run.metrics["test_geometric_recall"] == pytest.approx(recalls.prod() ** 0.1)
