"""A run is used without what only its training needs: loggers, and optimizers and schedules of others."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.commands import last_error
from helpers.commands import run as command
from helpers.tiny_runs import SPEC

import ensemblekit as ek
from ensemblekit.core.errors import PluginError, RunError
from ensemblekit.spec import optimizers, schedules

LOGGER = '''
from pydantic import Field
from ensemblekit import Extension, hookimpl

class Logger(Extension):
    """Logs nothing."""

    level: int = Field(3, description="of detail")

    @hookimpl
    def epoch_finished(self, metrics):
        pass
'''


class OtherSGD(torch.optim.SGD):
    """Stands for an optimizer of another package."""


class Halved(schedules.SCHEDULES["constant"]):
    """Stands for a schedule of another package."""

    name: str = "halved"


@pytest.fixture
def trained(tmp_path):
    """A run with an extension, an optimizer and a schedule that are not there any more, and one without."""
    file = tmp_path / "logger.py"
    file.write_text(LOGGER)
    spec = {**SPEC, "extensions": [{"name": "logger", "level": 5}]}
    spec["training"] = {**SPEC["training"], "optimizer": {"name": "othersgd", "lr": 0.3}, "schedule": "halved"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "OtherSGD", OtherSGD, raising=False)
        patch.setitem(schedules.SCHEDULES, "halved", Halved)
        optimizers.optimizer_classes.cache_clear()
        run = ek.train(spec, tmp_path / "run", plugins=[file], progress=False)
    optimizers.optimizer_classes.cache_clear()
    file.unlink()
    yield run
    optimizers.optimizer_classes.cache_clear()
    optimizers.optimizer_section.cache_clear()


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
    for arguments in (
        ["evaluate", str(trained.path), "--json"],
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
    (tmp_path / "logger.py").write_text(LOGGER)
    with pytest.raises(RunError) as caught:
        ek.resume(trained.path, epochs=5, progress=False, plugins=[tmp_path / "logger.py"])
    assert any('there is no optimizer "othersgd"' in line for line in caught.value.details)


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
