"""Searches by Optuna: spaces, validation data only, pruning, continuing, determinism."""

from __future__ import annotations

import builtins

import pytest
from helpers.sweeps import BASE, PLUGINS, final_metrics, rows, sweep

import ensemblekit as ek
from ensemblekit.analysis.search import SearchSettings, TrialListener, check_settings, open_study
from ensemblekit.analysis.search_space import Choices, Interval, parse_space, resolved_space
from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.sweep_runner import Pruned
from ensemblekit.core.errors import Interrupted, RunError, SpecError, UsageError

SPACE = {"method.lambda": "0..1", "training.optimizer.lr": "1e-3..1:log", "model.bias": [True, False]}


def search(out, spec=BASE, **options):
    return sweep(out, spec, **{"search": SPACE, "trials": 4, **options})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("k=0..1", Interval(0, 1)),
        ("k=1e-4..1e-2:log", Interval(1e-4, 1e-2, log=True)),
        ("k=-1.5..2", Interval(-1.5, 2)),
        ("k=a,2,[3]", Choices(("a", 2, [3]))),
    ],
)
def test_a_space_is_an_interval_or_some_values(text, part):
    assert parse_space(text) == ("k", part)


@pytest.mark.parametrize("text", ["k", "k=", "k=1..0", "k=0..1:log", "k=0..1:lin", "k=a..b", "k=0..inf", "k=1..1"])
def test_a_space_without_values_is_refused(text):
    with pytest.raises(UsageError):
        parse_space(text)


def test_an_interval_is_of_integers_only_where_fractions_are_refused(registry):
    space = dict(parse_space(text) for text in ("method.lambda=0..1", "ensemble.members=2..6"))
    found = resolved_space(BASE, space, registry, "the spec")
    assert found == {"method.lambda": Interval(0, 1), "ensemble.members": Interval(2, 6, integers=True)}


@pytest.mark.parametrize(
    "text", ["method.lamda=0..1", "method.lambda=0..3", "model.bias=true,7", "ensemble.members=0..2"]
)
def test_ends_and_choices_are_validated_before_anything_runs(text, registry):
    with pytest.raises(SpecError):
        resolved_space(BASE, dict([parse_space(text)]), registry, "the spec")


@pytest.mark.parametrize("metric", ["test_loss", "test_accuracy", "train_loss", "mean_member_loss", "validation_los"])
def test_only_validation_data_decides(metric):
    with pytest.raises(UsageError) as error:
        check_settings(SearchSettings({"k": Interval(0, 1)}, metric=metric))
    assert "validation_loss" in error.value.fix


def test_trials_are_runs_and_the_whole_curve_is_in_the_table(tmp_path):
    found = search(tmp_path / "s")
    assert [run.name for run in found.runs] == [f"trial={number}" for number in range(4)]
    assert len({run.overrides["method.lambda"] for run in found.runs}) == 4
    for run, row in zip(found.runs, rows(tmp_path / "s"), strict=True):
        opened = ek.open_run(run.path, plugins=PLUGINS)
        assert opened.spec.methods[0].lam == run.overrides["method.lambda"]
        assert opened.spec.optimizer.learning_rate == run.overrides["training.optimizer.lr"]
        curve = [line["validation_loss"] for line in opened.history]
        assert [float(value) for value in row["curve"].split()] == curve
    assert ek.open_sweep(tmp_path / "s").table() == found.table()


def test_a_search_is_deterministic_and_a_continued_one_samples_other_values(tmp_path):
    search(tmp_path / "a")
    search(tmp_path / "b")
    assert final_metrics(tmp_path / "a") == final_metrics(tmp_path / "b")
    more = search(tmp_path / "a", trials=6)
    values = [run.overrides["method.lambda"] for run in more.runs]
    assert len(set(values)) == 6
    with pytest.raises(RunError, match="another search"):
        search(tmp_path / "a", search={"method.lambda": "0..1"})


def test_a_stopped_trial_is_resumed_with_its_values(tmp_path):
    class Stop(SweepListener):
        def epoch_started(self, name, epoch, num_epochs):
            if (name, epoch) == ("trial=1", 2):
                raise KeyboardInterrupt

    out = tmp_path / "s"
    with pytest.raises(Interrupted, match="1 of 2 runs are finished"):
        search(out, progress=Stop())
    stopped = ek.open_sweep(out).runs[1]
    assert stopped.status == "interrupted"
    found = ek.sweep(out, progress=False, plugins=PLUGINS)  # the directory knows what was searched
    assert [run.status for run in found.runs] == ["finished"] * 4
    assert found.runs[1].overrides == stopped.overrides


def test_hopeless_trials_are_pruned_at_the_end_of_an_epoch(tmp_path):
    # most learning rates learn, one not at all
    spec = {**BASE, "training": {**BASE["training"], "epochs": 3}}
    found = search(tmp_path / "s", spec, search={"training.optimizer.lr": [1.0, 0.9, 0.8, 0.7, 1e-9]}, trials=12)
    pruned = [run for run in found.runs if run.status == "pruned"]
    assert pruned
    assert 1e-9 in {run.overrides["training.optimizer.lr"] for run in pruned}
    assert all(run.epochs < 3 and run.metrics["validation_loss"] > 0 and "median" in run.error for run in pruned)
    assert [run.status for run in ek.open_sweep(tmp_path / "s").runs] == [run.status for run in found.runs]


def test_an_epoch_is_reported_once_and_may_prune(tmp_path):
    study = open_study(tmp_path / "search.db", seed=0, maximise=False)
    for _ in range(5):
        trial = study.ask()
        listener = TrialListener(trial, "validation_loss")
        listener.epoch_finished(1, {"validation_loss": 1.0})
        listener.epoch_finished(1, {"validation_loss": 1.0})  # an epoch that is trained again after a resume
        study.tell(trial, 1.0)
    with pytest.raises(Pruned):
        TrialListener(study.ask(), "validation_loss").epoch_finished(1, {"validation_loss": 2.0})


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"jobs": 2}, "one trial at a time"),
        ({"grid": {"method.lambda": [0]}}, "no grid, seeds or variants"),
        ({"seeds": 2}, "no grid, seeds or variants"),
        ({"trials": 0}, "0 trials"),
        ({"minimise": "test_loss"}, "never at test data"),
        ({"minimise": "validation_mse"}, 'no metric "validation_mse"'),
        ({"overrides": {"data.validation_fraction": 0.0}}, "needs validation data"),
    ],
)
def test_what_a_search_cannot_be_is_refused(tmp_path, options, part):
    with pytest.raises(UsageError, match=part):
        search(tmp_path / "s", **options)


def test_without_optuna_the_error_names_the_extra(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_optuna(name, *arguments, **options):
        if name.partition(".")[0] == "optuna":
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_optuna)
    with pytest.raises(UsageError) as error:
        search(tmp_path / "s")
    assert error.value.fix == "pip install 'ensemblekit[search]'"
    assert not (tmp_path / "s").exists()


def test_a_damaged_storage_is_an_error_of_the_directory(tmp_path):
    search(tmp_path / "s", trials=1)
    (tmp_path / "s" / "search.db").write_bytes(b"not a data base " * 200)
    with pytest.raises(RunError, match="Optuna's storage"):
        search(tmp_path / "s", trials=2)
