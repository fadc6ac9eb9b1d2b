"""Weights of samples and classes: how much each training sample counts, on every engine, in every method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ensemblekit_datasets.table import Table
from helpers.engine_training import C, M, batches, member_states, method, model, settings
from sklearn.utils.class_weight import compute_class_weight

import ensemblekit as ek
from ensemblekit.api import run_spec
from ensemblekit.core.dataset import DataInfo, Splits
from ensemblekit.core.errors import DataError, SpecError
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Mix, Objective
from ensemblekit.data.loading import Batch, load_data
from ensemblekit.data.weighting import weighted_by_class
from ensemblekit.engines.selection import engine_class
from ensemblekit.members.python_specs import registry_of
from ensemblekit.members.state import MemberState
from ensemblekit.testing.toy_run import CopyAfterEpoch, trained_weights
from ensemblekit.training.fitting import fit_members

IMPORTANCE = torch.linspace(0, 2, 12)
INPUTS = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
RARE = (torch.arange(90) % 9 == 0).long() + (torch.arange(90) % 30 == 1).long() * 2
TABLES = [{"name": "gncl", "lambda": 0.4}, {"name": "gncl", "mode": "exact"}, {"name": "divloss"}, {"name": "smcl"}]


def outputs_and_target() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(M, 12, C, generator=generator, dtype=torch.float64)
    return outputs, torch.randint(C, (12,), generator=generator)


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_a_sample_of_importance_two_counts_as_two_copies_of_it(table):
    objective = Objective([method(table)], CrossEntropy())
    outputs, target = outputs_and_target()
    importance = torch.tensor([2.0, 0.0, 1.0] * 4)
    copies = torch.arange(12).repeat_interleave(importance.long())
    expected = objective(outputs[:, copies], target[copies]) * len(copies) / 12
    torch.testing.assert_close(objective(outputs, target, importance=importance), expected)


def test_importance_multiplies_with_the_weights_of_methods():
    objective = Objective([], CrossEntropy())
    outputs, target = outputs_and_target()
    weights = torch.rand(12, M, dtype=torch.float64)
    together = objective(outputs, target, weights, importance=IMPORTANCE)
    torch.testing.assert_close(together, objective(outputs, target, weights * IMPORTANCE.unsqueeze(1)))


def test_the_target_of_a_mixed_sample_has_the_importance_of_the_sample_that_it_comes_from():
    objective = Objective([method({"name": "gncl", "lambda": 0.4})], CrossEntropy())
    outputs, target = outputs_and_target()
    partner, share = torch.arange(12).roll(1), torch.linspace(0.1, 0.9, 12, dtype=torch.float64)
    found = objective(outputs, target, mix=Mix(partner, share), importance=IMPORTANCE)
    alone = [objective(outputs[:, [b]], target[[b]]) for b in range(12)]
    others = [objective(outputs[:, [b]], target[[int(partner[b])]]) for b in range(12)]
    terms = [
        share[b] * IMPORTANCE[b] * alone[b] + (1 - share[b]) * IMPORTANCE[int(partner[b])] * others[b]
        for b in range(12)
    ]
    torch.testing.assert_close(found, torch.stack(terms).mean())


@pytest.mark.parametrize("table", [{"name": "independent"}, {"name": "gncl", "lambda": 0.4}], ids=str)
def test_every_engine_trains_the_same_members_with_importance(table):
    found = {}
    for name in ("sequential", "threaded", "stacked"):
        members = member_states([model("mlp", hidden=(8,))] * M)
        engine = engine_class(name)(members, Objective([method(table)], CrossEntropy()), settings("sgd"))
        for step, batch in enumerate(batches()):
            weighted = Batch(batch.inputs, batch.targets, batch.index, importance=IMPORTANCE)
            engine.train_step(weighted, None, 0.1, step)
        found[name] = engine.predict(batches(1)[0].inputs)
        plain = engine_class(name)(
            member_states([model("mlp", hidden=(8,))] * M), Objective([method(table)], CrossEntropy()), settings("sgd")
        )
        for step, batch in enumerate(batches()):
            plain.train_step(batch, None, 0.1, step)
        assert not torch.allclose(plain.predict(batches(1)[0].inputs), found[name], atol=1e-4), "it has an effect"
        engine.close()
        plain.close()
    torch.testing.assert_close(found["threaded"], found["sequential"])
    torch.testing.assert_close(found["stacked"], found["sequential"], rtol=1e-4, atol=1e-5)


class Weighted(ek.Dataset):
    """Imbalanced classes with weights of the samples."""

    first: float = 5.0

    @property
    def info(self) -> DataInfo:
        return DataInfo("classification", (4,), 3)

    def load(self, seed: int) -> Splits:
        weights = torch.where(torch.arange(90) < 45, self.first, 1.0)
        return Splits((INPUTS, RARE), (INPUTS, RARE), self.info, weights=weights)


def test_weights_stay_with_their_samples_when_others_are_held_out_or_left_out():
    data = load_data(Weighted(validation_fraction=0.2, limit_train=40), seed=3)
    importance, indices = data.train.importance, data.train.indices
    assert importance is not None
    assert importance.mean().item() == pytest.approx(1)
    ratio = importance / importance[indices >= 45][0]
    assert torch.allclose(ratio, torch.where(indices < 45, 5.0, 1.0))
    for batch in data.train.training_batches(16, seed=0, epoch=1):
        assert torch.equal(batch.importance, importance[batch.index])
    assert data.test.importance is None


def test_balanced_class_weights_are_those_of_scikit_learn():
    data = weighted_by_class(load_data(Weighted(first=1.0), seed=0), "balanced")
    targets = data.train.targets.numpy()
    expected = compute_class_weight("balanced", classes=np.arange(3), y=targets)[targets]
    np.testing.assert_allclose(data.train.importance.numpy(), expected, rtol=1e-6)


def test_balanced_classes_have_the_same_sum_of_weights_if_samples_have_weights_too():
    data = weighted_by_class(load_data(Weighted(), seed=0), "balanced")
    sums = data.train.targets.bincount(data.train.importance)
    assert torch.allclose(sums, sums.mean())


def test_only_the_ratios_of_class_weights_matter():
    data = load_data(Weighted(), seed=0)
    once, twice = weighted_by_class(data, [1.0, 2.0, 4.0]), weighted_by_class(data, [10.0, 20.0, 40.0])
    torch.testing.assert_close(once.train.importance, twice.train.importance)
    assert weighted_by_class(data, None) is data


def spec(**training: object) -> dict:
    return {
        "data": {"name": "weighted"},
        "model": {"name": "mlp", "hidden": [8]},
        "ensemble": {"members": 2},
        "method": {"name": "gncl", "lambda": 0.5},
        "training": {"epochs": 3, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 0.1}} | training,
        "engine": {"name": "sequential", "device": "cpu"},
    }


def test_a_run_with_class_weights_finds_more_of_the_rare_classes(tmp_path):
    settings = {"epochs": 15, "optimizer": {"name": "adam", "lr": 0.02}}
    plain = ek.train(spec(**settings), tmp_path / "plain", progress=False, plugins=[Weighted])
    balanced = ek.train(
        spec(class_weights="balanced", **settings), tmp_path / "balanced", progress=False, plugins=[Weighted]
    )
    recalls = [
        np.mean([row["recall"] for row in ek.evaluate_run(run.path, per_class=True, plugins=[Weighted])["classes"]])
        for run in (plain, balanced)
    ]
    assert recalls[1] > recalls[0] + 0.1


def test_a_stopped_run_with_weights_resumes_to_bit_identical_weights(tmp_path):
    copy = tmp_path / "copy"
    registry = registry_of([Weighted])
    table = ek.load_spec(spec(class_weights=[1, 2, 3]), plugins=[Weighted])
    run = run_spec(table, registry, tmp_path / "run", [CopyAfterEpoch(1, copy)])
    resumed = ek.resume(copy, progress=False, plugins=[Weighted])
    whole, continued = trained_weights(run.path), trained_weights(resumed.path)
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_metrics_are_not_weighted(tmp_path):
    run = ek.train(spec(class_weights="balanced"), tmp_path / "run", progress=False, plugins=[Weighted])
    kept = run.outputs("test")
    combined = run.combiner().combine(kept.outputs)
    expected = torch.nn.functional.cross_entropy(combined, kept.targets)
    assert run.metrics["test_loss"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "expected"), [([1.0, 2.0], "2 weights for 3 classes"), ([-1.0, 1.0, 1.0], "class_weights")]
)
def test_class_weights_that_do_not_fit_are_refused_before_training(weights, expected, tmp_path):
    with pytest.raises(SpecError, match=expected):
        ek.train(spec(class_weights=weights), tmp_path / "run", progress=False, plugins=[Weighted])
    assert not (tmp_path / "run").exists()


def test_class_weights_of_a_regression_are_refused(tmp_path):
    table = spec(class_weights="balanced") | {"data": "diabetes"}
    with pytest.raises(SpecError, match="weights of classes are set, but the task is regression"):
        ek.load_spec(table)


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    rows = "".join(f"{index},{index % 3},{'ab'[index % 2]},{1 + index % 4}\n" for index in range(60))
    path = tmp_path / "table.csv"
    path.write_text("x,z,kind,count\n" + rows)
    return path


def test_a_weight_column_of_a_table_is_no_feature_and_weights_its_training_rows(csv):
    table = Table(path=csv, target="kind", weight="count", validation_fraction=0.2)
    data = load_data(table, 0)
    assert data.info.input_shape == (2,)
    count = 1 + data.train.indices % 4
    torch.testing.assert_close(data.train.importance, (count / count.double().mean()).float())
    assert ("  count", "weight of the row, no feature") in data.notes
    without = csv.with_name("new.csv")
    without.write_text("x,z,kind\n1,2,a\n")
    assert table.prepare(without, data.preparation).inputs.shape == (1, 2)


@pytest.mark.parametrize(("value", "got"), [("-1", "-1.0"), ("", "nothing")])
def test_a_weight_that_is_missing_or_negative_is_named_with_its_line(csv, value, got):
    csv.write_text(csv.read_text() + f"1,2,a,{value}\n")
    with pytest.raises(DataError, match=f"expected a weight of at least 0, got {got}") as error:
        Table(path=csv, target="kind", weight="count").load(0)
    assert "line 62" in error.value.where


def test_a_run_is_not_resumed_with_other_weights(csv, tmp_path):
    table = {"name": "table", "path": str(csv), "target": "kind", "weight": "count"}
    copy = tmp_path / "copy"
    run_spec(ek.load_spec(spec() | {"data": table}), registry_of(), tmp_path / "run", [CopyAfterEpoch(1, copy)])
    csv.write_text(csv.read_text().replace(",1\n", ",9\n"))
    with pytest.raises(DataError, match="the sample weights changed"):
        ek.resume(copy, progress=False)


def test_members_that_are_fitted_get_the_weights_of_methods_times_those_of_the_data():
    seen = []

    class Spy(ek.Model):
        """Notes the weights that it is fitted with."""

        fitted = True

        def build(self, input_shape, num_outputs):
            return torch.nn.Flatten()

        def fit(self, network, inputs, targets, weights, loss, seed):
            seen.append(weights)

    data = load_data(Weighted(), seed=0)
    table = ek.load_spec(spec(), plugins=[Weighted])
    for weights in (None, torch.rand(len(data.train), 2)):
        states = [MemberState(torch.nn.Flatten(), Spy(), index) for index in range(2)]
        fit_members(states, {"train": data.train}, weights, table)
        found = torch.stack(seen, dim=1)
        seen.clear()
        factor = torch.ones(len(data.train), 2) if weights is None else weights
        torch.testing.assert_close(found, factor * data.train.importance.unsqueeze(1))
