"""Comparisons of made-up outputs, where the right answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.kept_runs import Outputs, kept, kept_run, opener

from ensemblekit.analysis.comparing import compare
from ensemblekit.analysis.comparison import compare_facts
from ensemblekit.analysis.groups import differing_keys, flatten, group_runs, label_of, short_names, usual_values
from ensemblekit.analysis.reading import _read
from ensemblekit.core.errors import UsageError

GOOD, BAD = Outputs(signal=3.0), Outputs(signal=2.0)


def facts(*runs):
    return [_read(run)[0] for run in runs]


def made(outputs, lam, seed=0, **overrides):
    path = f"runs/lambda={lam},seed={seed}" + "".join(f",{key}={value}" for key, value in overrides.items())
    changes = {"method.lambda": lam, "seed": seed, **{key.replace("__", "."): own for key, own in overrides.items()}}
    return kept_run(outputs.but(seed=seed + 10), path, changes)


def cells(comparison, name):
    return {group.keys.get("method.lambda"): group.cells[name] for group in comparison.groups}


def test_the_best_group_has_a_star_if_the_interval_excludes_zero():
    comparison = compare_facts(facts(made(BAD, 0.0), made(GOOD, 0.5), made(BAD.but(signal=2.1), 1.0)))
    found = cells(comparison, "accuracy")
    assert [found[lam].mark for lam in (0.0, 0.5, 1.0)] == [None, "best", None]
    assert found[0.0].interval.high < 0
    assert found[0.0].interval.low < found[0.0].difference < found[0.0].interval.high
    assert found[0.5].interval is None
    assert comparison.best.keys["method.lambda"] == 0.5
    nll = cells(comparison, "nll")
    assert nll[0.5].mark == "best"
    assert nll[0.0].interval.low > 0  # less is better


def test_no_star_where_the_difference_is_within_noise():
    almost = kept(*perturbed(GOOD.kept(), share=0.002))
    first, second = kept_run(GOOD, "a", {"method.lambda": 0.1}), kept_run(almost, "b", {"method.lambda": 0.2})
    found = cells(compare_facts(facts(first, second)), "accuracy")
    assert found[0.1].mean != found[0.2].mean
    assert {cell.mark for cell in found.values()} == {"within noise"}
    assert sum(cell.is_leading for cell in found.values()) == 1


def perturbed(outputs, share):
    """Outputs of which a small share of samples, half better and half worse, have other predictions."""
    random = torch.Generator().manual_seed(3)
    changed = torch.rand(len(outputs.targets), generator=random) < share
    values = outputs.outputs.clone()
    values[:, changed] = values[:, changed].flip(-1)
    return values, outputs.targets


def test_identical_runs_differ_by_exactly_nothing():
    comparison = compare_facts(facts(kept_run(GOOD, "a", {"method.lambda": 0.1}), kept_run(GOOD, "b")))
    for name in ("accuracy", "nll", "ece", "brier", "best_member_accuracy"):
        for cell in cells(comparison, name).values():
            assert cell.difference == 0
            assert cell.interval is None or (cell.interval.low, cell.interval.high) == (0.0, 0.0)


def test_stars_on_equal_methods_are_as_rare_as_the_level_says():
    stars = 0
    for trial in range(60):
        pair = [GOOD.but(num_samples=300, seed=1000 + 2 * trial + own) for own in range(2)]
        runs = [kept_run(outputs, f"r{own}", {"method.lambda": float(own)}) for own, outputs in enumerate(pair)]
        found = cells(compare_facts(facts(*runs), resamples=300), "accuracy")
        stars += any(cell.mark == "best" for cell in found.values())
    assert stars <= 8  # 5 % of 60 are 3


def test_means_and_deviations_are_over_seeds_and_several_seeds_widen_the_interval():
    noisy = [made(Outputs(signal=signal), 0.0, seed) for seed, signal in enumerate((2.4, 2.8, 3.2))]
    rival = [made(Outputs(signal=signal), 1.0, seed) for seed, signal in enumerate((3.1, 2.5, 3.0))]
    comparison = compare_facts(facts(*noisy, *rival))
    found = cells(comparison, "accuracy")
    own = torch.tensor(found[0.0].values, dtype=torch.float64)
    assert found[0.0].mean == pytest.approx(float(own.mean()))
    assert found[0.0].std == pytest.approx(float(own.std()))
    assert {cell.mark for cell in found.values()} == {"within noise"}  # whichever seed one takes decides
    one_seed = cells(compare_facts(facts(noisy[0], rival[0])), "accuracy")
    assert one_seed[1.0].mark == "best"
    assert one_seed[0.0].std is None


def test_times_of_single_runs_get_no_star_but_exact_numbers_do():
    slow = replace(made(GOOD, 0.0), environment={"seconds": {"training": 9.0}})
    small = replace(made(GOOD, 1.0), members=[{"index": 0, "parameters": 7}])
    comparison = compare_facts(facts(slow, small))
    assert {cell.mark for cell in cells(comparison, "training_seconds").values()} == {None}
    parameters = cells(comparison, "parameters")
    assert (parameters[0.0].mark, parameters[1.0].mark) == (None, "best")
    assert {cell.mark for cell in cells(comparison, "diversity").values()} == {None}  # neither high nor low is better


def test_runs_are_grouped_by_everything_that_differs_except_seed_and_engine():
    runs = [
        made(GOOD, lam, seed, engine__name=engine, model__hidden=[4])
        for lam in (0.0, 0.5)
        for seed, engine in enumerate(("sequential", "threaded"))
    ]
    comparison = compare_facts(facts(*runs))
    assert comparison.keys == ("method.lambda",)
    assert [(group.label, len(group.runs)) for group in comparison.groups] == [("lambda=0", 2), ("lambda=0.5", 2)]


def test_by_averages_over_the_other_keys_and_says_so():
    runs = [made(GOOD, lam, model__hidden=[hidden]) for lam in (0.0, 0.5) for hidden in (4, 8)]
    comparison = compare_facts(facts(*runs), by=["method.lambda"])
    assert [len(group.runs) for group in comparison.groups] == [2, 2]
    assert "model.hidden" in comparison.notes[-1]
    with pytest.raises(
        UsageError, match=r"no run has the key \"method.lamda\"[\s\S]*did you mean \"method.lambda\""
    ) as error:
        compare_facts(facts(*runs), by=["method.lamda"])
    assert error.value.exit_code == 2


def test_a_key_that_only_one_plugin_has_is_left_out_of_the_label():
    specs = [
        flatten({"method": {"name": "gncl", "lambda": 0.5, "mode": "upper"}}),
        flatten({"method": {"name": "gncl", "lambda": 1.0, "mode": "upper"}}),
        flatten({"method": {"name": "bagging", "replacement": True}}),
    ]
    keys = differing_keys(specs)
    assert keys == ["method.name", "method.lambda"]
    labels = [label_of(values, short_names(keys)) for values, _ in group_runs(specs, keys)]
    assert labels == ["bagging", "gncl, lambda=0.5", "gncl, lambda=1"]


def test_lists_of_methods_are_flattened_by_their_index_and_short_names_stay_unambiguous():
    flat = flatten({"method": [{"name": "gncl"}, {"name": "bagging"}], "model": {"hidden": [4, 8]}})
    assert flat == {"method.0.name": "gncl", "method.1.name": "bagging", "model.hidden": [4, 8]}
    keys = ["model.width", "method.width", "training.lr"]
    assert short_names(keys) == {"model.width": "model.width", "method.width": "method.width", "training.lr": "lr"}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Outputs(num_samples=100), "100 test samples, not 2000"),
        (kept(GOOD.kept().outputs, GOOD.targets.roll(1)), "the targets of the test samples differ"),
        (replace(GOOD.kept(), index=torch.arange(2000) + 5), "other samples of the data set"),
    ],
)
def test_runs_on_different_test_data_are_refused_with_the_reason(other, reason, tmp_path):
    runs = [kept_run(GOOD, str(tmp_path / "a")), kept_run(other, str(tmp_path / "b"))]
    for run in runs:
        run.path.mkdir()
        (run.path / "run.json").touch()
    with pytest.raises(UsageError, match=reason) as error:
        compare([run.path for run in runs], opener(*runs))
    assert str(runs[1].path) in error.value.where


def test_real_targets_may_differ_by_rounding_but_not_by_more(tmp_path):
    targets = torch.randn(60, 1, generator=torch.Generator().manual_seed(0)) * 50 + 100
    outputs = targets + torch.randn(3, 60, 1, generator=torch.Generator().manual_seed(1))
    runs = []
    for name, noise in (("a", 0.0), ("b", 1e-5), ("c", 0.1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").touch()
        overrides = {"data": "diabetes", "training.loss": "mse"}
        runs.append(kept_run(kept(outputs, targets + noise), str(tmp_path / name), overrides))
    comparison = compare([run.path for run in runs[:2]], opener(*runs))
    assert comparison.primary == "mse"
    assert len(comparison.groups) == 1
    with pytest.raises(UsageError, match="targets"):
        compare([run.path for run in runs], opener(*runs))


def test_rows_have_every_number_by_name():
    comparison = compare_facts(facts(made(BAD, 0.0), made(GOOD, 0.5)))
    rows = comparison.table()
    assert [row["method.lambda"] for row in rows] == [0.0, 0.5]
    for row in rows:
        assert {"group", "seeds", "accuracy", "accuracy_std", "accuracy_difference", "accuracy_low"} <= set(row)
        assert row["seeds"] == len(row["runs"]) == 1
    assert rows[1]["accuracy_mark"] == "best"
    assert rows[0]["accuracy_low"] < rows[0]["accuracy_difference"] < rows[0]["accuracy_high"] < 0
    assert repr(comparison) == "Comparison(2 groups of 2 runs, 2000 test samples)"


def test_settings_that_most_groups_share_are_left_out_of_labels():
    keys = [{"method.name": name, "training.epochs": 4, "ensemble.members": 4} for name in ("bagging", "gncl", "smcl")]
    keys += [{"method.name": "gncl", "training.epochs": 16, "ensemble.members": 4}]
    keys += [{"method.name": None, "training.epochs": 4, "ensemble.members": 1}]
    usual = usual_values(keys)
    assert usual == {"training.epochs": 4, "ensemble.members": 4}
    labels = [label_of(values, short_names(list(values)), usual) for values in keys]
    assert labels == ["bagging", "gncl", "smcl", "gncl, epochs=16", "members=1"]
    assert label_of({"training.epochs": 4}, {"training.epochs": "epochs"}, usual) == "epochs=4"
