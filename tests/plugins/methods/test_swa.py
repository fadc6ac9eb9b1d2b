"""Stochastic weight averaging: equal to torch's own in a plain loop, and runs with it do what they say."""

from __future__ import annotations

import signal

import pytest
import torch
from helpers.commands import last_error, run
from helpers.plain_training import train_plainly
from helpers.small_runs import Crash, CrashAfter, CrashOnSave, SignalAfter, assert_same_run, rows, small_spec, training
from torch.optim.swa_utils import AveragedModel, update_bn

import ensemblekit as ek
from ensemblekit.core.errors import Interrupted, SpecError

EPOCHS = 6
MODEL = {"name": "resnet", "width": 4, "blocks": 1}
DATA = {"name": "digits", "limit_train": 100, "limit_test": 50}
METHOD = {"name": "swa", "start": 0.5}
"""The weights after epochs 3, 4, 5 and 6."""


def spec_of(members: int, method=METHOD, **changes):
    settings = {"epochs": EPOCHS, "batch_size": 50, "optimizer": {"name": "sgd", "lr": 0.1}}
    spec = small_spec(data=DATA, model=MODEL, method=method, training=settings, ensemble={"members": members})
    return spec | changes


def averaged_by_torch(run: ek.Run, member: int, epochs: list[int]) -> torch.nn.Module:
    """The member's average by torch, over the weights after these epochs."""
    averages: list[AveragedModel] = []

    def update(epoch, network):
        if epoch in epochs:
            averages[:] = averages or [AveragedModel(network)]
            averages[0].update_parameters(network)

    train_plainly(run, member, range(1, EPOCHS + 1), factor=1 / run.spec.ensemble.members, after_epoch=update)
    data = ek.load_data(run.spec.data, run.spec.seed)
    update_bn([batch.inputs for batch in data.train.batches(run.spec.training.batch_size)], averages[0])
    return averages[0].module.eval()


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(("every", "epochs"), [(1, [3, 4, 5, 6]), (2, [3, 5])])
def test_the_members_are_the_averages_of_torch(members, every, epochs, tmp_path):
    trained = ek.train(spec_of(members, METHOD | {"every": every}), tmp_path / "run", progress=False)
    networks = list(trained.ensemble.members)
    assert len(networks) == members
    for index, network in enumerate(networks):
        expected, found = averaged_by_torch(trained, index, epochs).state_dict(), network.state_dict()
        floats = [name for name, value in expected.items() if value.is_floating_point()]
        assert any("running_var" in name for name in floats)
        for name in floats:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)


def test_averages_predict_as_soon_as_they_are_there(tmp_path):
    """Until the last epoch each row has the metrics of a shorter run that averages the same weights and ends there."""
    trained = ek.train(spec_of(2), tmp_path / "run", progress=False)
    plain = ek.train(spec_of(2, "independent"), tmp_path / "plain", progress=False)
    shorter = spec_of(2, {"name": "swa", "start": 0.75})  # after epochs 3 and 4
    shorter["training"] = shorter["training"] | {"epochs": 4}
    short = ek.train(shorter, tmp_path / "short", progress=False)
    for name in ("test_loss", "test_accuracy"):
        values = [row[name] for row in trained.history]
        assert values[:2] == [row[name] for row in plain.history[:2]]
        assert values[3] == pytest.approx(short.metrics[name], rel=1e-5)
        assert values[-1] == pytest.approx(trained.metrics[name], rel=1e-5)
    assert trained.history[3]["test_loss"] != plain.history[3]["test_loss"]
    assert [row["train_loss"] for row in trained.history] == [row["train_loss"] for row in plain.history]


class WildEnd(ek.Method):
    """Spoils the weights in the last epoch."""

    @ek.hookimpl
    def learning_rate(self, base, epoch, num_epochs):
        return 100 * base if epoch >= num_epochs - 1 else base


def test_the_best_epoch_may_have_averages_beside_their_members(tmp_path):
    spec = spec_of(2, [METHOD, "wild_end"], data=DATA | {"validation_fraction": 0.3})
    spec["training"]["keep"] = "best"
    trained = ek.train(spec, tmp_path / "run", progress=False, plugins=[WildEnd])
    best = trained.best_epoch
    assert best == EPOCHS - 1
    expected = trained.history[best - 1]["test_loss"]
    assert trained.metrics["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert ek.evaluate_run(tmp_path / "run", plugins=[WildEnd])["test_loss"] == pytest.approx(expected, rel=1e-4)
    assert len(trained.ensemble.members) == 4


def test_all_engines_agree(tmp_path):
    results = {}
    for engine in ("sequential", "threaded", "stacked"):
        spec = small_spec(method=METHOD, engine={"name": engine, "device": "cpu"}, training=training(epochs=4))
        results[engine] = ek.train(spec, tmp_path / engine, progress=False).outputs("test").outputs
    for engine in ("threaded", "stacked"):
        torch.testing.assert_close(results[engine], results["sequential"], rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    "stop",
    [CrashOnSave(1), CrashOnSave(3), CrashAfter(3, 1), CrashAfter(4, 2), SignalAfter(signal.SIGTERM, 4, 4)],
    ids=["before", "between", "first step", "with copies", "in the last evaluation"],
)
def test_a_resumed_run_is_bit_identical(stop, tmp_path):
    spec = small_spec(method=METHOD, training=training(epochs=4))
    ek.train(spec, tmp_path / "whole", progress=False)
    spec["training"] = spec["training"] | {"checkpoint_every_minutes": 1e-9}
    with pytest.raises((Crash, Interrupted)):
        ek.train(spec, tmp_path / "part", progress=stop)
    assert len(rows(tmp_path / "part")) < 4
    ek.resume(tmp_path / "part", progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_it_cannot_be_trained_further_than_planned(tmp_path):
    ek.train(small_spec(method=METHOD), tmp_path / "run", progress=False)
    result = run("resume", str(tmp_path / "run"), "--epochs", "6")
    assert result.exit_code == 2
    assert '"swa" plans its members over all epochs' in last_error(result)


@pytest.mark.parametrize(
    ("start", "every", "num_epochs", "epochs"),
    [
        (0.75, 1, 100, [*range(75, 101)]),
        (0.55, 20, 100, [55, 75, 95]),
        (0.0, 1, 3, [1, 2, 3]),
        (0.75, 1, 10, [8, 9, 10]),
    ],
)
def test_averaging_begins_after_its_share_of_the_epochs(start, every, num_epochs, epochs):
    method = ek.methods()["swa"].load()(start=start, every=every)
    assert list(method.averaged_epochs(num_epochs)) == epochs


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"name": "swa", "start": 0.9}, "there is nothing to average"),
        (["swa", {"name": "snapshot", "at_epochs": [2, 3]}], 'cannot be combined with "snapshot"'),
        (["swa", "stacking"], 'cannot be combined with "stacking", which combines the members'),
    ],
    ids=["short", "snapshot", "stacking"],
)
def test_what_cannot_work_is_refused_before_training(method, said, tmp_path):
    with pytest.raises(SpecError, match=said):
        ek.train(small_spec(method=method), tmp_path / "run", progress=False)


def test_members_are_trained_as_other_methods_say(tmp_path):
    together = ek.train(small_spec(method=["gncl", METHOD]), tmp_path / "both", progress=False)
    alone = ek.train(small_spec(method="gncl"), tmp_path / "gncl", progress=False)
    assert [row["train_objective"] for row in together.history] == [row["train_objective"] for row in alone.history]
