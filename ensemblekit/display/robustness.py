"""Tables of an evaluation beyond the test data: other data, corrupted images; and what to do next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ensemblekit.display.console import Printer
from ensemblekit.display.numbers import number, quality_text

_SCORES = {
    "max_probability": "1 - max probability",
    "entropy": "entropy",
    "mutual_information": "mutual information",
    "variance": "variance",
}
_ONE = re.compile(r"corrupt_([a-z0-9]+)_(\w+)_([1-5])")
"""A metric of one corruption and severity."""
_TITLES = {"nll": "NLL", "ece": "ECE", "rmse": "RMSE", "mae": "MAE"}


def print_ood(printer: Printer, metrics: Mapping[str, Any], evaluated: str, other: str) -> None:
    """Print how well each score tells other data from the test data.

    Args:
        printer: where to print.
        metrics: with the metrics of out-of-distribution detection.
        evaluated: describes the test data; empty if unknown.
        other: what the user called the other data.
    """
    count = f"{int(metrics['ood_samples']):,} sample{'s' * (metrics['ood_samples'] != 1)} of {other}"
    printer.text(f"{count}, told from {evaluated or 'the test data'}")
    printer.text()
    found = {name: label for name, label in _SCORES.items() if f"ood_auroc_{name}" in metrics}
    rows = [
        (label, *(number(metrics[f"ood_{measure}_{name}"]) for measure in ("auroc", "aupr", "fpr95")))
        for name, label in found.items()
    ]
    printer.table(("score", "AUROC", "AUPR", "FPR at 95 % TPR"), rows)
    best = max(found, key=lambda name: float(metrics[f"ood_auroc_{name}"]))
    printer.text()
    printer.text(f"best score: {found[best]}; an AUROC of 0.5 is chance, 1 is perfect")


def print_corruptions(printer: Printer, metrics: Mapping[str, Any], evaluated: str) -> None:
    """Print a table for each metric: corruptions by severity, with means; `evaluated` describes the data."""
    printer.text(f"{evaluated or 'test samples'}, corrupted")
    cells = [match.groups() for name in metrics if (match := _ONE.fullmatch(name)) and match[2] != "severity"]
    names = list(dict.fromkeys(name for _, name, _ in cells))
    severities = list(dict.fromkeys(severity for _, _, severity in cells))
    for measure in dict.fromkeys(measure for measure, _, _ in cells):
        clean = quality_text(metrics.get(f"test_{measure}"), measure)
        printer.text()
        printer.text(f"{_TITLES.get(measure, measure)} by severity; not corrupted: {clean}")
        printer.table(("corruption", *severities, "mean"), _rows(metrics, measure, names, severities))


def _rows(metrics: Mapping[str, Any], measure: str, names: Sequence[str], severities: Sequence[str]) -> list[list[str]]:
    keys = [[f"corrupt_{measure}_{name}_{severity}" for severity in severities] for name in names]
    rows = [[name.replace("_", " "), *own, f"corrupt_{measure}_{name}"] for name, own in zip(names, keys, strict=True)]
    means = [f"corrupt_{measure}_severity_{severity}" for severity in severities]
    rows.append(["mean", *means, f"corrupt_{measure}"])
    return [[label, *(quality_text(metrics[key], measure) for key in own)] for label, *own in rows]


def print_next_steps(printer: Printer, run: Path, metrics: Mapping[str, Any]) -> None:
    """Print the commands that an evaluation suggests: with the share that can be answered at a risk of 5 %."""
    path = shlex.quote(str(run))
    steps = [(f"ensemblekit evaluate {path} --ood DATA", "does the uncertainty notice other data?")]
    if "test_accuracy" in metrics:
        steps.append((f"ensemblekit evaluate {path} --corrupt", "the same under noise, blur and JPEG, for images"))
        coverage = metrics.get("test_coverage_at_5_risk")
        purpose = "answer only where it is sure"
        if coverage is not None and float(coverage) < 1:
            purpose += f"; {100 * float(coverage):.0f} % can be answered with at most 5 % errors"
        steps.append((f"ensemblekit predict {path} FILES… --abstain-above 0.2", purpose))
    width = max(len(command) for command, _ in steps)
    printer.text()
    printer.text("next:")
    for command, purpose in steps:
        printer.verbatim(f"  {command.ljust(width)}  # {purpose}")
