"""A run as it is opened: what its result says, and what older results do not say."""

from __future__ import annotations

from pathlib import Path

from helpers.tiny_runs import train, train_until

import ensemblekit as ek

GOLDEN = Path(__file__).parent / "golden"


def test_a_finished_run_has_validation_metrics_its_best_epoch_and_notices(tmp_path):
    run = train(tmp_path / "run")
    assert run.best_epoch == min(run.history, key=lambda row: row["validation_loss"])["epoch"]
    assert run.validation["validation_loss" if "validation_loss" in run.validation else "loss"] > 0
    assert run.stopped_early is False
    assert isinstance(run.notices, list)
    assert repr(run) == f"Run({str(tmp_path / 'run')!r}, finished, 3 epochs)"
    assert not {"sha256", "history"} & {*run.environment, *run.metrics, *(key for row in run.history for key in row)}


def test_an_unfinished_run_and_one_of_an_older_version_have_none_of_these(tmp_path):
    train_until(tmp_path / "run", 2)
    for run in (ek.open_run(tmp_path / "run"), ek.open_run(GOLDEN / "finished")):
        assert (run.validation, run.best_epoch, run.stopped_early, run.notices) == ({}, None, False, [])
