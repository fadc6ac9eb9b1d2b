"""A run is used without what only its training needs: loggers, and optimizers and schedules of others."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.commands import last_error
from helpers.commands import run as command
from helpers.tiny_runs import SPEC
from PIL import Image

import ensemblekit as ek
from ensemblekit.core.errors import PluginError

PLUGINS = '''
import torch
from pydantic import Field
from ensemblekit import Extension, Metric, OptimizerPlugin, Schedule, hookimpl

class Logger(Extension):
    """Logs nothing."""

    level: int = Field(3, description="of detail")

    @hookimpl
    def epoch_finished(self, metrics):
        pass

class OtherSGD(OptimizerPlugin):
    """Stands for an optimizer of another package."""

    def build(self, parameters):
        return torch.optim.SGD(parameters, lr=self.lr)

class Halved(Schedule):
    """Stands for a schedule of another package."""

    def decay(self, epoch, num_epochs):
        return 0.5

class Zero(Metric):
    """Stands for a metric of another package."""

    def compute(self, outputs, combined, target, loss):
        return 0.0
'''


@pytest.fixture
def trained(tmp_path):
    """A run with an extension, an optimizer, a schedule and a metric that are not there any more."""
    file = tmp_path / "logger.py"
    file.write_text(PLUGINS)
    spec = {**SPEC, "extensions": [{"name": "logger", "level": 5}], "metrics": ["zero"]}
    spec["training"] = {**SPEC["training"], "optimizer": {"name": "other_sgd", "lr": 0.3}, "schedule": "halved"}
    run = ek.train(spec, tmp_path / "run", plugins=[file], progress=False)
    file.unlink()
    return run


def test_a_run_is_loaded_evaluated_and_listed_without_them(trained, tmp_path):
    inputs = torch.rand(5, 1, 8, 8)
    assert ek.load(trained.path)(inputs).shape == (5, 10)
    assert ek.evaluate_run(trained.path)["test_accuracy"] == trained.metrics["test_accuracy"]
    opened = ek.open_run(trained.path)
    assert opened.metrics == trained.metrics
    written = opened.spec.to_dict()
    assert written["extensions"] == [{"name": "logger", "level": 5}]
    assert written["training"]["optimizer"]["lr"] == 0.3
    assert written["training"]["schedule"]["name"] == "halved"
    image = tmp_path / "digit.png"
    Image.fromarray((inputs[0, 0] * 255).to(torch.uint8).numpy()).save(image)
    for arguments in (
        ["evaluate", str(trained.path), "--json"],
        ["predict", str(trained.path), str(image)],
        ["compare", str(trained.path), "--json"],
        ["report", str(trained.path), "--output", str(tmp_path / "report.html")],
        ["runs", str(tmp_path)],
    ):
        result = command(*arguments)
        assert result.exit_code == 0, result.output


def test_runs_that_differ_in_a_missing_optimizer_are_told_apart(trained, tmp_path):
    other = ek.train(SPEC, tmp_path / "other", progress=False)
    comparison = ek.compare([trained.path, other.path])
    assert len(comparison.groups) == 2


def test_resuming_it_says_what_to_install(trained, tmp_path):
    with pytest.raises(PluginError, match=r"logger.*is not a registered extension") as caught:
        ek.resume(trained.path, epochs=5, progress=False)
    assert "logger.py" in caught.value.fix
    result = command("resume", str(trained.path), "--epochs", "5")
    assert result.exit_code == 4
    assert "--plugin" in last_error(result)


def test_a_missing_optimizer_is_named_on_resume(trained, tmp_path):
    (tmp_path / "logger.py").write_text(PLUGINS.replace("class OtherSGD", "class Another"))
    with pytest.raises(PluginError, match='"other_sgd" is not a registered optimizer'):
        ek.resume(trained.path, epochs=5, progress=False, plugins=[tmp_path / "logger.py"])


def test_a_plugin_that_predictions_need_is_still_asked_for(tmp_path):
    class Own(ek.Method):
        """Averages."""

    run = ek.train({**SPEC, "method": "own"}, tmp_path / "run", plugins=[Own], progress=False)
    with pytest.raises(PluginError, match='"own" was passed in Python'):
        ek.load(run.path)


class Spoils(ek.Extension):
    """Changes all that it gets."""

    @ek.hookimpl
    def epoch_finished(self, metrics):
        metrics["test_loss"] = -1.0
        metrics["spoilt"] = 1

    @ek.hookimpl
    def run_finished(self, metrics):
        metrics.clear()

    @ek.hookimpl
    def run_ended(self, metrics, members, seconds):
        metrics["spoilt"] = 1
        members[0].clear()
        members.pop()
        seconds["training"] = -1.0


class SpoilsAsMethod(ek.Method):
    """Changes the metrics of an epoch."""

    @ek.hookimpl
    def epoch_finished(self, metrics):
        metrics["test_loss"] = -1.0


def test_changes_of_metrics_by_hooks_reach_neither_the_run_nor_its_files_nor_others(tmp_path):
    seen: list[dict] = []

    class Sees(ek.Extension):
        """Keeps what it gets."""

        @ek.hookimpl
        def epoch_finished(self, metrics):
            seen.append(dict(metrics))

        @ek.hookimpl
        def run_ended(self, metrics, members, seconds):
            seen.append({"metrics": dict(metrics), "members": list(members), "seconds": dict(seconds)})

    plugins = [Spoils, SpoilsAsMethod, Sees]
    spec = {**SPEC, "method": ["gncl", "spoils_as_method"], "extensions": [{"name": "sees"}, {"name": "spoils"}]}
    run = ek.train(spec, tmp_path / "run", plugins=plugins, progress=False)
    plain = ek.train(SPEC, tmp_path / "plain", progress=False)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    for rows in (run.history, lines, seen[:-1]):
        assert [row["test_loss"] for row in rows] == [row["test_loss"] for row in plain.history]
        assert not any("spoilt" in row for row in rows)
    assert seen[-1]["metrics"]["test_loss"] == run.metrics["test_loss"] == plain.metrics["test_loss"]
    assert len(run.members) == len(seen[-1]["members"]) == 2
    assert seen[-1]["seconds"]["training"] > 0
    assert json.loads((run.path / "result.json").read_text())["metrics"] == run.metrics
