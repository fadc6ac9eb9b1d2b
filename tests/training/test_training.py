"""Training as a whole: every method learns, runs are repeatable, and a run that was stopped goes on bit-identical."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
from helpers.places import ROOT, TOY_PLUGINS
from helpers.plain_methods import plain_methods
from helpers.run_edits import edit_spec
from helpers.small_runs import Crash, CrashAfter, CrashOnSave, assert_same_run
from safetensors.torch import load_file

import ensemblekit as ek
from ensemblekit.core.errors import DataError, NumericError, PluginError, RunError, UsageError
from ensemblekit.engines.sequential import SequentialEngine
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec.optimizers import optimizer_classes
from ensemblekit.spec.sections import ENGINES
from ensemblekit.training.trainer import Trainer

METHODS = [
    *({"name": name} for name in sorted(set(plain_methods()) - {"snapshot", "fast_geometric"})),
    {"name": "gncl", "mode": "exact"},
    {"name": "gncl", "mode": "bounded"},
    {"name": "fast_geometric", "cycles": 3},
    {"name": "boosting", "schedule": "stagewise"},
    {"name": "snapshot", "at_epochs": [2, 3]},
    {"name": "snapshot", "cycles": 3},
]


def tables(**changes) -> dict:
    """A few small networks with dropout on augmented digits."""
    base = {
        "data": {"name": "digits", "limit_train": 200, "limit_test": 100, "augment": ["crop", "rotate"], "padding": 1},
        "model": {"name": "mlp", "hidden": [16], "dropout": 0.2},
        "ensemble": {"members": 3},
        "training": {"epochs": 4, "batch_size": 50, "optimizer": {"name": "adabelief", "lr": 0.01}},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    return base | changes


def name_of(table: dict) -> str:
    return "-".join(str(value) for value in table.values())


COUPLED_GROWING_AND_COPYING = [
    {"name": "adaboost"},
    {"name": "adversarial"},
    {"name": "swa"},
    {"name": "gncl"},
    METHODS[-3],
    METHODS[-2],
]


@pytest.mark.parametrize(
    ("method", "engine"),  # the contract kit resumes every method, with the sequential engine
    [(method, engine) for method in COUPLED_GROWING_AND_COPYING for engine in ENGINES],
    ids=lambda value: name_of(value) if isinstance(value, dict) else value,
)
def test_a_run_that_was_stopped_is_bit_identical_when_resumed(method, engine, tmp_path):
    spec = tables(method=method, engine={"name": engine, "device": "cpu"})
    if method["name"] == "snapshot":
        del spec["ensemble"]
    if method["name"] == "fast_geometric":
        spec["training"]["epochs"] = 6
    whole = ek.train(spec, tmp_path / "whole", progress=False)
    with pytest.raises(Crash):
        ek.train(spec, tmp_path / "stopped", progress=CrashAfter(3, 2))
    resumed = ek.resume(tmp_path / "stopped", progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    assert resumed.metrics == whole.metrics
    assert len(resumed.members) == 3 * (16 if method["name"] == "dropout" else 1)


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_taken(tmp_path):
    spec = tables(method="gncl")
    ek.train(spec, tmp_path / "whole", progress=False)
    with pytest.raises(Crash):
        ek.train(spec, tmp_path / "stopped", progress=CrashAfter(4, 2))
    last = tmp_path / "stopped" / "checkpoints" / "epoch-000003.safetensors"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    resumed = ek.resume(tmp_path / "stopped", progress=False)
    assert any("checksum mismatch" in text and last.name in text for text in resumed.notices)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    for name, seed in (("first", 0), ("second", 0), ("third", 1)):
        ek.train(tables(method="gncl", seed=seed), tmp_path / name, progress=False)
    assert_same_run(tmp_path / "first", tmp_path / "second")
    left, right = load_file(tmp_path / "first/model.safetensors"), load_file(tmp_path / "third/model.safetensors")
    assert not any(torch.equal(left[name], right[name]) for name in left if name.endswith("weight"))


def test_training_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ek.train(tables(), tmp_path / "run", progress=False)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_draws_from_the_global_generator_is_repeatable_and_kept_from_threads(tmp_path):
    model = {"name": "noisy"}
    spec = ek.load_spec(tables(model=model), plugins=[TOY_PLUGINS])
    for name in ("first", "second"):
        ek.train(spec, tmp_path / name, progress=False, plugins=[TOY_PLUGINS])
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(left[name], right[name]) for name in left)
    threaded = ek.load_spec(tables(model=model, engine={"name": "threaded"}), plugins=[TOY_PLUGINS])
    with pytest.raises(UsageError, match="global random generator, which threads share"):
        ek.train(threaded, tmp_path / "third", progress=False, plugins=[TOY_PLUGINS])


def test_a_resolved_spec_repeats_the_run_and_names_the_engine_that_auto_chose(tmp_path):
    run = ek.train(tables(method="gncl", engine={"name": "auto"}), tmp_path / "first", progress=False)
    assert run.spec.engine.name in ("sequential", "threaded", "stacked")
    environment = json.loads((tmp_path / "first" / "environment.json").read_text())
    assert environment["engine"] == run.spec.engine.name
    assert (environment["device"], environment["seed"]) == ("cpu", 0)
    plugins = {(entry["kind"], entry["name"]): entry["version"] for entry in environment["plugins"]}
    assert plugins["method", "gncl"] == plugins["model", "mlp"] == ek.__version__
    assert set(environment["engines_measured"]) >= {run.spec.engine.name}
    ek.train(tmp_path / "first" / "spec.toml", tmp_path / "second", progress=False)
    assert_same_run(tmp_path / "first", tmp_path / "second")


@pytest.mark.parametrize("second", ["threaded", "stacked"])
def test_a_run_can_go_on_with_another_engine(second, tmp_path):
    spec = tables(method="gncl", model={"name": "mlp", "hidden": [16], "batch_norm": False})
    whole = ek.train(spec, tmp_path / "whole", progress=False)
    with pytest.raises(Crash):
        ek.train(spec, tmp_path / "stopped", progress=CrashAfter(3, 2))
    changed = ek.load_spec(spec, overrides={"engine.name": second})
    trainer = Trainer(changed, RunDirectory.open(tmp_path / "stopped"))
    trainer.resume()
    assert trainer.metrics["test_loss"] == pytest.approx(whole.metrics["test_loss"], rel=1e-4)


def test_metrics_have_the_promised_names(tmp_path):
    run = ek.train(tables(method="gncl"), tmp_path / "run", progress=False)
    expected = {
        "epoch", "train_objective", "train_loss", "train_accuracy", "test_accuracy", "test_loss", "test_nll",
        "test_ece", "test_brier", "test_mean_member_accuracy", "test_best_member_accuracy",
        "test_worst_member_accuracy", "test_oracle_accuracy",
        "test_diversity", "test_remainder", "test_disagreement", "learning_rate", "samples_per_second", "seconds",
        "validation_accuracy", "validation_loss",
    }  # fmt: skip
    assert [row["epoch"] for row in run.history] == [1, 2, 3, 4]
    assert expected <= set(run.history[-1])
    assert ek.evaluate_run(run.path) == pytest.approx(run.metrics, rel=1e-5, abs=1e-6)
    assert run.metrics["test_accuracy"] == run.history[-1]["test_accuracy"]


def test_regression_has_metrics_of_its_own(tmp_path):
    spec = ek.load_spec(ROOT / "specs" / "diabetes.toml", overrides={"training.epochs": 20})
    run = ek.train(spec, tmp_path / "run", progress=False)
    assert {"test_mse", "test_r2", "test_mean_member_mse", "test_diversity"} <= set(run.metrics)
    assert "test_accuracy" not in run.metrics
    assert run.metrics["test_r2"] > 0.3


def test_a_loaded_ensemble_is_the_trained_one(tmp_path):
    run = ek.train(tables(method={"name": "boosting", "shrinkage": 0.5}), tmp_path / "run", progress=False)
    ensemble = ek.load(tmp_path / "run")
    inputs = torch.rand(5, 1, 8, 8)
    outputs = ensemble.member_outputs(inputs)
    assert outputs.shape == (3, 5, 10)
    torch.testing.assert_close(ensemble(inputs), 0.5 * outputs.sum(dim=0))
    torch.testing.assert_close(ensemble.predict_proba(inputs), ensemble(inputs).softmax(-1))
    assert torch.equal(run.ensemble(inputs), ensemble(inputs))
    assert ensemble.classes == tuple("0123456789")
    assert not ensemble.training


def test_learning_rates_follow_the_schedule_step_by_step(tmp_path):
    schedule = {"name": "step", "every": 2, "factor": 0.5}
    spec = tables(training={**tables()["training"], "schedule": schedule})
    run = ek.train(spec, tmp_path / "run", progress=False)
    assert [row["learning_rate"] for row in run.history] == [0.01, 0.01, 0.005, 0.005]


def test_training_stops_early_and_keeps_the_best_weights_by_validation_data(tmp_path):
    training = {
        "epochs": 30,
        "batch_size": 50,
        "patience": 2,
        "keep": "best",
        "optimizer": {"name": "adam", "lr": 0.05},
    }
    run = ek.train(tables(training=training), tmp_path / "run", progress=False)
    losses = [row["validation_loss"] for row in run.history]
    best = losses.index(min(losses))
    assert len(losses) < 30
    assert len(losses) == best + 3
    assert run.metrics["test_loss"] == pytest.approx(run.history[best]["test_loss"])


def test_evaluation_can_be_rarer(tmp_path):
    training = {**tables()["training"], "epochs": 5, "evaluate_every": 2}
    run = ek.train(tables(training=training), tmp_path / "run", progress=False)
    assert ["test_accuracy" in row for row in run.history] == [False, True, False, True, True]


@pytest.mark.parametrize(("keep", "evaluations_of_test"), [("last", 3), ("best", 4)])
def test_what_the_last_epoch_evaluated_is_not_evaluated_again(keep, evaluations_of_test, tmp_path, monkeypatch):
    asked = []
    predict = SequentialEngine._predict_here
    monkeypatch.setattr(SequentialEngine, "_predict_here", lambda *args: asked.append(len(args[1])) or predict(*args))
    spec = tables(training={**tables()["training"], "epochs": 3, "keep": keep})
    run = ek.train(spec, tmp_path / "run", progress=False)
    assert asked.count(asked[-1]) == evaluations_of_test
    monkeypatch.undo()
    assert ek.evaluate_run(run.path) == pytest.approx(run.metrics, rel=1e-5, abs=1e-6)


def test_a_run_that_ended_before_it_could_say_so_is_not_trained_further(tmp_path):
    """Patience had run out when it was killed, after the checkpoint of that epoch."""
    training = {"epochs": 30, "batch_size": 20, "patience": 1, "optimizer": {"name": "sgd", "lr": 1.0}}
    spec = tables(model={"name": "mlp", "hidden": [8]}, training=training)
    whole = ek.train(spec, tmp_path / "whole", progress=False)
    assert len(whole.history) < 30
    with pytest.raises(Crash):
        ek.train(spec, tmp_path / "killed", progress=CrashOnSave(len(whole.history)))
    resumed = ek.resume(tmp_path / "killed", progress=False)
    assert resumed.metrics == whole.metrics
    assert len(resumed.history) == len(whole.history)


def test_a_best_loss_of_zero_is_remembered(tmp_path):
    """Classes so far apart that the loss is zero from the first epoch on, which no epoch can better."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (200,), generator=generator)
    inputs = (2.0 * labels - 1).unsqueeze(1) * 10 + torch.randn(200, 3, generator=generator)
    data = ((inputs[:150], labels[:150]), (inputs[150:], labels[150:]))
    training = {"epochs": 30, "batch_size": 20, "patience": 3, "optimizer": {"name": "sgd", "lr": 10.0}}
    spec = {"data": {"name": "given", "validation_fraction": 0.2}, "model": {"name": "mlp", "hidden": []}}
    spec |= {"training": training, "engine": {"name": "sequential", "device": "cpu"}}
    with pytest.raises(Crash):
        ek.train(spec, tmp_path / "run", data=data, progress=CrashOnSave(2))
    resumed = ek.resume(tmp_path / "run", data=data, progress=False)
    assert [row["validation_loss"] for row in resumed.history] == [0.0] * 4


@pytest.mark.parametrize("name", sorted(optimizer_classes()))
def test_every_optimizer_trains_and_resumes_to_the_same_weights(name, tmp_path):
    training = {"epochs": 3, "batch_size": 100, "optimizer": {"name": name, "lr": 0.001}}
    if name == "adafactor":
        training["optimizer"]["eps"] = [1e-7, 1e-3]  # its own default divides by almost nothing
    spec = tables(method={"name": "snapshot", "at_epochs": [2]}, ensemble={"members": 2}, training=training)
    whole = ek.train(spec, tmp_path / "whole", progress=False)
    with pytest.raises(Crash):
        ek.train(spec, tmp_path / "killed", progress=CrashOnSave(2))
    ek.resume(tmp_path / "killed", progress=False)
    left, right = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "killed"))
    assert all(torch.equal(left[key], right[key]) for key in left)
    assert ek.load_spec(whole.path / "spec.toml").to_dict() == whole.spec.to_dict()


def test_a_combiner_without_held_out_data_to_fit_it_to_is_refused_before_training(tmp_path):
    fits = ek.load_spec(tables(method="fits_bias"), plugins=[TOY_PLUGINS])
    assert ek.train(fits, tmp_path / "fits", progress=False, plugins=[TOY_PLUGINS]).ensemble.fitted.shape == (10,)
    data = {**tables()["data"], "validation_fraction": 0.0}
    spec = ek.load_spec(tables(method="fits_bias", data=data), plugins=[TOY_PLUGINS])
    with pytest.raises(UsageError, match=r"(?s)validation data.*data\.validation_fraction"):
        ek.train(spec, tmp_path / "run", progress=False, plugins=[TOY_PLUGINS])
    assert not (tmp_path / "run").exists()


def test_own_data_sets_can_be_trained_on(tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(120, 6, generator=generator)
    own = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    training = {"epochs": 15, "batch_size": 32, "optimizer": {"name": "adam", "lr": 0.01}}
    spec = {"data": "given", "model": {"name": "mlp", "hidden": [8]}, "training": training}
    run = ek.train(spec, tmp_path / "run", progress=False, data=(own, own))
    assert run.metrics["test_accuracy"] > 0.8
    with pytest.raises(DataError, match="pass it with data="):
        ek.train(spec, tmp_path / "other", progress=False)


def test_margin_losses_train_two_classes_with_one_output(tmp_path):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(120, 6, generator=generator)
    own = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    training = {"epochs": 15, "batch_size": 32, "loss": "gaussian_hinge", "optimizer": {"name": "adam", "lr": 0.01}}
    spec = {"data": "given", "model": "mlp", "training": training, "method": {"name": "gncl", "mode": "exact"}}
    run = ek.train(spec, tmp_path / "run", progress=False, data=(own, own))
    assert run.metrics["test_accuracy"] > 0.8
    assert run.ensemble.predict_proba(inputs[:3]).shape == (3, 2)


@pytest.mark.parametrize("engine", ["sequential", "threaded", "stacked"])
def test_a_loss_that_explodes_names_member_and_step_and_keeps_the_checkpoint_before(engine, tmp_path):
    training = {**tables()["training"], "optimizer": {"name": "sgd", "lr": 1e30}}
    with pytest.raises(NumericError, match=r"member \d|the objective") as error:
        ek.train(tables(training=training, engine={"name": engine}), tmp_path / "run", progress=False)
    assert "epoch 1, step" in str(error.value)
    assert "keeps the checkpoint of epoch 0" in str(error.value)
    assert error.value.exit_code == 6
    saved = load_file(tmp_path / "run" / "checkpoints" / "epoch-000000.safetensors")
    assert all(value.isfinite().all() for value in saved.values())


def test_an_existing_run_is_never_overwritten(tmp_path):
    ek.train(tables(), tmp_path / "run", progress=False)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(RunError, match="resume"):
        ek.train(tables(), tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_a_run_whose_plugin_is_gone_names_the_package(tmp_path):
    spec = ek.load_spec(tables(method="soft_min"), plugins=[TOY_PLUGINS])
    ek.train(spec, tmp_path / "run", progress=False, plugins=[TOY_PLUGINS])
    with pytest.raises(PluginError, match=re.escape(f'plugins=["{TOY_PLUGINS}"]')):
        ek.load(tmp_path / "run")
    assert ek.load(tmp_path / "run", plugins=[TOY_PLUGINS])


def test_a_run_that_names_an_import_path_imports_nothing(tmp_path):
    ek.train(tables(), tmp_path / "run", progress=False)
    edit_spec(tmp_path / "run", 'name = "mlp"', 'name = "canary_module:Model"')
    with pytest.raises(PluginError, match="is not a registered model"):
        ek.load(tmp_path / "run")


def test_weights_that_do_not_fit_name_the_tensor(tmp_path):
    ek.train(tables(), tmp_path / "run", progress=False)
    edit_spec(tmp_path / "run", "16,", "17,")
    with pytest.raises(RunError, match=r"tensor members\.0\.1\.bias has shape \(16,\), expected \(17,\)"):
        ek.load(tmp_path / "run")


def test_mixed_architectures_train_together(tmp_path):
    groups = [{"members": 2}, {"members": 1, "model": {"hidden": [5, 5]}}]
    run = ek.train(tables(ensemble={"groups": groups}, method="gncl"), tmp_path / "run", progress=False)
    assert len({entry["parameters"] for entry in run.members}) == 2
    assert ek.load(tmp_path / "run").member_outputs(torch.rand(2, 1, 8, 8)).shape == (3, 2, 10)


@pytest.mark.parametrize(
    "engine", [{"precision": "bf16"}, {"recompute": True}, {"precision": "bf16", "name": "stacked"}]
)
def test_options_of_the_engine_train_alike(engine, tmp_path):
    changed = ek.train(tables(method="gncl", engine={"name": "sequential", **engine}), tmp_path / "run", progress=False)
    plain = ek.train(tables(method="gncl"), tmp_path / "plain", progress=False)
    assert changed.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=0.05)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_networks_can_be_compiled(engine, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns about itself
        compiled = ek.train(
            tables(method="gncl", engine={"name": engine, "compile": True}), tmp_path / "compiled", progress=False
        )
    plain = ek.train(tables(method="gncl", engine={"name": engine}), tmp_path / "plain", progress=False)
    assert compiled.metrics["test_loss"] == pytest.approx(plain.metrics["test_loss"], rel=1e-2)
