"""The chain sweep → compare → figure, as specs/reproduction uses it: two findings of the GNCL paper on digits."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import run
from helpers.places import ROOT
from scipy.stats import spearmanr

SPEC = """
[data]
name = "digits"
limit_train = 300            # so few that the large network fits them

[model]
name = "mlp"

[ensemble]
members = 4

[method]
name = "gncl"

[training]
epochs = 20
batch_size = 50
evaluate_every = 20
optimizer = { name = "adabelief", lr = 1e-2, eps = 1e-12 }

[engine]
name = "stacked"
device = "cpu"

[sweep]
seeds = 2

[sweep.grid]
model = [
    { name = "binary_resnet", width = 4, blocks = 1 },
    { name = "mlp", hidden = [3] },
    { name = "mlp", hidden = [128] },
]
"method.lambda" = [0.0, 0.5, 1.0]

[[sweep.variants]]
name = "gncl"

[[sweep.variants]]
name = "smcl"
set = { method = "smcl" }

[[sweep.variants]]
name = "single"
set = { method = [], "ensemble.members" = 1 }
"""
MODULE = importlib.util.spec_from_file_location("findings", ROOT / "specs" / "reproduction" / "findings.py")
assert MODULE is not None
assert MODULE.loader is not None
FINDINGS = importlib.util.module_from_spec(MODULE)
sys.modules["findings"] = FINDINGS  # its dataclasses look themselves up there
MODULE.loader.exec_module(FINDINGS)

MODELS = {"binary": ("binary_resnet", None), "small": ("mlp", [3]), "large": ("mlp", [128])}
Rows = Mapping[tuple[str, str | float], Mapping[str, Any]]


@pytest.mark.slow
def test_a_sweep_its_comparison_and_its_figure_show_two_findings_of_the_paper_on_digits(tmp_path):
    spec, sweep, figure = tmp_path / "findings.toml", tmp_path / "sweep", tmp_path / "figure.svg"
    spec.write_text(SPEC)
    swept = run("sweep", str(spec), "--out", str(sweep), "--quiet")
    assert swept.exit_code == 0, swept.stderr
    compared = run("compare", str(sweep), "--json", "--plot", str(figure))
    assert compared.exit_code == 0, compared.stderr
    rows = by_model_and_method(json.loads(compared.stdout)["rows"])
    every_run_is_in_the_table_the_comparison_and_the_figure(sweep, rows, figure)
    only_the_large_network_fits_the_training_data(rows)
    diversity_grows_with_lambda_and_the_mean_small_member_gets_worse(rows)
    smcl_is_diverse_and_weak(rows)
    the_script_that_judges_agrees_with_the_comparison(sweep, rows)


def by_model_and_method(rows: list[dict[str, Any]]) -> Rows:
    """The rows of a comparison by base model, and λ of GNCL or the name of another method."""
    names = {str(key): name for name, key in MODELS.items()}
    found = {}
    for row in rows:
        model = names[str((row["model.name"], row["model.hidden"]))]
        method = row["method.lambda"] if row["method.name"] == "gncl" else row["method.name"] or "single"
        found[model, method] = row
    return found


def every_run_is_in_the_table_the_comparison_and_the_figure(sweep: Path, rows: Rows, figure: Path) -> None:
    with (sweep / "results.csv").open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == 30 * ["finished"]
    assert set(rows) == {(model, method) for model in MODELS for method in (0.0, 0.5, 1.0, "smcl", "single")}
    assert {row["seeds"] for row in rows.values()} == {2}
    for text in ("binary_resnet", "hidden=[3]", "hidden=[128]", "diversity", "λ", "smcl", "single network"):
        assert text in figure.read_text(), text


def only_the_large_network_fits_the_training_data(rows: Rows) -> None:
    losses = {model: rows[model, "single"]["train_loss"] for model in MODELS}
    assert losses["large"] < 0.1
    assert min(losses["binary"], losses["small"]) > 0.8


def diversity_grows_with_lambda_and_the_mean_small_member_gets_worse(rows: Rows) -> None:
    """Findings 3a and, for the small network, 3b of specs/reproduction.

    Means of two seeds, from sweeps with seed = 0, 100 and 200: the ratio of the diversities of λ = 1 and λ = 0 was
    2.3 to 3.0 for binary members, 3.2 to 3.9 for small ones and 6.2 to 6.8 for large ones. The accuracy of the mean
    member fell by 9 to 12 points for small members; for binary ones it fell by 1.5 to 6.3, but not with every seed, and
    for large ones by only 1 to 1.6.
    """
    for model in MODELS:
        none, half, full = (rows[model, lam]["diversity"] for lam in (0.0, 0.5, 1.0))
        assert none < half < full, model
        assert full > 1.5 * none, model
    assert rows["small", 1.0]["mean_member_accuracy"] < rows["small", 0.0]["mean_member_accuracy"] - 0.03


def smcl_is_diverse_and_weak(rows: Rows) -> None:
    """Finding 5 of specs/reproduction.

    From the same sweeps: SMCL was 3.0 to 4.0 times as diverse as independent training for small members, 11 to 15
    times for binary ones and 307 to 354 times for large ones. It was less accurate by 41 to 47 points for binary
    members and by 6.3 to 7.5 for large ones; by 4 to 12 for small ones, but not with every seed, so that their accuracy
    is not tested.
    """
    for model in MODELS:
        assert rows[model, "smcl"]["diversity"] > 1.5 * rows[model, 0.0]["diversity"], model
    assert rows["binary", "smcl"]["accuracy"] < rows["binary", 0.0]["accuracy"] - 0.1
    assert rows["large", "smcl"]["accuracy"] < rows["large", 0.0]["accuracy"] - 0.02


def the_script_that_judges_agrees_with_the_comparison(sweep: Path, rows: Rows) -> None:
    results = FINDINGS.Results(sweep)
    for measure in ("accuracy", "diversity", "mean_member_accuracy", "train_loss"):
        for capacity, model in zip(FINDINGS.CAPACITIES, MODELS, strict=True):
            weights = {FINDINGS.gncl(capacity, 1.0): 1.0, FINDINGS.gncl(capacity, 0.0): -1.0}
            found = results.contrast(weights, measure)
            expected = rows[model, 1.0][measure] - rows[model, 0.0][measure]
            assert found.value == pytest.approx(expected, rel=1e-4, abs=1e-6)
            assert found.interval.low < found.value < found.interval.high
    opposite = results.contrast({key: -weight for key, weight in weights.items()}, measure)
    assert opposite.value == pytest.approx(-found.value)
    assert opposite.sign == -found.sign


def test_rank_correlations_are_those_of_scipy():
    source = torch.Generator().manual_seed(0)
    first, second = torch.rand(20, 10, generator=source), torch.rand(20, 10, generator=source)
    found = FINDINGS.rank_correlation(first, second)
    expected = [spearmanr(a, b).statistic for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_a_finding_holds_for_all_cases_fails_by_one_opposite_and_is_else_undecided():
    assert FINDINGS.verdict([True, True], [False, False]) == "reproduced"
    assert FINDINGS.verdict([True, False], [False, True]) == "not reproduced"
    assert FINDINGS.verdict([True, False], [False, False]) == "undecided"
