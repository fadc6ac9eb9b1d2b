"""Runs of selected members: everything accepts them, and they predict as the members that were chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ensemblekit as ek
from ensemblekit.core.errors import NumericError, RunError
from ensemblekit.runs.directory import RunDirectory

BASE: dict[str, Any] = {
    "data": {"name": "digits", "limit_train": 300, "limit_test": 80, "validation_fraction": 0.3, "split_seed": 0},
    "model": {"name": "mlp", "hidden": [12]},
    "ensemble": {"members": 5},
    "training": {
        "epochs": 2,
        "batch_size": 50,
        "loss": "cross_entropy",
        "optimizer": {"name": "adabelief", "lr": 0.02},
    },
    "engine": {"name": "stacked", "device": "cpu"},
}
REGRESSION = {**BASE, "data": {"name": "diabetes", "validation_fraction": 0.3}}
REGRESSION["training"] = {**BASE["training"], "loss": "mse"}


def train(path: Path, base: dict[str, Any] = BASE, **changes: Any) -> Path:
    return ek.train({**base, **changes}, out=path, progress=False).path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "a", method={"name": "gncl", "lambda": 0.5})
    train(folder / "b", seed=3, method="bagging", model={"name": "mlp", "hidden": [6, 6]}, ensemble={"members": 3})
    train(folder / "boosting", method={"name": "boosting", "shrinkage": 0.5}, ensemble={"members": 4})
    train(folder / "probabilities", ensemble={"members": 4, "combiner": "probabilities"})
    train(folder / "values", REGRESSION, ensemble={"members": 4})
    return folder


def inputs() -> torch.Tensor:
    return torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def by_hand(selection: ek.Selection, x: torch.Tensor) -> torch.Tensor:
    """The outputs (K, B, C) of the chosen members, from the runs that they are from."""
    return torch.stack([ek.load(one["run"]).member_outputs(x)[one["member"]] for one in selection.chosen])


def test_the_new_run_predicts_like_the_chosen_members_combined_by_hand(runs, tmp_path):
    selection = ek.select(runs / "a", members=3, out=tmp_path / "s")
    ensemble = ek.load(tmp_path / "s")
    expected = by_hand(selection, inputs())
    assert ensemble.member_outputs(inputs()).allclose(expected, atol=1e-6)
    assert ensemble(inputs()).allclose(expected.mean(dim=0), atol=1e-6)
    assert len(selection.chosen) == 3
    assert selection.search == "exhaustive"


def test_the_choice_has_the_lowest_validation_loss_of_all_sets_and_ignores_test_data(runs, tmp_path):
    selection = ek.select(runs / "a", members=2, out=tmp_path / "s")
    kept = ek.open_run(runs / "a").outputs("validation")
    losses = {
        (one, other): float(torch.nn.functional.cross_entropy(kept.outputs[[one, other]].mean(dim=0), kept.targets))
        for one in range(5)
        for other in range(one + 1, 5)
    }
    assert tuple(member["member"] for member in selection.chosen) == min(losses, key=losses.__getitem__)
    assert selection.run.validation["validation_loss"] == pytest.approx(min(losses.values()), rel=1e-5)


def test_metrics_and_kept_outputs_are_those_of_an_evaluation(runs, tmp_path):
    selection = ek.select(runs / "a", members=3, out=tmp_path / "s")
    evaluated = ek.evaluate_run(tmp_path / "s")
    for name in ("test_loss", "test_accuracy", "test_diversity", "test_mean_member_accuracy"):
        assert selection.run.metrics[name] == pytest.approx(evaluated[name], abs=1e-5)
    kept, source = ek.open_run(tmp_path / "s").outputs("test"), ek.open_run(runs / "a").outputs("test")
    assert torch.equal(kept.outputs, source.outputs[[member["member"] for member in selection.chosen]])
    assert torch.equal(kept.index, source.index)


def test_members_of_runs_with_other_models_and_methods_are_pooled(runs, tmp_path):
    selection = ek.select([runs / "b", runs / "a"], members=6, out=tmp_path / "s")
    sources = {Path(member["run"]).name for member in selection.chosen}
    assert sources == {"a", "b"}
    ensemble = ek.load(tmp_path / "s")
    expected = by_hand(selection, inputs())
    assert ensemble.member_outputs(inputs()).allclose(expected, atol=1e-6)
    assert ensemble(inputs()).allclose(expected.mean(dim=0), atol=1e-6)
    models = [model.hidden for model in ensemble.spec.member_models]
    assert models == [(6, 6) if member["run"].endswith("b") else (12,) for member in selection.chosen]
    assert ek.evaluate_run(tmp_path / "s")["test_loss"] == pytest.approx(selection.run.metrics["test_loss"], abs=1e-5)


def test_with_replacement_the_picks_are_weights_and_the_loss_is_at_most_that_of_the_best_member(runs, tmp_path):
    selection = ek.select([runs / "a", runs / "b"], members=3, replace=True, out=tmp_path / "s")
    counts = torch.tensor([float(member["count"]) for member in selection.chosen])
    expected = (by_hand(selection, inputs()) * (counts / counts.sum())[:, None, None]).sum(dim=0)
    assert ek.load(tmp_path / "s")(inputs()).allclose(expected, atol=1e-5)
    assert selection.run.validation["validation_loss"] <= selection.curve[0]["validation_loss"] + 1e-6
    assert ek.open_run(tmp_path / "s").combiner().fitted is not None


def test_boosted_members_are_chosen_by_their_sum_and_stay_summed(runs, tmp_path):
    selection = ek.select(runs / "boosting", members=2, out=tmp_path / "s")
    assert ek.load(tmp_path / "s")(inputs()).allclose(0.5 * by_hand(selection, inputs()).sum(dim=0), atol=1e-5)
    assert selection.combiner == "boosting"


def test_members_are_chosen_under_the_runs_combiner_or_another_one(runs, tmp_path):
    own = ek.select(runs / "probabilities", members=2, out=tmp_path / "own")
    expected = by_hand(own, inputs()).softmax(dim=-1).mean(dim=0)
    assert ek.load(tmp_path / "own").predict_proba(inputs()).allclose(expected, atol=1e-5)
    other = ek.select(runs / "probabilities", members=2, combiner="mean", out=tmp_path / "other")
    assert ek.load(tmp_path / "other")(inputs()).allclose(by_hand(other, inputs()).mean(dim=0), atol=1e-5)


def test_values_are_kept_in_their_units(runs, tmp_path):
    selection = ek.select(runs / "values", members=2, out=tmp_path / "s")
    kept, source = ek.open_run(tmp_path / "s").outputs("test"), ek.open_run(runs / "values").outputs("test")
    assert kept.outputs.allclose(source.outputs[[member["member"] for member in selection.chosen]])
    assert selection.run.metrics["test_mse"] == pytest.approx(ek.evaluate_run(tmp_path / "s")["test_mse"], rel=1e-4)


def test_without_a_number_the_size_with_the_lowest_validation_loss_is_chosen(runs, tmp_path):
    selection = ek.select(runs / "a", out=tmp_path / "s")
    best = min(selection.curve, key=lambda row: row["validation_loss"])
    assert len(selection.curve) == 5
    assert len(selection.chosen) == best["members"]
    assert [row["is_selected"] for row in selection.curve].count(True) == 1


def test_a_budget_limits_parameters_and_measured_time(runs, tmp_path):
    parameters = ek.open_run(runs / "a").members[0]["parameters"]
    selection = ek.select(runs / "a", budget=f"{2 * parameters}parameters", out=tmp_path / "s")
    assert sum(member["parameters"] for member in selection.run.members) <= 2 * parameters
    timed = ek.select(runs / "a", budget="100000 ms", out=tmp_path / "t")
    assert all(0 < row["ms"] < 100000 for row in timed.curve)


def test_other_commands_accept_the_run_and_resume_has_nothing_to_train(runs, tmp_path):
    path = tmp_path / "s"
    ek.select([runs / "a", runs / "b"], members=4, out=path)
    assert [row["seeds"] for row in ek.compare([path, runs / "a"]).table()] == [1, 1]
    assert ek.report(path).is_file()
    assert {listed.path.name: listed.status for listed in ek.list_runs(tmp_path)} == {"s": "finished"}
    before = (path / "model.safetensors").read_bytes()
    assert ek.resume(path, progress=False).status == "finished"
    with pytest.raises(ek.UsageError, match="nothing to train"):
        ek.resume(path, epochs=5, progress=False)
    assert (path / "model.safetensors").read_bytes() == before
    assert ek.select(path, members=2, out=tmp_path / "again").run.status == "finished"
    recorded = ek.open_run(path).environment["selected_from"]
    assert {Path(member["run"]).name for member in recorded} <= {"a", "b"}


def test_a_damaged_selection_is_not_trained_in_its_place(runs, tmp_path):
    ek.select(runs / "a", members=2, out=tmp_path / "s")
    (tmp_path / "s" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(RunError, match="select again"):
        ek.resume(tmp_path / "s", progress=False)
    with pytest.raises(RunError, match="safetensors"):
        ek.load(tmp_path / "s")


def test_a_used_directory_is_refused_and_keeps_its_run(runs):
    with pytest.raises(RunError, match="already exists"):
        ek.select(runs / "a", members=2, out=runs / "b")
    assert ek.open_run(runs / "b").metrics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1, "data": {**BASE["data"], "split_seed": 1}}, "different validation data: .*"),
        ({"data": {**BASE["data"], "limit_test": 70}}, "different test data: 70 test samples, not 80"),
        ({"training": {**BASE["training"], "loss": {"name": "cross_entropy", "label_smoothing": 0.1}}}, "the losses"),
        ({"ensemble": {"members": 2, "combiner": "vote"}}, "the combiners differ"),
        ({"method": "boosting"}, '"boosting" combines its members in its own way'),
        ({"model": {"name": "mlp", "dropout": 0.2}, "method": {"name": "dropout", "passes": 2}}, "stochastic passes"),
    ],
)
def test_runs_that_do_not_fit_together_are_refused_with_both_named(runs, tmp_path, changes, message):
    training = {**BASE["training"], "epochs": 1}
    train(tmp_path / "other", **{"ensemble": {"members": 2}, "training": training, **changes})
    with pytest.raises(ek.UsageError, match=message) as caught:
        ek.select([runs / "a", tmp_path / "other"], members=2, out=tmp_path / "s")
    assert str(tmp_path / "other") in caught.value.where
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {**BASE["data"], "validation_fraction": 0.0}}, "no validation data"),
        ({"method": "stacking"}, "fitted to the outputs of all members"),
        ({"ensemble": {"members": 2, "combiner": "weighted"}}, "fitted to the outputs of all members"),
        ({"model": {"name": "tabm", "hidden": [8]}}, "in one network"),
    ],
)
def test_a_run_whose_members_cannot_be_chosen_is_refused(tmp_path, changes, message):
    training = {**BASE["training"], "epochs": 1}
    train(tmp_path / "run", **{"ensemble": {"members": 2}, "training": training, **changes})
    with pytest.raises(ek.UsageError, match=message):
        ek.select(tmp_path / "run", members=1, out=tmp_path / "s")


def replaced_outputs(path: Path, **changes: torch.Tensor) -> None:
    """Replace tensors of the kept validation outputs of a run."""
    directory = RunDirectory.open(path)
    kept = directory.read_outputs()
    assert kept is not None
    validation = ek.KeptOutputs(**{**vars(kept["validation"]), **changes})
    with directory.lock():
        directory.add_outputs({**kept, "validation": validation})


def test_outputs_that_are_not_finite_and_a_single_class_are_refused(tmp_path):
    path = train(tmp_path / "run", ensemble={"members": 2})
    kept = ek.open_run(path).outputs("validation")
    replaced_outputs(path, targets=torch.zeros_like(kept.targets))
    with pytest.raises(ek.DataError, match="one class"):
        ek.select(path, members=1, out=tmp_path / "s")
    replaced_outputs(path, outputs=kept.outputs * torch.nan, targets=kept.targets)
    with pytest.raises(NumericError, match="not finite"):
        ek.select(path, members=1, out=tmp_path / "s")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 9}, "9 of 5 members"),
        ({"budget": "1parameters"}, "no member is within the budget"),
        ({"budget": "a lot"}, "not a budget"),
        ({"replace": True, "combiner": "vote"}, "weighted mean of outputs"),
        ({"replace": True, "search": "exhaustive"}, "always greedy"),
    ],
)
def test_impossible_requests_say_what_is_possible(runs, tmp_path, options, message):
    with pytest.raises(ek.UsageError, match=message) as caught:
        ek.select(runs / "a", out=tmp_path / "s", **options)
    assert caught.value.fix


def test_a_run_is_named_once(runs, tmp_path):
    with pytest.raises(ek.UsageError, match="named twice"):
        ek.select([runs / "a", runs / "a"], out=tmp_path / "s")


def test_spec_of_the_new_run_is_valid_and_equal_when_read_again(runs, tmp_path):
    selection = ek.select([runs / "a", runs / "b"], members=6, out=tmp_path / "s")
    again = ek.load_spec(tmp_path / "s" / "spec.toml")
    assert again.to_dict() == selection.run.spec.to_dict()
    assert json.loads((tmp_path / "s" / "run.json").read_text())["status"] == "finished"
