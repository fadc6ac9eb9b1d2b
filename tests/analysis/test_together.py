"""Runs of a sweep that are trained together, in one stack: each is equal to a run by itself, within rounding."""

from __future__ import annotations

import os
import shutil
import signal
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.sweeps import EXPLODING, PLUGINS, final_metrics, statuses, sweep

import ensemblekit as ek
from ensemblekit.analysis.grids import PlannedRun
from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.together import NO_OTHER, divide
from ensemblekit.core.errors import Interrupted, UsageError
from ensemblekit.data.loading import load_data
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.tensor_files import read_tensors
from ensemblekit.training import together

SPEC: dict[str, Any] = {
    "data": {"name": "digits", "limit_train": 100, "limit_test": 50, "validation_fraction": 0.2},
    "model": {"name": "mlp", "hidden": [8]},
    "ensemble": {"members": 3},
    "method": {"name": "gncl", "lambda": 0.5},
    "training": {"epochs": 3, "batch_size": 32, "optimizer": {"name": "adabelief", "lr": 0.01}},
    "engine": {"name": "stacked", "device": "cpu"},
}
GRID = {"method.lambda": [0, 0.4, 1]}


class Listener(SweepListener):
    """Remembers notices, and may do something when an epoch of a run begins."""

    def __init__(self, run: str = "", epoch: int = 0, action=lambda: None) -> None:
        self.moment, self.action = (run, epoch), action
        self.notes: list[str] = []

    def notice(self, text):
        self.notes.append(text)

    def epoch_started(self, name, epoch, num_epochs):
        if (name, epoch) == self.moment:
            self.action()


def changed(**changes: Any) -> dict[str, Any]:
    """The spec with other sections; those of tables are merged."""
    spec = deepcopy(SPEC)
    for key, value in changes.items():
        spec[key] = spec[key] | value if isinstance(value, dict) and key != "method" else value
    return spec


def weights(path: Path) -> dict[str, torch.Tensor]:
    return read_tensors(path / "model.safetensors")


def assert_equal_runs(first: Path, second: Path) -> None:
    """Weights and metrics of all runs of two sweeps are equal within rounding."""
    names = sorted(path.name for path in (first / "runs").iterdir())
    assert names == sorted(path.name for path in (second / "runs").iterdir())
    for name in names:
        one, other = (ek.open_run(out / "runs" / name, plugins=PLUGINS) for out in (first, second))
        for key, value in weights(one.path).items():
            torch.testing.assert_close(value, weights(other.path)[key], rtol=1e-3, atol=1e-4)
        for row, expected in zip(one.history, other.history, strict=True):
            for metric in ("train_objective", "train_loss", "validation_loss", "test_loss"):
                assert row[metric] == pytest.approx(expected[metric], rel=1e-3, abs=1e-5), (name, metric)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lambda": (SPEC, {"grid": GRID}),
    "seeds": (SPEC, {"grid": {"method.lambda": [0, 1]}, "seeds": 2}),
    "weights": (
        changed(method={"name": "bagging", "weights": "subsample"}),
        {"grid": {"method.fraction": [0.4, 0.9]}, "seeds": 2},
    ),
    "clipping and dropout": (changed(training={"clip_norm": 0.1}, model={"dropout": 0.3}), {"grid": GRID}),
    "passes": (changed(method=[{"name": "dropout"}, {"name": "gncl"}], model={"dropout": 0.3}), {"seeds": 2}),
    "best": (changed(training={"keep": "best", "patience": 1, "epochs": 5, "optimizer": "sgd"}), {"seeds": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_runs_that_are_trained_together_equal_separate_ones(tmp_path, case):
    spec, options = CASES[case]
    listener = Listener()
    found = sweep(tmp_path / "together", spec, together=True, progress=listener, **options)
    sweep(tmp_path / "separate", spec, **options)
    assert listener.notes[0].startswith(f"{len(found.runs)} runs are trained together: ")
    assert {run.status for run in found.runs} == {"finished"}
    assert_equal_runs(tmp_path / "together", tmp_path / "separate")


def test_a_run_that_was_trained_together_is_an_ordinary_run(tmp_path):
    found = sweep(tmp_path / "s", changed(engine={"name": "auto"}), grid=GRID, together=True)
    run = ek.open_run(found.runs[1].path)
    assert run.spec.engine.name == "stacked"
    assert run.environment["engine"] == "stacked"
    assert ek.evaluate_run(run.path)["test_loss"] == pytest.approx(run.metrics["test_loss"], rel=1e-5)
    assert len(ek.compare(tmp_path / "s").table()) == 3
    further = ek.resume(run.path, progress=False, epochs=4)
    assert len(further.history) == 4


def test_a_signal_saves_every_run_and_the_sweep_resumes_to_the_same_bits(tmp_path):
    sweep(tmp_path / "whole", SPEC, grid=GRID, together=True)
    stopping = Listener("lambda=0.4,seed=0", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    out = tmp_path / "s"
    with pytest.raises(Interrupted) as error:
        sweep(out, SPEC, grid=GRID, together=True, progress=stopping)
    assert error.value.exit_code == 143
    assert error.value.fix == f"continue with: ensemblekit sweep {out} --plugin {PLUGINS[0]} --together"
    assert statuses(out) == ["interrupted"] * 3
    assert len({RunDirectory.open(run.path).newest_position for run in ek.open_sweep(out).runs}) == 1
    shutil.copytree(out, tmp_path / "alone")
    sweep(out, SPEC, grid=GRID, together=True)
    assert final_metrics(out) == final_metrics(tmp_path / "whole")
    sweep(tmp_path / "alone", SPEC, grid=GRID)
    assert_equal_runs(tmp_path / "alone", tmp_path / "whole")


def test_stopped_at_once_the_runs_continue_from_their_checkpoints_even_if_some_are_behind(tmp_path):
    def stop() -> None:
        raise KeyboardInterrupt

    sweep(tmp_path / "whole", SPEC, grid=GRID, together=True)
    out = tmp_path / "s"
    with pytest.raises(Interrupted):
        # the first run has saved the second epoch, the others have not
        sweep(out, SPEC, grid=GRID, together=True, progress=Listener("lambda=0,seed=0", 3, stop))
    positions = [RunDirectory.open(run.path).newest_position.epoch for run in ek.open_sweep(out).runs]
    assert positions == [2, 1, 1]
    sweep(out, SPEC, grid=GRID, together=True)
    assert_equal_runs(out, tmp_path / "whole")


def test_a_run_that_fails_leaves_the_others_as_they_are(tmp_path):
    plugin = tmp_path / "exploding.py"
    plugin.write_text(EXPLODING)
    spec = changed(method={"name": "exploding"})
    options = {"grid": {"method.fails": [False, True]}, "seeds": 2, "plugins": [str(plugin)]}
    sweep(tmp_path / "s", spec, together=True, **options)
    assert statuses(tmp_path / "s") == ["finished", "failed", "finished", "failed"]
    sweep(tmp_path / "separate", spec, **options)
    assert [row["test_loss"] for row in final_metrics(tmp_path / "s")][1] == ""
    for index in (0, 2):
        one, other = (ek.open_sweep(tmp_path / name).runs[index] for name in ("s", "separate"))
        assert one.metrics["test_loss"] == pytest.approx(other.metrics["test_loss"], rel=1e-4)


def test_a_hook_that_raises_fails_its_own_run_alone(tmp_path):
    plugin = tmp_path / "raising.py"
    plugin.write_text(EXPLODING.replace("return loss", 'assert not self.fails, "on purpose"\n        return loss'))
    spec = changed(method={"name": "exploding"})
    found = sweep(tmp_path / "s", spec, grid={"method.fails": [True, False]}, plugins=[str(plugin)], together=True)
    assert [run.status for run in found.runs] == ["failed", "finished"]
    assert "on purpose" in found.runs[0].error


def reasons_of(spec: dict[str, Any], **options: Any) -> set[str]:
    """Why the runs of a sweep with two seeds are trained alone."""
    specs = {f"seed={seed}": ek.load_spec(spec | {"seed": seed}, plugins=PLUGINS, **options) for seed in (0, 1)}
    runs = [PlannedRun("", {}, seed, (), name) for seed, name in enumerate(specs)]
    return set(divide(runs, specs, lambda spec: load_data(spec.data, 0)).reasons.values())


SPLIT = {"split_seed": 0}


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (changed(data=SPLIT), None),
        (SPEC, NO_OTHER),  # other seeds, other splits
        (changed(data=SPLIT, engine={"name": "threaded"}), 'it has the engine "threaded"'),
        (changed(data=SPLIT, method={"name": "swa", "start": 0}), 'the method "swa" may change members between epochs'),
        (changed(data=SPLIT, method="adversarial"), 'the method "adversarial" computes a second pass'),
        (
            changed(data=SPLIT, engine={"name": "auto"}) | {"model": {"name": "resnet", "width": 4, "blocks": 2}},
            "a stack of convolutions is slow on a CPU",
        ),
    ],
)
def test_runs_that_cannot_be_together_are_named_with_the_reason(spec, reason):
    reasons = reasons_of(spec)
    if reason is None:
        assert not reasons
    else:
        assert len(reasons) == 1
        assert reasons.pop().startswith(reason)


def test_many_or_large_runs_are_divided_into_several_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(together, "MAX_RUNS", 2)
    listener = Listener()
    sweep(tmp_path / "s", SPEC, grid=GRID, together=True, progress=listener, overrides={"training.epochs": 1})
    assert listener.notes[:2] == [
        "2 runs are trained together: lambda=0.4,seed=0, lambda=1,seed=0",
        "trained alone: lambda=0,seed=0: the stack of the other runs is full",
    ]
    monkeypatch.setattr(together, "MAX_WEIGHT_BYTES", 100)
    assert reasons_of(changed(data=SPLIT)) == {"its networks are too large to share a stack"}


@pytest.mark.parametrize("options", [{"jobs": 2}, {"on": "ray"}, {"search": {"method.lambda": "0..1"}}])
def test_together_is_refused_where_runs_are_trained_elsewhere_or_depend_on_each_other(tmp_path, options):
    with pytest.raises(UsageError, match="together"):
        sweep(tmp_path / "s", SPEC, together=True, **options)
