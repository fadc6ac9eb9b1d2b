"""Judges the findings of the GNCL paper by the rules of README.md, from finished sweeps of the specs in this folder.

``python specs/reproduction/findings.py sweeps/fashion_mnist`` prints a table of verdicts and a table of all methods, as
Markdown; for a sweep of ``exact_gncl.toml`` a table of its modes instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch
from torch import Tensor

import ensemblekit as ek
from ensemblekit.analysis.bootstrap import RESAMPLES, Interval, centred_interval, resampled_shares
from ensemblekit.analysis.measures import sample_measures
from ensemblekit.analysis.seed_noise import FEW, PooledVariance, student_t
from ensemblekit.analysis.sweep_rows import SweepRun

CAPACITIES = ("low", "middle", "large")
"""In the order of the base models in the specs."""
LAMBDAS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
LARGE_LAMBDAS, SMALL_LAMBDAS = (0.8, 0.9, 1.0), (0.0, 0.2, 0.4)
OTHERS = ("bagging", "smcl", "boosting", "snapshot")
"""The methods that the paper compares with GNCL."""
COLUMNS = {"accuracy": "correct", "diversity": "diversity", "mean_member_accuracy": "member_correct"}
"""Measures of the test data, and the quantities of samples that they are means of."""
TITLES = ["capacity", "method", "accuracy", "mean member", "training loss", "NLL", "ECE", "training diversity"]
TITLES += ["test diversity", "remainder", "its bound", "seconds", "points per second"]
TITLES_OF_EQUAL_STEPS = [
    "capacity",
    "one network",
    "ensemble (λ\\*)",
    "difference in points",
    "seconds",
    "of the ensemble",
]
TITLES_OF_MODES = ["mode", "λ", "diverged", "objective", "training diversity", "test diversity", "accuracy"]
FOLLOWS = -0.5
"""Finding 6: a rank correlation below this counts as following."""

Key = tuple[str, str]
"""A group of runs: the capacity of its base model, and the name of its method, with λ for GNCL."""


@dataclass(frozen=True)
class Estimate:
    """A difference with its 95 % interval."""

    value: float
    interval: Interval

    @property
    def sign(self) -> int:
        """1 or -1 if the interval excludes 0, else 0."""
        return 0 if self.interval.contains_zero else 1 if self.value > 0 else -1

    def text(self, scale: float = 1.0, digits: int = 2) -> str:
        """Write it with some decimals after multiplication by a scale."""
        low, high = scale * self.interval.low, scale * self.interval.high
        return f"{scale * self.value:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


class Results:
    """The runs of a sweep by group, with resampled test sets."""

    def __init__(self, path: Path) -> None:
        runs = ek.open_sweep(path).runs
        if unfinished := [run.name for run in runs if run.status != "finished"]:
            sys.exit(
                f"error: {len(unfinished)} runs have not finished, such as {unfinished[0]}; {path}; continue the sweep"
            )
        models = list(dict.fromkeys(str(run.overrides["model"]) for run in runs))
        self.groups: dict[Key, list[SweepRun]] = {}
        for run in sorted(runs, key=lambda run: run.seed):
            self.groups.setdefault((CAPACITIES[models.index(str(run.overrides["model"]))], _method(run)), []).append(
                run
            )
        self.samples = {run.name: _samples(run) for run in runs}
        self.draws = {name: torch.zeros(0) for name in COLUMNS}
        self.order = {run.name: index for index, run in enumerate(runs)}
        stacked = torch.stack([self.samples[run.name] for run in runs])  # (runs, measures, N)
        for index, name in enumerate(COLUMNS):
            shares = resampled_shares(stacked.shape[-1])
            self.draws[name] = torch.cat([(share @ stacked[:, index].T).double() for share in shares])

    def values(self, key: Key, measure: str) -> Tensor:
        """Return a measure of each run of a group (S,)."""
        names = [measure if measure.startswith(("train_", "validation_")) else f"test_{measure}"]
        return torch.tensor([run.metrics[names[0]] for run in self.groups[key]], dtype=torch.float64)

    def mean(self, key: Key, measure: str) -> float:
        """Return the mean of a measure over the seeds."""
        return float(self.values(key, measure).mean())

    def resampled(self, key: Key, measure: str) -> Tensor:
        """Return a measure of each run of a group on resampled test sets (R, S)."""
        return self.draws[measure][:, [self.order[run.name] for run in self.groups[key]]]

    def contrast(self, weights: Mapping[Key, float], measure: str) -> Estimate:
        """Compute a weighted sum of groups' means, with its interval over test samples and seeds."""
        by_seed = torch.stack([weight * self.values(key, measure) for key, weight in weights.items()]).sum(dim=0)
        estimate, count = float(by_seed.mean()), len(by_seed)
        noise = torch.zeros(RESAMPLES, dtype=torch.float64)
        if measure in COLUMNS:
            draws = torch.stack([weight * self.resampled(key, measure) for key, weight in weights.items()])
            noise = draws.sum(dim=0).mean(dim=1)
        if count < FEW:  # two seeds say too little of their own variance
            capacities = {key[0] for key in weights}
            groups = [self.values(key, measure).tolist() for key in self.groups if key[0] in capacities]
            pooled = PooledVariance.of(groups, same_seeds=True)
            factor = sum(weight**2 for weight in weights.values()) / count
            deviation, freedom = (pooled.variance * factor) ** 0.5, pooled.freedom
        else:
            deviation, freedom = float(by_seed.std()) / count**0.5, count - 1
        return Estimate(estimate, centred_interval(estimate, noise + deviation * student_t(freedom)))

    def best_lambda(self, capacity: str) -> float:
        """Return the value of λ with the highest accuracy on validation data."""
        return max(LAMBDAS, key=lambda value: self.mean(gncl(capacity, value), "validation_accuracy"))


def _method(run: SweepRun) -> str:
    return f"gncl {run.overrides['method.lambda']:g}" if run.variant == "gncl" else run.variant


def _samples(run: SweepRun) -> Tensor:
    """Return the quantities of each test sample (measures, N)."""
    found = sample_measures(ek.open_run(run.path))
    alone = torch.zeros_like(found["correct"])  # a single network has no diversity
    rows = (found.get(name, alone) for name in COLUMNS.values())
    return torch.stack([row.mean(dim=1) if row.ndim == 2 else row for row in rows])


def gncl(capacity: str, value: float) -> Key:
    """Return the group of GNCL with a value of λ."""
    return capacity, f"gncl {value:g}"


def average(keys: Sequence[Key], sign: float = 1.0) -> dict[Key, float]:
    """Return the weights of the mean of groups, times a sign."""
    return {key: sign / len(keys) for key in keys}


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Compute Spearman's correlation along the last dimension, for values without ties."""
    ranks = [values.argsort(dim=-1).argsort(dim=-1).double() for values in (first, second)]
    first, second = (rank - rank.mean(dim=-1, keepdim=True) for rank in ranks)
    return (first * second).sum(dim=-1) / (first.square().sum(dim=-1) * second.square().sum(dim=-1)).sqrt()


Judged = tuple[str, str, str]
"""The number of a finding, what was measured, and the verdict."""


def verdict(holds: Iterable[bool], opposite: Iterable[bool]) -> str:
    """Return the verdict of a rule: whether it holds in each case, and whether the opposite is shown in each."""
    return "reproduced" if all(holds) else "not reproduced" if any(opposite) else "undecided"


def large_lambda_wins(results: Results) -> Judged:
    """Finding 1."""
    winners = average([gncl("low", 0.9), gncl("low", 1.0)])
    rival = max((("low", name) for name in OTHERS), key=lambda key: results.mean(key, "accuracy"))
    first = results.contrast(winners | {gncl("low", 0.0): -1.0}, "accuracy")
    second = results.contrast(winners | {rival: -1.0}, "accuracy")
    text = f"{first.text(100)} points against λ = 0; {second.text(100)} against {rival[1]}, the best of the others"
    signs = (first.sign, second.sign)
    return "1", text, verdict([sign > 0 for sign in signs], [sign < 0 for sign in signs])


def best_lambda_shrinks(results: Results) -> Judged:
    """Finding 2."""

    def gain(capacity: str, sign: float) -> dict[Key, float]:
        return average([gncl(capacity, value) for value in LARGE_LAMBDAS], sign) | average(
            [gncl(capacity, value) for value in SMALL_LAMBDAS], -sign
        )

    gains = [f"{results.contrast(gain(name, 1.0), 'accuracy').text(100)} ({name})" for name in CAPACITIES]
    difference = results.contrast(gain("low", 1.0) | gain("large", -1.0), "accuracy")
    best = [results.best_lambda(capacity) for capacity in CAPACITIES]
    shrinks = best[0] >= best[1] >= best[2] and best[0] > best[2]
    text = (
        f"T = {', '.join(gains)} points; D = {difference.text(100)}; λ\\* = {', '.join(f'{value:g}' for value in best)}"
    )
    return "2", text, verdict([difference.sign > 0, shrinks], [difference.sign < 0])


def grows_with_lambda(results: Results, number: str, measure: str, direction: int, scale: float) -> Judged:
    """Findings 3a and 3b."""
    texts, holds, opposite = [], [], []
    for capacity in CAPACITIES:
        difference = results.contrast({gncl(capacity, 1.0): 1.0, gncl(capacity, 0.0): -1.0}, measure)
        means = torch.tensor([results.mean(gncl(capacity, value), measure) for value in LAMBDAS])
        correlation = float(rank_correlation(torch.tensor(LAMBDAS), means))
        texts.append(f"{capacity}: {difference.text(scale)}, correlation {correlation:+.2f}")
        holds.append(difference.sign == direction and direction * correlation >= 0.9)
        opposite.append(difference.sign == -direction)
    return number, "; ".join(texts), verdict(holds, opposite)


def end_to_end_has_the_smallest_loss(results: Results) -> Judged:
    """Finding 4a."""
    texts, signs = [], []
    for capacity in CAPACITIES[1:]:
        rivals = [gncl(capacity, value) for value in LAMBDAS[:-1]]
        rival = min(rivals, key=lambda key: results.mean(key, "train_loss"))
        difference = results.contrast({gncl(capacity, 1.0): 1.0, rival: -1.0}, "train_loss")
        texts.append(f"{capacity}: {difference.text(digits=4)} against {rival[1]}")
        signs.append(difference.sign)
    return "4a", "; ".join(texts), verdict([sign < 0 for sign in signs], [sign > 0 for sign in signs])


def end_to_end_is_not_the_best(results: Results) -> Judged:
    """Finding 4b."""
    texts, holds, opposite = [], [], []
    for capacity in CAPACITIES[1:]:
        best = results.best_lambda(capacity)
        if best == 1:
            texts.append(f"{capacity}: λ\\* = 1")
            difference = None
        else:
            weights = {gncl(capacity, best): 1.0, gncl(capacity, 1.0): -1.0}
            difference = results.contrast(weights, "accuracy")
            texts.append(f"{capacity}: {difference.text(100)} points with λ\\* = {best:g}")
        holds.append(difference is not None and difference.sign > 0)
        opposite.append(difference is None or difference.sign < 0)
    return "4b", "; ".join(texts), verdict(holds, opposite)


def smcl_is_diverse_and_weak(results: Results) -> Judged:
    """Finding 5."""
    texts, holds, opposite = [], [], []
    for capacity in CAPACITIES:
        weights = {(capacity, "smcl"): 1.0, gncl(capacity, 0.0): -1.0}
        diversity, accuracy = (results.contrast(weights, measure) for measure in ("diversity", "accuracy"))
        texts.append(f"{capacity}: diversity {diversity.text()}, accuracy {accuracy.text(100)} points")
        holds.append(diversity.sign > 0 and accuracy.sign < 0)
        opposite.append(diversity.sign < 0 or accuracy.sign > 0)
    return "5", "; ".join(texts), verdict(holds, opposite)


def accuracy_follows_training_loss(results: Results) -> Judged:
    """Finding 6."""
    keys = [gncl("low", value) for value in LAMBDAS] + [("low", name) for name in ("bagging", "smcl", "boosting")]
    losses = torch.stack([results.values(key, "train_loss") for key in keys], dim=1)  # (S, groups)
    accuracies = torch.stack([results.resampled(key, "accuracy") for key in keys], dim=2)  # (R, S, groups)
    count = len(losses)
    seeds = torch.randint(count, (RESAMPLES, count), generator=ek.generator(0, "seeds of finding 6"))
    rows = torch.arange(RESAMPLES).unsqueeze(1)
    resampled = rank_correlation(losses[seeds].mean(dim=1), accuracies[rows, seeds].mean(dim=1))
    accuracy = torch.tensor([results.mean(key, "accuracy") for key in keys])
    value = float(rank_correlation(losses.mean(dim=0), accuracy))
    low, high = (float(end) for end in torch.quantile(resampled, torch.tensor([0.025, 0.975], dtype=torch.float64)))
    text = f"correlation {value:+.2f} [{low:+.2f}, {high:+.2f}] over {len(keys)} ensembles"
    return "6", text, verdict([high < FOLLOWS], [low > FOLLOWS])


def judged_findings(results: Results) -> Iterator[Judged]:
    """Judge all findings."""
    yield large_lambda_wins(results)
    yield best_lambda_shrinks(results)
    yield grows_with_lambda(results, "3a", "diversity", 1, 1.0)
    yield grows_with_lambda(results, "3b", "mean_member_accuracy", -1, 100.0)
    yield end_to_end_has_the_smallest_loss(results)
    yield end_to_end_is_not_the_best(results)
    yield smcl_is_diverse_and_weak(results)
    yield accuracy_follows_training_loss(results)


def training_seconds(runs: Sequence[SweepRun]) -> float:
    """Return the training time of a run: the median over all epochs of a group's runs, times the epochs.

    The median, because a sweep may have been paused or slowed down in some epochs.
    """
    history = [row["seconds"] for run in runs for row in ek.open_run(run.path).history]
    return median(history) * runs[0].epochs


def rows_of_methods(results: Results) -> Iterator[list[str]]:
    """Make a row for each base model and method: what the paper does not have."""
    for capacity in CAPACITIES:
        for key in (key for key in results.groups if key[0] == capacity):
            accuracy, seconds = 100 * results.mean(key, "accuracy"), training_seconds(results.groups[key])
            row = [capacity, key[1], f"{accuracy:.1f}", f"{100 * results.mean(key, 'mean_member_accuracy'):.1f}"]
            row += [f"{results.mean(key, name):.3f}" for name in ("train_loss", "nll", "ece")]
            known = results.groups[key][0].metrics
            for name in ("train_diversity", "test_diversity", "test_remainder", "test_remainder_bound"):
                row.append(f"{mean(run.metrics[name] for run in results.groups[key]):.3g}" if name in known else "–")
            yield [*row, f"{seconds:.1f}", f"{accuracy / seconds:.1f}"]


def rows_of_equal_steps(results: Results) -> Iterator[list[str]]:
    """Make a row for each base model and each method that trains one network for as many steps as an ensemble."""
    for capacity in CAPACITIES:
        best = gncl(capacity, results.best_lambda(capacity))
        for name in ("snapshot-long", "single-long"):
            if (key := (capacity, name)) in results.groups:
                difference = results.contrast({key: 1.0, best: -1.0}, "accuracy")
                seconds = [f"{training_seconds(results.groups[own]):.1f}" for own in (key, best)]
                yield [capacity, name, best[1], difference.text(100), *seconds]


def rows_of_modes(path: Path) -> Iterator[list[str]]:
    """Make a row for each mode and λ of GNCL: how many runs diverged, and what the others reached."""
    groups: dict[tuple[str, float], list[SweepRun]] = {}
    for run in ek.open_sweep(path).runs:
        groups.setdefault((run.overrides["method.mode"], run.overrides["method.lambda"]), []).append(run)
    for (mode, value), runs in groups.items():
        finished = [run for run in runs if run.status == "finished"]
        diverged = len(runs) - len(finished) + sum(run.metrics["train_objective"] < 0 for run in finished)
        row = [mode, f"{value:g}", f"{diverged} of {len(runs)}"]
        for name, scale in (
            ("train_objective", 1),
            ("train_diversity", 1),
            ("test_diversity", 1),
            ("test_accuracy", 100),
        ):
            row.append(f"{scale * mean(run.metrics[name] for run in finished):.4g}" if finished else "–")
        yield row


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as Markdown."""
    for row in (titles, ["---"] * len(titles), *rows):
        print(f"| {' | '.join(row)} |")
    print()


def main() -> None:
    """Print the tables of a sweep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, help="directory of a finished sweep")
    path = parser.parse_args().sweep
    if "method.mode" in ek.open_sweep(path).runs[0].overrides:
        print_table(TITLES_OF_MODES, rows_of_modes(path))
        return
    results = Results(path)
    print_table(("finding", "measured", "verdict"), judged_findings(results))
    print_table(TITLES_OF_EQUAL_STEPS, rows_of_equal_steps(results))
    print_table(TITLES, rows_of_methods(results))


if __name__ == "__main__":
    main()
