"""The command compare on tiny trained runs."""

from __future__ import annotations

import json
import shlex

import pytest
from helpers.commands import last_error, run
from helpers.tiny_runs import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [str(train(folder / f"r{epochs}", epochs=epochs).path) for epochs in (1, 2)]


def test_every_form_of_output_and_the_figure(runs, tmp_path):
    figure = tmp_path / "figure.svg"
    assert "epochs=1" in run("compare", *runs, "--plot", str(figure)).stdout
    assert figure.read_text().startswith("<?xml")
    found = json.loads(run("compare", *runs, "--json").stdout)
    assert [row["training.epochs"] for row in found["rows"]] == [1, 2]
    assert run("compare", *runs, "--csv").stdout.startswith("group,training.epochs,seeds,accuracy")
    assert "| epochs=1 |" in run("compare", *runs, "--markdown").stdout
    assert "\\toprule" in run("compare", *runs, "--latex").stdout


def test_bad_input_is_refused(runs, tmp_path):
    for arguments, code in (
        ([str(tmp_path / "none")], 5),
        ([*runs, "--json", "--csv"], 2),
        ([*runs, "--plot", "figure.doc"], 2),
        ([*runs, "--by", "training.epoch"], 2),
    ):
        result = run("compare", *arguments)
        assert result.exit_code == code
        assert last_error(result).startswith("error: ")


def test_the_best_within_a_limit_comes_with_commands_that_work(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run("compare", *runs, "--at-most", "training_seconds=1e6", "--at-most", "parameters=1e9").stdout
    commands = [line for line in printed.splitlines() if line.startswith("ensemblekit ")]
    assert [command.split()[1] for command in commands] == ["train", "calibrate", "conform", "export"]
    found = json.loads(run("compare", *runs, "--at-most", "training_seconds=1e6", "--json").stdout)
    assert found["choice"]["commands"] == commands
    for command in commands[:3]:
        result = run(*shlex.split(command)[1:])
        assert result.exit_code == 0, result.stderr
    assert (tmp_path / "runs" / "chosen" / "result.json").exists()


def test_limits_that_cannot_be_read_or_met_are_refused(runs):
    for limits, code in (
        (["training_seconds"], 2),
        (["training_seconds=soon"], 2),
        (["training_seconds=0"], 2),
        (["training_second=1"], 2),
    ):
        result = run("compare", *runs, *(part for limit in limits for part in ("--at-most", limit)))
        assert result.exit_code == code
        assert last_error(result).startswith("error: ")
    assert run("compare", *runs, "--at-most", "training_seconds=1", "--csv").exit_code == 2
