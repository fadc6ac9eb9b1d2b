"""Runs that older versions wrote: other names of metrics, and specs that are refused today."""

from __future__ import annotations

import tomllib

import pytest
from helpers.fake_runs import CLASSIFIER
from helpers.run_directory_children import create

import ensemblekit as ek
from ensemblekit.core.errors import SpecError


def test_a_run_of_version_0_1_0_is_read_with_the_current_names_of_metrics(tmp_path):
    directory = create(tmp_path / "run", ek.load_spec(CLASSIFIER).to_toml(), {})
    directory.append_metrics({"epoch": 1, "test_loss": 0.5, "mean_member_loss": 0.7, "images_per_second": 9.0})
    directory.write_result({"metrics": {"test_loss": 0.5, "oracle_accuracy": 0.9}, "members": [], "epochs": 1})
    run = ek.open_run(directory.path)
    assert run.history == [{"epoch": 1, "test_loss": 0.5, "test_mean_member_loss": 0.7, "samples_per_second": 9.0}]
    assert run.metrics == {"test_loss": 0.5, "test_oracle_accuracy": 0.9}


def test_a_run_whose_spec_would_be_refused_today_is_still_read(tmp_path):
    accepted = {
        **CLASSIFIER,
        "data": "diabetes",
        "training": {"loss": "mse"},
        "method": {"name": "divloss", "lambda2": 0},
    }
    refused = ek.load_spec(accepted).to_toml().replace("lambda2 = 0.0", "lambda2 = 0.1")
    with pytest.raises(SpecError, match="has no effect"):
        ek.load_spec(tomllib.loads(refused))
    run = ek.open_run(create(tmp_path / "run", refused, {}).path)
    assert run.spec.methods[0].to_table()["lambda2"] == 0.1
