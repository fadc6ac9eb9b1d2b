"""Members of another run are loaded as they are, and only where they see the inputs that they know."""

from __future__ import annotations

import shutil

import pytest
import torch
from ensemblekit_models.frozen import Frozen
from helpers.tiny_runs import train_until

import ensemblekit as ek
from ensemblekit.core.errors import RunError, SpecError

TABLES = {
    "seed": 3,
    "data": {"name": "digits", "limit_train": 60, "limit_test": 20},
    "model": {"name": "mlp", "hidden": [8], "dropout": 0.5},
    "ensemble": {"members": 2},
    "training": {"epochs": 1, "batch_size": 30},
    "engine": {"name": "sequential", "device": "cpu"},
}


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    return ek.train(TABLES, out=tmp_path_factory.mktemp("other") / "run", progress=False)


def problems(run, changes=None, **model):
    """What is wrong with a spec with a frozen member of a run; as text."""
    tables = {**TABLES, "model": {"name": "frozen", "run": str(run), **model}}
    try:
        ek.load_spec(tables, changes)
    except SpecError as error:
        return str(error)
    return ""


def test_a_frozen_member_is_the_member_of_the_other_run_and_does_not_learn(other_run):
    inputs = torch.rand(5, 1, 8, 8)
    expected = other_run.ensemble.member_outputs(inputs)
    for member in (0, 1):
        table = {"name": "frozen", "run": str(other_run.path), "member": member}
        network = ek.build_model(table, (1, 8, 8), 10)
        network.train()
        torch.testing.assert_close(network(inputs), expected[member])  # without dropout, with the learnt batch norm
        assert not any(parameter.requires_grad for parameter in network.parameters())
        assert all(not layer.training for layer in network.network.modules())


def test_networks_of_the_same_member_share_no_weights(other_run):
    model = Frozen(run=other_run.path)
    first, second = model.build((1, 8, 8), 10), model.build((1, 8, 8), 10)
    addresses = {parameter.data_ptr() for parameter in first.parameters()}
    assert not addresses & {parameter.data_ptr() for parameter in second.parameters()}


def test_a_spec_with_the_same_data_is_accepted(other_run):
    assert problems(other_run.path) == ""
    assert problems(other_run.path, {"seed": 4, "data.split_seed": 3}) == ""
    assert problems(other_run.path, {"data.augment": ["crop"], "data.limit_test": 10, "data.storage": "memory"}) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.size": 16}, "data.size = none, but this spec has 16"),
        ({"data.normalise": True}, "data.normalise = False, but this spec has True"),
        ({"data.limit_train": 50}, "data.limit_train = 60, but this spec has 50"),
        ({"seed": 4}, "set data.split_seed = 3"),
        ({"data": {"name": "fashion_mnist"}}, 'trained on "digits", but this spec uses "fashion_mnist"'),
        ({"training.loss": "mse"}, '"mse" takes values'),
    ],
)
def test_other_data_and_losses_are_problems_that_name_both(other_run, changes, message):
    text = problems(other_run.path, changes)
    assert message in text
    assert str(other_run.path) in text


def test_an_unknown_member_a_missing_run_and_an_unfinished_one_are_problems(other_run, tmp_path):
    assert "model.member: 2, but the run" in problems(other_run.path, member=2)
    assert str(tmp_path / "nowhere") in problems(tmp_path / "nowhere")
    train_until(tmp_path / "stopped", 2)
    assert "not finished" in problems(tmp_path / "stopped")


def test_a_form_of_data_that_differs_is_a_problem(other_run):
    spec = ek.load_spec({**TABLES, "model": {"name": "frozen", "run": str(other_run.path)}})
    (problem,) = Frozen(run=other_run.path).check_data(spec, ek.DataInfo("classification", (1, 8, 8), 4))
    assert "1×8×8 inputs and 10 classes" in problem.what
    assert "4 classes" in problem.what


def test_probabilities_and_execution_modes_are_those_of_the_other_run(tmp_path):
    tables = {**TABLES, "model": {**TABLES["model"], "softmax": True}, "training": {"epochs": 1, "loss": "nll"}}
    ek.train(tables, out=tmp_path / "nll", progress=False)
    assert Frozen(run=tmp_path / "nll").gives_probabilities()
    assert problems(tmp_path / "nll", {"training.loss": "nll"}) == ""
    assert not Frozen(run=tmp_path / "nowhere").gives_probabilities()
    assert Frozen(run=tmp_path / "nowhere").unsupported() == {}


def test_a_run_that_is_gone_is_named_when_the_member_is_built(other_run, tmp_path):
    moved = shutil.copytree(other_run.path, tmp_path / "moved")
    model = Frozen(run=moved)
    model.build((1, 8, 8), 10)
    shutil.rmtree(moved)
    with pytest.raises(RunError, match="another run, which cannot be loaded") as raised:
        model.build((1, 8, 8), 10)
    assert raised.value.exit_code == 5
    assert str(moved) in raised.value.line
    assert "put the run back" in raised.value.fix


def test_frozen_members_are_part_of_a_run_beside_learning_ones(other_run, tmp_path):
    frozen = {"name": "frozen", "run": str(other_run.path), "member": 1}
    groups = [{"members": 1, "model": frozen}, {"members": 1}]
    tables = {**TABLES, "ensemble": {"groups": groups}, "method": {"name": "gncl", "lambda": 0.5}}
    run = ek.train(tables, out=tmp_path / "run", progress=False)
    inputs = torch.rand(4, 1, 8, 8)
    outputs = ek.load(run.path).member_outputs(inputs)
    torch.testing.assert_close(outputs[0], other_run.ensemble.member_outputs(inputs)[1])
