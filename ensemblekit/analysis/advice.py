"""Advice in words: what the numbers of runs say, each sentence with its rule, its figures and its source.

A rule speaks only where its 95 % interval supports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ensemblekit.analysis.bootstrap import Interval, mean_interval
from ensemblekit.analysis.groups import flatten
from ensemblekit.analysis.measures import MEASURES, Quantities, recorded_measures, sample_quantities
from ensemblekit.analysis.member_numbers import SmallerEnsemble, smallest_equal_ensemble
from ensemblekit.analysis.table_formats import value_text
from ensemblekit.core.errors import UsageError
from ensemblekit.core.losses import Loss
from ensemblekit.core.tasks import task_of

if TYPE_CHECKING:
    from ensemblekit.analysis.comparison import Comparison
    from ensemblekit.inference.combining import Combiner
    from ensemblekit.runs.outputs import KeptOutputs
    from ensemblekit.runs.run import Run

UNDERFIT_SHARE = 0.2
"""Share of the loss of a uniform guess from which on members under-fit."""
COLLUSION_FACTOR = 1.5
"""How many times the validation diversity the training diversity has to be."""
OVERCONFIDENCE = 0.01
"""Least excess of the confidence over the accuracy that is worth a sentence."""
BUSCHJAEGER = "Buschjäger et al. 2020, Generalized Negative Correlation Learning for Deep Ensembling"
JEFFARES = "Jeffares et al. 2023, Joint Training of Deep Ensembles Fails Due to Learner Collusion"
GUO = "Guo et al. 2017, On Calibration of Modern Neural Networks"


@dataclass(frozen=True)
class Advice:
    """One sentence of advice and what it rests on."""

    text: str
    rule: str
    """When the sentence is said."""
    figures: Mapping[str, float]
    """The numbers that it rests on, by name."""
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """What the rules know about a run."""

    path: str
    spec: Mapping[str, Any]
    """The plain values of its spec by dotted path."""
    quantities: Quantities
    """Of each test sample."""
    guess_loss: float
    """The loss of a guess that does not look at the input: all classes alike, or the mean of real targets."""
    recorded: Mapping[str, float] = field(default_factory=dict)
    """Training loss, training diversity …"""
    validation_diversity: Tensor | None = None
    """The diversity of each validation sample; None without validation data, or if the loss has no diversity."""
    smaller: SmallerEnsemble | None = None
    """The smallest ensemble that is as good; None if all members are needed, or if it is not known."""

    @classmethod
    def of(cls, run: Run) -> Evidence:
        """Collect the evidence of a finished run from its kept outputs."""
        kept, combiner = run.outputs("test"), run.combiner()
        validation = None
        with suppress(UsageError):  # without validation data
            validation = run.outputs("validation")
        return cls(
            str(run.path),
            flatten(run.spec.to_dict()),
            sample_quantities(kept, combiner),
            _guess_loss(kept, combiner),
            recorded_measures(run),
            None if validation is None else sample_quantities(validation, combiner).get("diversity"),
            smallest_equal_ensemble(kept, combiner),
        )


Rule = Callable[[Evidence], Advice | None]


def advice(runs: Run | Sequence[Run]) -> list[Advice]:
    """Return what the numbers of a run say; of several runs, what those of more than half of them say.

    Args:
        runs: a finished run, or several that differ by their seed.

    Raises:
        RunError: a run has not finished, or its files are damaged.
    """
    listed = list(runs) if isinstance(runs, Sequence) else [runs]
    return advice_of([Evidence.of(run) for run in listed])


def advice_of(evidence: Sequence[Evidence]) -> list[Advice]:
    """Apply every rule to the evidence of one or several runs."""
    found = []
    for rule in RULES:
        given = [advice for own in evidence if (advice := rule(own)) is not None]
        if 2 * len(given) > len(evidence):
            runs = {} if len(evidence) == 1 else {"runs_with_this_advice": len(given), "runs": len(evidence)}
            found.append(replace(given[0], figures={**given[0].figures, **runs}))
    return found


def underfitting(evidence: Evidence) -> Advice | None:
    """Members under-fit: the training loss is far from zero."""
    train_loss, guess = evidence.recorded.get("train_loss"), evidence.guess_loss
    if train_loss is None or guess <= 0:
        return None
    interval = mean_interval(evidence.quantities["loss"])
    if min(train_loss, interval.low) < UNDERFIT_SHARE * guess:
        return None
    remedy, source = _against_underfitting(evidence.spec)
    return Advice(
        f"The members under-fit: the training loss of {train_loss:.3g} is {100 * train_loss / guess:.0f} % of that of "
        f"a guess ({guess:.3g}). {remedy}",
        f"training loss and the interval of the test loss above {100 * UNDERFIT_SHARE:.0f} % of the loss of a guess",
        {"train_loss": train_loss, "guess_loss": guess, **_ends("test_loss", interval)},
        source,
    )


def _against_underfitting(spec: Mapping[str, Any]) -> tuple[str, str]:
    weight = spec.get("method.lambda")
    if spec.get("ensemble.members") == 1 or not isinstance(weight, int | float) or weight >= 1:
        return "Train longer, or use larger members.", BUSCHJAEGER
    return (
        f"A larger λ than {weight:g}, up to end-to-end training (λ = 1), may help; so may larger members.",
        BUSCHJAEGER,
    )


def collusion(evidence: Evidence) -> Advice | None:
    """Members collude: they differ much more on training data than on validation data."""
    train, validation = evidence.recorded.get("train_diversity"), evidence.validation_diversity
    if train is None or validation is None or len(validation) < 2:
        return None
    interval = mean_interval(validation)
    if train <= COLLUSION_FACTOR * max(interval.high, 0.0):
        return None
    weight = evidence.spec.get("method.lambda")
    lower = f" than {weight:g}" if isinstance(weight, int | float) and weight > 0 else ""
    return Advice(
        f"The members collude: their diversity is {train:.3g} on training data, but {interval.low:.3g} to "
        f"{interval.high:.3g} on validation data, so it does not generalise. Try a lower λ{lower}, or train the "
        "members independently.",
        f"training diversity above {COLLUSION_FACTOR:g} times the upper end of the interval of validation diversity",
        {"train_diversity": train, **_ends("validation_diversity", interval)},
        JEFFARES,
    )


def superfluous_members(evidence: Evidence) -> Advice | None:
    """The last members changed nothing beyond noise."""
    smaller = evidence.smaller
    if smaller is None:
        return None
    last = smaller.num_members - smaller.size
    gains = " and ".join(f"the {name} by at most {text}" for name, text in smaller.gain_texts)
    return Advice(
        f"{smaller.size} of {smaller.num_members} members suffice: the last {last} improve {gains} (95 % interval, "
        "over random choices of members).",
        smaller.rule,
        {"members": smaller.num_members, "sufficient_members": smaller.size, **smaller.figures},
        "paired bootstrap on the kept outputs of this run",
    )


def overconfidence(evidence: Evidence) -> Advice | None:
    """Probabilities are higher than the share of correct predictions."""
    if "confidence" not in evidence.quantities:
        return None
    confidence, correct = evidence.quantities["confidence"], evidence.quantities["correct"]
    interval = mean_interval(confidence - correct)
    if interval.low < OVERCONFIDENCE:
        return None
    statistic = MEASURES["ece"].statistic
    assert statistic is not None
    ece, accuracy, mean = statistic(evidence.quantities).value(), float(correct.mean()), float(confidence.mean())
    return Advice(
        f"The ensemble is over-confident: its mean confidence of {100 * mean:.1f} % is above its accuracy of "
        f"{100 * accuracy:.1f} % by {100 * interval.low:.1f} to {100 * interval.high:.1f} points (ECE {ece:.3f}). "
        f"{_calibration(evidence.path)}",
        f"the interval of confidence minus accuracy is above {100 * OVERCONFIDENCE:g} point",
        {"confidence": mean, "accuracy": accuracy, "ece": ece, **_ends("confidence_minus_accuracy", interval)},
        GUO,
    )


RULES: tuple[Rule, ...] = (underfitting, collusion, superfluous_members, overconfidence)


def best_group_advice(comparison: Comparison) -> list[Advice]:
    """Name the best group of a comparison, if it is better than every other beyond noise."""
    name = comparison.primary
    best, measure = comparison.best, MEASURES[name]
    if best.cells[name].mark != "best":
        return []
    others = [group for group in comparison.groups if group is not best]
    second = min(others, key=lambda group: abs(group.cells[name].difference))
    cell = second.cells[name]
    assert cell.interval is not None
    low, high = sorted(abs(end) for end in (cell.interval.low, cell.interval.high))
    unit = " points" if measure.unit == "%" else ""
    numbers = [value_text(number, measure, high) for number in (abs(cell.difference), low, high)]
    text = (
        f"{best.label} is the best of {len(comparison.groups)}: its {measure.title} is {numbers[0]}{unit} "
        f"[{numbers[1]}, {numbers[2]}] better than that of {second.label}, the next."
    )
    rule = f"the interval of the difference in {measure.title} from every other group does not contain 0"
    figures = {"difference": abs(cell.difference), "difference_low": low, "difference_high": high}
    return [Advice(text, rule, figures, f"paired bootstrap over {comparison.num_samples} test samples")]


def _calibration(path: str) -> str:
    import ensemblekit

    if "calibrate" in ensemblekit.__all__:
        return f"Calibrate it: ensemblekit calibrate {path}"
    return "Calibrate it, for example by temperature scaling on validation data."


def _ends(name: str, interval: Interval) -> dict[str, float]:
    return {f"{name}_low": interval.low, f"{name}_high": interval.high}


def _guess_loss(kept: KeptOutputs, combiner: Combiner) -> float:
    """Return the loss of an output that does not depend on the input."""
    loss: Loss = combiner.loss
    targets, num_outputs = combiner.learned_targets(kept.targets), kept.outputs.shape[-1]
    guess = task_of(loss, kept.outputs, targets).constant_outputs(targets, num_outputs, loss)
    return _least_constant_loss(loss, targets, num_outputs) if guess is None else float(loss(guess, targets).mean())


def _least_constant_loss(loss: Loss, targets: Tensor, num_outputs: int) -> float:
    """Return the least loss of outputs that are equal for all samples, where they are not values of the targets."""
    targets = targets.double()
    guess = targets.new_zeros(num_outputs).requires_grad_()
    optimizer = torch.optim.LBFGS([guess], max_iter=200, line_search_fn="strong_wolfe")

    def value() -> Tensor:
        return loss(guess.expand(len(targets), num_outputs), targets).mean()

    def closure() -> Tensor:
        (guess.grad,) = torch.autograd.grad(value(), guess)
        return value().detach()

    with torch.enable_grad():
        optimizer.step(closure)
    return float(value().detach())
