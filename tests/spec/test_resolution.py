"""What a run decides about its spec: the default loss by the task, and absolute paths."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.commands import last_error, run

import ensemblekit as ek
from ensemblekit.core.errors import SpecError
from ensemblekit.spec.resolution import with_absolute_paths, with_loss_for

TABLE = {"name": "table", "path": "rows.csv", "target": "y"}
MLP = {"name": "mlp", "hidden": [4]}


class NeedsLogits(ek.Method):
    """Refuses losses of real values."""

    def check_spec(self, spec):
        if spec.loss.takes == "values":
            yield ek.Problem("name", "needs logits")


def spec(data, **changes) -> ek.Spec:
    return ek.load_spec({"data": data, "model": MLP, **changes})


@pytest.mark.parametrize(
    ("data", "loss"),
    [
        ("diabetes", "mse"),
        ("digits", "cross_entropy"),
        ({**TABLE, "task": "regression"}, "mse"),
        ({**TABLE, "target": ["y", "z"]}, "mse"),
        ({**TABLE, "task": "classification"}, "cross_entropy"),
    ],
)
def test_the_default_loss_follows_a_task_that_is_known_before_loading(data, loss):
    assert spec(data).loss.name == loss


def test_a_task_that_only_the_data_tells_decides_the_default_loss():
    open_spec = spec("given")
    assert with_loss_for(open_spec, "regression").loss.name == "mse"
    assert with_loss_for(open_spec, "classification").loss.name == "cross_entropy"
    assert with_loss_for(replace(spec("diabetes"), data=open_spec.data), "classification").loss.name == "cross_entropy"


def test_a_loss_that_the_spec_names_is_kept():
    named = spec("given", training={"loss": "cross_entropy"})
    assert with_loss_for(named, "regression").loss.name == "cross_entropy"


def test_a_method_that_cannot_use_the_default_loss_says_so():
    with pytest.raises(SpecError, match='the default loss for regression, "mse"'):
        with_loss_for(replace(spec("given"), methods=(NeedsLogits(),)), "regression")


def test_classes_as_loss_of_a_table_of_real_values_are_refused_before_it_is_read(tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text(
        '[data]\nname = "table"\npath = "nowhere.csv"\ntarget = "y"\ntask = "regression"\n'
        '[model]\nname = "mlp"\n[training]\nloss = "cross_entropy"\n'
    )
    result = run("validate", str(file))
    assert result.exit_code == 2
    assert 'the task of "table" is regression' in last_error(result)
    assert 'loss = "mse"' in last_error(result)


def test_a_run_on_real_targets_of_python_names_the_loss_that_it_used(tmp_path):
    data = (torch.randn(20, 3), torch.randn(20) * 1000)
    tables = {"data": "given", "model": MLP, "ensemble": {"members": 2}, "training": {"epochs": 1}}
    finished = ek.train(tables, tmp_path / "run", progress=False, data=(data, data))
    assert finished.spec.loss.name == "mse"
    assert 'loss = "mse"' in (tmp_path / "run" / "spec.toml").read_text()


def test_paths_of_all_plugins_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = spec({**TABLE, "test_path": "more/test.csv"})
    absolute = with_absolute_paths(relative)
    assert absolute.data.path == Path(os.getcwd(), "rows.csv")
    assert absolute.data.test_path == Path(os.getcwd(), "more", "test.csv")
    assert absolute.data.name == "table"
    assert absolute.model is relative.model
    assert with_absolute_paths(absolute) == absolute
