"""A setting that would have no effect is an error before training, or is said."""

from __future__ import annotations

import json

import pytest
from helpers.small_runs import small_spec, training

import ensemblekit as ek
from ensemblekit.core.errors import UsageError

NO_VALIDATION = {**small_spec()["data"], "validation_fraction": 0.0}


@pytest.mark.parametrize("setting", [{"patience": 2}, {"keep": "best"}], ids=str)
def test_model_selection_without_validation_data_is_refused(setting, tmp_path):
    spec = small_spec(data=NO_VALIDATION, training=training(**setting))
    with pytest.raises(UsageError, match=rf"(?s)training\.{next(iter(setting))} needs .*data\.validation_fraction"):
        ek.train(spec, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_a_batch_that_is_larger_than_the_data_is_said(tmp_path):
    run = ek.train(small_spec(training=training(epochs=1, batch_size=500)), tmp_path / "run", progress=False)
    assert any(text.startswith("training.batch_size is 500, but there are only 200") for text in run.notices)


@pytest.mark.parametrize("methods", [["bagging", "end_to_end"], ["bagging", {"name": "gncl", "lambda": 1.0}]], ids=str)
def test_weights_that_no_method_uses_are_refused(methods, tmp_path):
    name = methods[1] if isinstance(methods[1], str) else methods[1]["name"]
    with pytest.raises(UsageError, match=f'the sample weights of "bagging" have no effect with "{name}"'):
        ek.train(small_spec(method=methods), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "methods", [["bagging"], ["bagging", {"name": "gncl", "lambda": 0.5}], ["bagging", "smcl"]], ids=str
)
def test_weights_that_a_method_uses_are_not_refused(methods, tmp_path):
    spec = small_spec(method=methods, training=training(epochs=1))
    assert ek.train(spec, tmp_path / "run", progress=False).status == "finished"


def early(**changes) -> dict:
    section = {"epochs": 30, "batch_size": 50, "patience": 2, "optimizer": {"name": "adam", "lr": 0.05}}
    return small_spec(training=section | changes)


def test_a_run_that_stops_early_and_goes_back_to_its_best_epoch_says_both(tmp_path, capsys):
    run = ek.train(early(keep="best"), tmp_path / "run")
    shown = capsys.readouterr().out
    result = json.loads((run.path / "result.json").read_text())
    losses = [row["validation_loss"] for row in run.history]
    best = losses.index(min(losses)) + 1
    assert (result["best_epoch"], result["stopped_early"], result["epochs"]) == (best, True, len(losses))
    stopped = f"stopped early after epoch {len(losses)}: no lower validation loss in the last 2 evaluations"
    went_back = f"the weights are those of epoch {best}, which has the lowest validation loss"
    for text in (stopped, went_back):
        assert f"note: {text}" in shown
        assert any(notice.startswith(text) for notice in run.notices)
    assert shown.index("note: ") > shown.rindex(f" {len(losses)}/30  ")


def test_a_run_that_does_neither_says_nothing(tmp_path):
    run = ek.train(small_spec(), tmp_path / "run", progress=False)
    result = json.loads((run.path / "result.json").read_text())
    assert result["stopped_early"] is False
    assert [text for text in run.notices if "epoch" in text] == []


def test_the_result_has_validation_metrics_and_the_time_also_of_earlier_parts(tmp_path):
    run = ek.train(small_spec(), tmp_path / "run", progress=False)
    result = json.loads((run.path / "result.json").read_text())
    expected = {name: value for name, value in run.history[-1].items() if name.startswith("validation_")}
    assert result["validation_metrics"] == expected
    seconds = result["seconds"]
    assert seconds["total"] == pytest.approx(sum(seconds[name] for name in seconds if name != "total"))
    assert {"start", "training", "evaluation", "checkpoints"} < set(seconds)
    assert seconds["training"] == pytest.approx(run.seconds["training"])
    longer = ek.resume(run.path, progress=False, epochs=4)
    assert longer.seconds["training"] > seconds["training"]
