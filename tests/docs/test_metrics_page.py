"""The page of metrics lists exactly the metrics that runs have."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.places import ROOT

import ensemblekit as ek
from ensemblekit.core.losses import MSE
from ensemblekit.core.metrics import METRIC_GROUPS, evaluate

PAGE = (ROOT / "docs" / "metrics.md").read_text()
SECTIONS = ("Loss and decomposition", "Classification", "Regression", "Training")
SPLITS = ("test_", "validation_")


def documented(section: str) -> set[str]:
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return {name for cell in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)}


def plain(name: str) -> str:
    return next((name.removeprefix(split) for split in SPLITS if name.startswith(split)), name)


@pytest.fixture(scope="module")
def produced(tmp_path_factory) -> set[str]:
    """The names of all metrics that a run of each task, and an evaluation with standardised targets, have."""
    names = set(evaluate(torch.ones(2, 3, 1), torch.zeros(3, 1), MSE(), restore=lambda values: 2 * values))
    for data, loss in (("digits", "cross_entropy"), ("diabetes", "mse")):
        spec = {
            "data": {"name": data, "limit_train": 60, "limit_test": 20},
            "model": {"name": "mlp", "hidden": [4]},
            "ensemble": {"members": 2},
            "training": {"epochs": 1, "loss": loss},
            "engine": {"name": "sequential"},
        }
        run = ek.train(spec, tmp_path_factory.mktemp("runs") / data, progress=False)
        names |= {plain(name) for name in (*run.metrics, *run.history[0])}
    return names


def test_every_metric_of_a_run_is_documented_and_every_documented_one_exists(produced):
    assert set().union(*map(documented, SECTIONS)) == produced


def test_every_metric_of_a_split_belongs_to_a_group(produced):
    assert {name for names in METRIC_GROUPS.values() for name in names} == produced - documented("Training")


def test_every_key_of_a_member_is_documented(tmp_path):
    spec = {
        "data": {"name": "digits", "limit_train": 60, "limit_test": 20},
        "model": {"name": "mlp", "hidden": [4], "dropout": 0.1},
        "method": {"name": "dropout", "passes": 2},
        "training": {"epochs": 1},
        "engine": {"name": "sequential"},
    }
    members = ek.train(spec, tmp_path / "run", progress=False).members
    assert set(members[0]) | {"mse"} == documented("Members")


def test_the_metrics_of_labels_and_of_distributions_exist():
    labels = ek.evaluate(torch.randn(2, 9, 3), torch.randint(2, (9, 3)), "bce")
    assert documented("Labels") - {"mean_member_accuracy"} <= set(labels)
    distributions = {
        name
        for loss, size in (("gaussian_nll", 2), ("quantile", 3))
        for name in ek.evaluate(torch.randn(2, 9, size), torch.randn(9, 1), loss)
    }
    assert documented("Distributions") <= distributions
