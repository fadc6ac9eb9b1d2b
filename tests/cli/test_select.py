"""The commands select and predict --stop-when-sure, as a user calls them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torchvision.transforms.functional import to_pil_image

import ensemblekit as ek
from ensemblekit.cli import main

SPEC = {
    "data": {"name": "digits", "limit_train": 300, "limit_test": 80, "validation_fraction": 0.4},
    "model": {"name": "mlp", "hidden": [12]},
    "ensemble": {"members": 4, "combiner": "vote"},
    "training": {"epochs": 3, "batch_size": 50, "optimizer": {"lr": 0.03}},
    "engine": {"name": "stacked", "device": "cpu"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return ek.train(SPEC, out=tmp_path_factory.mktemp("runs") / "run", progress=False).path


def invoke(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_select_shows_the_curve_and_prints_the_same_as_json(run, tmp_path):
    shown = invoke("select", run, "--members", 2, "--out", tmp_path / "a")
    assert shown.exit_code == 0, shown.output
    assert "combiner: vote" in shown.stdout
    assert f"run: {tmp_path / 'a'}" in shown.stdout
    printed = json.loads(invoke("select", run, "--members", 2, "--out", tmp_path / "b", "--json").stdout)
    assert printed["members"] == len(printed["chosen"]) == 2
    assert [row["members"] for row in printed["curve"]] == [1, 2]
    assert printed["test_accuracy"] == ek.open_run(tmp_path / "a").metrics["test_accuracy"]


def test_several_runs_are_pooled_only_if_asked_to(run, tmp_path):
    result = invoke("select", run, run.parent, "--out", tmp_path / "s")
    assert result.exit_code == 2
    assert "add --pool" in result.stderr


def test_a_selection_is_not_resumed(run, tmp_path):
    invoke("select", run, "--members", 2, "--out", tmp_path / "s")
    result = invoke("resume", tmp_path / "s", "--epochs", 9)
    assert result.exit_code == 2
    assert "nothing to train" in result.stderr


def test_predictions_that_stop_have_the_same_classes_and_say_what_was_saved(run, tmp_path):
    random = torch.Generator().manual_seed(0)
    for number in range(6):
        to_pil_image(torch.rand(1, 8, 8, generator=random)).save(tmp_path / f"{number}.png")
    full = list(csv.DictReader(io.StringIO(invoke("predict", run, tmp_path).stdout)))
    result = invoke("predict", run, tmp_path, "--stop-when-sure")
    stopped = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [row["class"] for row in stopped] == [row["class"] for row in full]
    asked = [int(row["members_asked"]) for row in stopped]
    assert f"asked {sum(asked) / 6:.2f} of 4 members on average" in result.stderr
    assert f"{1 - sum(asked) / 24:.1%} of the member passes saved" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--risk", 0.1), "add --stop-when-sure"),
        (("--stop-when-sure", "--members"), "not all members are asked"),
        (("--stop-when-sure", "--risk", 0.0001), "needs at least 9999 validation samples"),
    ],
)
def test_options_that_do_not_fit_are_refused(run, tmp_path, options, message):
    to_pil_image(torch.rand(1, 8, 8)).save(tmp_path / "digit.png")
    result = invoke("predict", run, tmp_path / "digit.png", *options)
    assert result.exit_code == 2
    assert message in result.stderr
