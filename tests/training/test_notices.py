"""What a user should know although it is no error is printed, and kept with the run."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.run_directory_children import create
from helpers.small_runs import small_spec

import ensemblekit as ek
from ensemblekit.core.hooks import RunHooks
from ensemblekit.display.progress import PlainProgress
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.recorder import RunRecorder
from ensemblekit.training.unbounded import UnboundedObjective


def test_the_display_prints_a_notice(capsys):
    RunHooks([], [PlainProgress()]).call.notice(text="the machine is busy")
    assert capsys.readouterr().out == "note: the machine is busy\n"


def test_a_run_keeps_each_notice_once_also_when_it_is_resumed(tmp_path):
    directory = create(tmp_path / "run")
    for texts in (["busy", "busy", "engine changed"], ["busy", "damaged"]):
        recorder = RunRecorder(RunDirectory.open(tmp_path / "run"))
        hooks = RunHooks([], [recorder]).call
        for text in texts:
            hooks.notice(text=text)
        hooks.run_ended(status="interrupted", metrics={}, members=[], seconds={}, error=None)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["notices"] == ["busy", "engine changed", "damaged"]
    assert RunDirectory.open(directory.path).notices == ["busy", "engine changed", "damaged"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"train_objective": -0.5}, "the objective is below zero (-0.5) since epoch 3"),
        (
            {"train_objective": 0.5, "test_diversity": 946.0, "test_mean_member_loss": 12.0},
            "the diversity term exceeds the members' loss (946 against 12) since epoch 3",
        ),
        ({"train_objective": 0.5, "test_diversity": 0.1, "test_mean_member_loss": 0.4}, None),
        ({"train_objective": 0.5}, None),
    ],
)
def test_an_objective_without_a_lower_bound_is_said_once(row, said):
    unbounded = UnboundedObjective(is_separable=False)
    text = unbounded.notice({"epoch": 3, **row})
    assert (text or "").startswith(said or "")
    assert (text is None) == (said is None)
    assert said is None or unbounded.notice({"epoch": 4, **row}) is None
    assert UnboundedObjective(is_separable=True).notice({"epoch": 3, **row}) is None


def test_a_run_whose_diversity_runs_away_says_so(tmp_path):
    """Exact GNCL with cross-entropy has no lower bound."""
    spec = small_spec(
        method={"name": "gncl", "mode": "exact", "lambda": 0.9},
        model={"name": "mlp", "hidden": [16], "batch_norm": False},
        training={"epochs": 12, "batch_size": 50, "optimizer": {"name": "adam", "lr": 0.05}},
    )
    run = ek.train(spec, tmp_path / "run", progress=False)
    assert len([text for text in run.notices if "members may drift apart without end" in text]) == 1


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([1, 2], "no training sample has class 0 of 0 to 2: are the classes numbered from 0?"),
        ([0, 2], "no training sample has class 1 of 0 to 2"),
        (
            [3, 10],
            "no training sample has classes 0, 1, 2, 4, 5 and 4 more of 0 to 10: are the classes numbered from 0?",
        ),
        ([0, 1], None),
        ([0.0, 2.0], None),
    ],
    ids=str,
)
def test_classes_without_training_samples_are_said(labels, said, tmp_path):
    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    spec = {"model": {"name": "mlp", "hidden": [4]}, "training": {"epochs": 1}, "ensemble": {"members": 2}}
    data = (inputs, torch.tensor(labels * 20))
    run = ek.train(spec | {"engine": {"name": "sequential"}}, tmp_path / "run", data=data, progress=False)
    assert [text for text in run.notices if "no training sample" in text] == ([said] if said else [])
