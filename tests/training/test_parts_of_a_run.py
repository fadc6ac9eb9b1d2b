"""Combiners, mixed samples and members that are not networks, in whole runs: on every engine, loaded and resumed."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from helpers.small_runs import Crash, CrashAfter, assert_same_run, assert_same_tensors, small_spec, training
from safetensors.torch import load_file, save_file

import ensemblekit as ek
from ensemblekit import hookimpl

ENGINES = ("sequential", "threaded", "stacked")
PLAIN = {"name": "digits", "limit_train": 200, "limit_test": 100}
FOREST = {"name": "sklearn", "estimator": "random_forest", "parameters": {"n_estimators": 5}}


def train(path, progress=False, plugins=(), **changes):
    spec = small_spec(training=training(epochs=2)) | changes
    return ek.train(spec, out=path, progress=progress, plugins=plugins)


def test_a_combiner_changes_predictions_and_not_training(tmp_path):
    by_mean = train(tmp_path / "mean", method={"name": "gncl"})
    by_votes = train(tmp_path / "vote", method={"name": "gncl"}, ensemble={"members": 3, "combiner": "vote"})
    assert_same_tensors(by_mean.path / "model.safetensors", by_votes.path / "model.safetensors")
    kept = by_votes.outputs("test")
    votes = torch.nn.functional.one_hot(kept.outputs.argmax(dim=-1), 10).double().mean(dim=0)
    mean = kept.outputs.softmax(dim=-1).double().mean(dim=0)
    expected = float(((votes + 1e-3 * mean).argmax(dim=-1) == kept.targets).double().mean())
    assert by_votes.metrics["test_accuracy"] == pytest.approx(expected)
    assert by_votes.metrics["test_nll"] != by_mean.metrics["test_nll"]
    assert ek.evaluate_run(by_votes.path)["test_nll"] == pytest.approx(by_votes.metrics["test_nll"], rel=1e-5)


def test_a_fitted_combiner_is_saved_with_the_model(tmp_path):
    run = train(tmp_path / "run", ensemble={"members": 3, "combiner": "weighted"})
    (name,) = [name for name in load_file(run.path / "model.safetensors") if "combiner" in name]
    weights = load_file(run.path / "model.safetensors")[name]
    assert weights.sum() == pytest.approx(1, abs=1e-5)
    kept = run.outputs("test")
    expected = (weights.reshape(3, 1, 1) * kept.outputs).sum(dim=0).softmax(dim=-1)
    torch.testing.assert_close(run.combiner().probabilities(kept.outputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mix", ["mixup", "cutmix"])
def test_runs_on_mixed_samples_agree_on_every_engine_and_resume(mix, tmp_path):
    changes = {"data": PLAIN, "training": training(epochs=2, mix=mix)}
    runs = [train(tmp_path / name, engine={"name": name, "device": "cpu"}, **changes) for name in ENGINES]
    for run in runs[1:]:
        torch.testing.assert_close(run.outputs("test").outputs, runs[0].outputs("test").outputs, rtol=1e-3, atol=2e-4)
    plain = train(tmp_path / "plain", data=PLAIN)
    assert not torch.equal(plain.outputs("test").outputs, runs[0].outputs("test").outputs)
    often = {**changes, "training": changes["training"] | {"checkpoint_every_minutes": 1e-9}}
    with pytest.raises(Crash):
        train(tmp_path / "part", progress=CrashAfter(2, 2), **often)
    ek.resume(tmp_path / "part", progress=False)
    assert_same_run(tmp_path / "sequential", tmp_path / "part")


@pytest.mark.parametrize("engine", ENGINES)
def test_networks_learn_beside_a_fitted_member(engine, tmp_path):
    groups = [{"members": 2}, {"members": 1, "model": FOREST}]
    changes = {"method": {"name": "gncl", "lambda": 0.8}, "data": PLAIN, "engine": {"name": engine, "device": "cpu"}}
    run = train(tmp_path / "run", ensemble={"groups": groups}, **changes)
    losses = [member["loss"] for member in run.members]
    assert losses[2] < 2  # unfitted, it would be log 10
    assert [member["frozen"] for member in run.members] == [False, False, True]
    alone = train(tmp_path / "alone", ensemble={"members": 2}, **changes)
    assert not torch.equal(run.outputs("test").outputs[:2], alone.outputs("test").outputs)  # they have learnt beside it
    inputs = torch.cat([batch.inputs for batch in ek.load_data(run.spec.data, 0).test.batches(50)])
    loaded = ek.load(tmp_path / "run").member_outputs(inputs)
    torch.testing.assert_close(loaded, run.outputs("test").outputs, rtol=1e-4, atol=1e-5)


def test_a_run_with_a_fitted_member_resumes_without_fitting_it_again(tmp_path):
    changes = {"ensemble": {"groups": [{"members": 1}, {"members": 2, "model": FOREST}]}, "method": {"name": "bagging"}}
    train(tmp_path / "whole", **changes)
    often = training(epochs=2, checkpoint_every_minutes=1e-9)
    with pytest.raises(Crash):
        train(tmp_path / "part", progress=CrashAfter(2, 2), **{**changes, "training": often})
    ek.resume(tmp_path / "part", progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_a_member_of_another_run_complements_new_ones(tmp_path):
    old = train(tmp_path / "old", data=PLAIN)
    groups = [{"members": 2}, {"members": 1, "model": {"name": "frozen", "run": str(old.path), "member": 1}}]
    new = train(tmp_path / "new", ensemble={"groups": groups}, method={"name": "gncl"}, data=PLAIN)
    torch.testing.assert_close(new.outputs("test").outputs[2], old.outputs("test").outputs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_known_predictions_are_a_member(engine, tmp_path):
    outputs = torch.randn(1797, 10)
    save_file({"train": outputs, "test": outputs.clone()}, tmp_path / "given.safetensors")
    groups = [
        {"members": 2},
        {"members": 1, "model": {"name": "predictions", "path": str(tmp_path / "given.safetensors")}},
    ]
    engine_table = {"name": engine, "device": "cpu"}
    run = train(tmp_path / "run", ensemble={"groups": groups}, method={"name": "gncl"}, engine=engine_table)
    kept = run.outputs("test")
    torch.testing.assert_close(kept.outputs[2], outputs[kept.index])
    assert ek.open_run(run.path).combiner().metrics(kept)["loss"] == pytest.approx(run.metrics["test_loss"], rel=1e-4)
    with pytest.raises(ek.EnsemblekitError, match="no network"):
        ek.load(run.path).predict(torch.rand(2, 1, 8, 8))


class Counts(ek.Model):
    """A linear network that counts how often it is computed in training."""

    calls: ClassVar[int] = 0

    def build(self, input_shape, num_outputs):
        class Network(torch.nn.Linear):
            def forward(self, inputs):
                if not inputs.is_meta:
                    Counts.calls += 1
                return super().forward(inputs.flatten(1))

        return Network(torch.Size(input_shape).numel(), num_outputs)


class FreezesOne(ek.Method):
    """Freezes a member at the start."""

    @hookimpl
    def epoch_started(self, ensemble, epoch):
        if epoch == 1:
            ensemble.freeze(0)

    @hookimpl
    def ensemble_loss(self, combined, target, loss):
        return loss(combined, target)


@pytest.mark.parametrize(("augment", "is_once"), [([], True), (["rotate"], False)])
def test_outputs_of_a_frozen_member_are_computed_once_where_inputs_do_not_change(
    augment, is_once, tmp_path, monkeypatch
):
    groups = [{"members": 1, "model": {"name": "counts"}}, {"members": 2}]
    counts = []
    for epochs in (2, 6):
        monkeypatch.setattr(Counts, "calls", 0)
        train(
            tmp_path / f"run-{epochs}",
            plugins=[Counts, FreezesOne],
            data={**PLAIN, "augment": augment},
            method={"name": "freezes_one"},
            ensemble={"groups": groups},
            training=training(epochs=epochs, evaluate_every=10),
        )
        counts.append(Counts.calls)
    steps = 4 * 4  # of four more epochs
    assert counts[1] - counts[0] == (0 if is_once else steps)
