"""A run that explodes, be it in its very last step, is never called finished and never saves what is not finite."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from helpers.commands import last_error, run
from helpers.small_runs import checkpoints, small_spec, training
from safetensors.torch import load_file

import ensemblekit as ek
from ensemblekit.core.errors import NumericError
from ensemblekit.display.console import Printer
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.training.checks import check_tensors
from ensemblekit.training.evaluation import check_metrics
from ensemblekit.training.model_selection import ModelSelection


def one_step(optimizer: str, rate: float, clip: float | None, epochs: int = 1) -> dict:
    """A spec of one step in an epoch."""
    section = {"epochs": epochs, "batch_size": 200, "optimizer": {"name": optimizer, "lr": rate}}
    return section if clip is None else section | {"clip_norm": clip}


def assert_nothing_but_finite_numbers(path) -> None:
    for file in path.rglob("*.json*"):
        assert not {"NaN", "Infinity"} & set(file.read_text().replace(",", " ").split())
    for file in path.rglob("*.safetensors"):
        assert all(value.isfinite().all() for value in load_file(file).values() if value.is_floating_point()), file


@pytest.mark.parametrize("engine", ["sequential", "threaded", "stacked"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("rate", "clip"), [(1e30, None), (1e38, 1.0)])
@pytest.mark.parametrize("method", ["gncl", {"name": "boosting", "schedule": "joint"}, "end_to_end"], ids=str)
def test_a_run_that_explodes_in_its_last_step_fails_and_keeps_the_checkpoint_before(
    method, rate, clip, optimizer, engine, tmp_path
):
    """The outputs of its only step are finite: they are computed before the weights change."""
    model = {"name": "mlp", "hidden": [8], "batch_norm": False}
    spec = small_spec(
        model=model, method=method, training=one_step(optimizer, rate, clip), engine={"name": engine, "device": "cpu"}
    )
    with pytest.raises(NumericError) as error:
        ek.train(spec, tmp_path / "run", progress=False)
    assert error.value.exit_code == 6
    assert f"{tmp_path / 'run'} keeps the checkpoint of epoch 0" in error.value.line
    assert not (tmp_path / "run" / "result.json").exists()
    assert checkpoints(tmp_path / "run") == ["epoch-000000"]
    assert ek.open_run(tmp_path / "run").status == "failed"
    assert_nothing_but_finite_numbers(tmp_path / "run")


@pytest.mark.parametrize("engine", ["sequential", "threaded", "stacked"])
@pytest.mark.parametrize(
    "method", ["independent", "gncl", "bagging", "end_to_end", "smcl", {"name": "gncl", "mode": "exact"}], ids=str
)
def test_a_run_with_final_metrics_that_are_not_finite_fails_although_its_weights_are_finite(method, engine, tmp_path):
    """The loss of such a run may be finite in float32 where the diversity overflows."""
    section = {"epochs": 1, "batch_size": 100, "optimizer": {"name": "sgd", "lr": 1e5}}
    model = {"name": "mlp", "hidden": [16, 16], "batch_norm": False}
    spec = small_spec(model=model, method=method, training=section, engine={"name": engine, "device": "cpu"})
    with pytest.raises(NumericError) as error:
        ek.train(spec, tmp_path / "run", progress=False)
    assert error.value.exit_code == 6
    assert "is not finite" in error.value.line
    assert "keeps the checkpoint of epoch" in error.value.line
    assert not (tmp_path / "run" / "result.json").exists()
    assert ek.open_run(tmp_path / "run").status == "failed"


def test_a_final_metric_that_is_not_finite_is_named_with_its_split():
    with pytest.raises(NumericError, match=r"the final test_diversity on the test data is not finite"):
        check_metrics({"test_loss": 2.5e18, "test_diversity": math.inf}, "on the test data", "epoch 1")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_never_saved_and_their_member_is_named(value, tmp_path):
    """Outputs do not show them: a weight of an input that is always zero."""

    def spoil(network: torch.nn.Module) -> None:
        with torch.no_grad():
            next(network.parameters()).view(-1)[0] = value

    class Spoils(ek.Method):
        """Spoils the weights of the second member in the second epoch."""

        @ek.hookimpl
        def epoch_started(self, ensemble, epoch):
            if epoch == 2:
                spoil(ensemble.members.states[1].network)

    spec = ek.load_spec(small_spec(training=training(epochs=2), model={"name": "mlp", "hidden": [8]}))
    with pytest.raises(NumericError, match=r"member 1"):
        ek.train(replace(spec, methods=(Spoils(),)), tmp_path / "run", progress=False)
    assert checkpoints(tmp_path / "run") == ["epoch-000000", "epoch-000001"]
    assert_nothing_but_finite_numbers(tmp_path / "run")


def test_the_state_of_an_optimizer_that_is_not_finite_is_named_too():
    tensors = {"members.0.weight": torch.ones(2), "optimizer.3.exp_avg.weight": torch.tensor([1.0, math.inf])}
    with pytest.raises(NumericError, match=r"the optimizer's state of member 3 .* by epoch 2"):
        check_tensors(tensors, "epoch 2", "the run keeps epoch 1")
    check_tensors({"members.0.count": torch.tensor(3), "members.0.weight": torch.tensor(1e38)}, "epoch 2", "")


def test_a_loss_that_is_nan_is_never_the_best():
    selection = ModelSelection(patience=2)
    assert [selection.is_best({"validation_loss": loss}) for loss in (math.nan, 1.0, math.nan, 0.5)] == [0, 1, 0, 1]
    assert selection.best_loss == 0.5


def test_a_checkpoint_inside_an_epoch_is_not_saved_after_it_has_exploded(tmp_path):
    section = {**one_step("sgd", 1e30, None), "batch_size": 50, "checkpoint_every_minutes": 1e-9}
    with pytest.raises(NumericError):
        ek.train(small_spec(training=section), tmp_path / "run", progress=False)
    assert_nothing_but_finite_numbers(tmp_path / "run")


@pytest.fixture
def spoilt_run(tmp_path):
    """A finished run with one weight that is not finite, as version 0.1.0 may have left one."""
    run = ek.train(small_spec(training=training(epochs=1)), tmp_path / "run", progress=False)
    directory = RunDirectory.open(run.path)
    tensors, metadata = directory.read_model()
    tensors["members.1.1.weight"].fill_(math.nan)
    directory.write_model(tensors, metadata)
    return run.path


def test_evaluating_a_model_with_outputs_that_are_not_finite_is_a_numeric_error(spoilt_run):
    for options in ([], ["--json"]):
        result = run("evaluate", str(spoilt_run), *options)
        assert result.exit_code == 6, result.stderr
        assert "1 member of 3 gave outputs that are not finite" in last_error(result)
        assert "report it" not in result.stderr


def test_a_number_that_does_not_exist_is_null_in_json(capsys):
    Printer().json({"test_loss": math.inf, "members": [{"loss": math.nan}]})
    assert json.loads(capsys.readouterr().out) == {"test_loss": None, "members": [{"loss": None}]}
