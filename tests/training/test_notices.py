"""What a user should know although it is no error is printed, and kept with the run."""

from __future__ import annotations

import json

from helpers.run_directory_children import create

from ensemblekit.core.hooks import RunHooks
from ensemblekit.display.progress import PlainProgress
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.recorder import RunRecorder


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
