"""Anytime prediction: members are asked in the order of their value, and no longer than a sample needs.

After k of M members the combined output of those k has a gap between its two most probable classes. The members that
are left change the answer only if, on average, they contradict it (M - k) / k times as strongly as it stands. So
gap · k / (M - k) says how sure an answer is. For means of probabilities and for votes no member can contradict by more
than 1, so that an answer that is surer than 1 is final. For other combinations there is no such bound, and the limit is
fitted to validation data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ensemblekit.core.errors import EnsemblekitError, UsageError
from ensemblekit.core.objective import Objective
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.inference.answers import Answer, answers_of
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.outputs import Place, check_finite
from ensemblekit.inference.selection import greedy
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.outputs import KeptOutputs

if TYPE_CHECKING:
    from ensemblekit.inference.ensemble import Ensemble

ROUNDING = 1e-5
"""Times M, what an exact answer is surer than 1: more than rounding and the tie-break of votes, less than a vote."""
MAX_GREEDY = 32
"""Members up to which their order is found greedily; more are sorted by their own loss."""


@dataclass(frozen=True)
class AnytimePrediction:
    """The answers for a batch, and how many members were asked for each."""

    combined: Tensor
    """The combined output (B, C) of the members that were asked."""
    probabilities: Tensor
    """The class probabilities (B, K) that it means."""
    asked: Tensor
    """The number of members that were asked for each sample, int64 (B,)."""
    outputs: Tensor
    """The members' outputs (M, B, C) in the order in which they were asked; nan where they were not."""

    @property
    def share_saved(self) -> float:
        """The share of the passes of samples through members that was saved."""
        return 1 - float(self.asked.double().mean()) / len(self.outputs)


@dataclass(frozen=True)
class Anytime:
    """Predicts with as few members as the answer needs.

    Answers are final in exact mode: the predicted class is that of all members, up to rounding where two classes are
    equally probable. With a risk, at most that share of the answers is expected to differ, for data like the validation
    data (conformal risk control, Angelopoulos et al. 2024).
    """

    ensemble: Ensemble
    order: tuple[int, ...]
    """Indices of the members, the most valuable first."""
    limit: float
    """An answer that is surer is final."""
    risk: float | None
    """None: exact."""

    @classmethod
    def of(cls, ensemble: Ensemble, risk: float | None = None) -> Anytime:
        """Find the order of the members and the limit, from the validation outputs that the ensemble's run has kept.

        Args:
            ensemble: a classifier. Without kept validation outputs its members are asked in their own order.
            risk: the share of answers that may differ from those of all members; None: none.

        Raises:
            UsageError: there is no bound for the ensemble's combination, or too few validation samples for the risk.
        """
        combiner = ensemble.combiner
        _check_ensemble(ensemble)
        kept = _validation_outputs(ensemble)
        order = _order(combiner, kept) if kept is not None else tuple(range(combiner.num_members))
        limit = 1 + ROUNDING * len(order)
        if risk is not None:
            limit = _fitted_limit(combiner, kept, order, risk)
        elif not is_bounded(combiner.objective):
            what = "outputs have no bound, so that the last member could always change the answer"
            fix = 'state a risk, for example 0.005, or use [ensemble] combiner = "probabilities" or "vote"'
            raise UsageError(what, "stop when sure", fix)
        return cls(ensemble, order, limit, risk)

    @torch.no_grad()
    def __call__(self, inputs: Any, place: Place = lambda index: f"input {index}") -> AnytimePrediction:
        """Predict a batch (B, *input_shape); only samples without a final answer are computed by the next member.

        Args:
            inputs: as for `Ensemble.member_outputs`.
            place: names a sample by its index, for errors.

        Raises:
            DataError: the inputs have another shape, or are not numbers.
            NumericError: an output is not finite.
        """
        ensemble, combiner = self.ensemble, self.ensemble.combiner
        inputs = ensemble.as_inputs(inputs, ensemble.device)
        open_samples = torch.arange(len(inputs), device=inputs.device)
        asked = torch.full_like(open_samples, len(self.order))
        outputs = combined = inputs.new_empty(0)
        for count, member in enumerate(self.order, start=1):
            if not len(open_samples) and count > 1:
                break
            own = ensemble.network_outputs(inputs[open_samples], networks=[member])
            check_finite(own, lambda index, samples=open_samples: place(int(samples[index])))  # type: ignore[misc]
            own = combiner.objective.predictions(own)[0]
            if count == 1:
                outputs = own.new_full((len(self.order), len(inputs), own.shape[-1]), math.nan)
                combined = own.new_empty(own.shape)
            outputs[count - 1, open_samples] = own
            so_far = _combine(combiner, outputs[:count, open_samples], self.order)
            final = _sureness(combiner, so_far, count, len(self.order)) > self.limit
            combined[open_samples] = so_far
            asked[open_samples[final]] = count
            open_samples = open_samples[~final]
        return AnytimePrediction(combined, ensemble.loss.probabilities(combined), asked, outputs)

    def answers(self, inputs: Any, place: Place, probabilities: bool = False) -> list[Answer]:
        """Answer a batch as `answers` does, with the number of `members_asked`; their agreement is that of these."""
        found = self(inputs, place)
        records: list[Answer] = [{} for _ in range(len(found.asked))]
        for count in found.asked.unique().tolist():
            samples = (found.asked == count).nonzero().flatten()
            outputs, combined = found.outputs[:count, samples].cpu(), found.combined[samples].cpu()
            for sample, answer in zip(
                samples.tolist(), answers_of(self.ensemble, outputs, combined, probabilities), strict=True
            ):
                records[sample] = {**answer, "members_asked": count}
        return records


def is_bounded(objective: Objective) -> bool:
    """Whether each member contributes at most 1 to a class: the combination averages probabilities or votes."""
    averages = objective.averages
    return averages in ("probabilities", "votes") or (averages == "outputs" and objective.loss.takes == "probabilities")


def _check_ensemble(ensemble: Ensemble) -> None:
    """Raise a `UsageError` if members cannot be asked one by one."""
    objective, where = ensemble.combiner.objective, "stop when sure"
    if ensemble.info.task != "classification":
        raise UsageError("values are never sure: this is for classes", where, "predict without it")
    if ensemble.calibration is not None:
        what = "the run is calibrated, and the calibration is for the outputs of all members"
        raise UsageError(what, where, "predict without it, or remove the calibration: ensemblekit calibrate RUN --undo")
    if ensemble.combiner.needs_all_members or objective.predictor is not None:
        raise UsageError("the combination is only defined for all members", where, 'use [ensemble] combiner = "mean"')
    plugins = [objective.combiner] if objective.combiner is not None else list(objective.methods)
    hooks = [implemented_hooks(type(plugin)).get("combine") for plugin in plugins]
    if any(hook is not None and "members" in signature(hook).parameters for hook in hooks):
        raise UsageError("the combination treats each member by its index", where, 'use [ensemble] combiner = "mean"')
    if any(plan.members > 1 for plan in ensemble.plans) or ensemble.is_stochastic:
        what = "one network computes several members, so that to ask fewer saves nothing"
        raise UsageError(what, where, "predict without it")


def _validation_outputs(ensemble: Ensemble) -> KeptOutputs | None:
    """Return the validation outputs that the ensemble's run has kept; None if they are not there any more."""
    if ensemble.source is None:
        return None
    try:
        kept = RunDirectory.open(ensemble.source).read_outputs() or {}
    except EnsemblekitError:  # the order then is another, and a risk is refused
        return None
    validation = kept.get("validation")
    fits = validation is not None and len(validation.outputs) == ensemble.combiner.num_members
    return validation if fits and len(validation or ()) else None


@torch.no_grad()
def _order(combiner: Combiner, kept: KeptOutputs) -> tuple[int, ...]:
    """Order the members so that few of them have a low loss together: each is the best one to add to those before."""

    def loss_of(members: Sequence[int]) -> float:
        combined = _combine(combiner, kept.outputs[list(members)], range(len(members)))
        return float(combiner.loss(combined.double(), kept.targets).mean())

    size = combiner.num_members
    if size > MAX_GREEDY:
        return tuple(sorted(range(size), key=lambda member: loss_of([member])))
    return greedy(size, size, loss_of, lambda members: True)[-1].picks


def _combine(combiner: Combiner, outputs: Tensor, order: Sequence[int]) -> Tensor:
    """Combine the outputs (k, B, C) of the first k members of an order, in the order of their indices."""
    ascending = sorted(range(len(outputs)), key=lambda position: order[position])
    return combiner.of_size(len(outputs)).combine_learned(outputs[ascending])


def _sureness(combiner: Combiner, combined: Tensor, count: int, num_members: int) -> Tensor:
    """Compute how sure the answers (B, C) of `count` members are (B,): infinitely if these are all."""
    loss = combiner.loss
    values = loss.probabilities(combined) if is_bounded(combiner.objective) else loss.log_probabilities(combined)
    first, second = values.double().topk(2, dim=-1).values.unbind(dim=-1)
    left = num_members - count
    return (first - second) * count / left if left else torch.full_like(first, math.inf)


def _steps(combiner: Combiner, outputs: Tensor, order: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield how sure the answers are and which class they are, after each of the members in an order."""
    for count in range(1, len(order) + 1):
        combined = _combine(combiner, outputs[list(order[:count])], order)
        yield _sureness(combiner, combined, count, len(order)), combiner.loss.probabilities(combined).argmax(dim=-1)


@torch.no_grad()
def _fitted_limit(combiner: Combiner, kept: KeptOutputs | None, order: Sequence[int], risk: float) -> float:
    """Return the lowest limit at which the expected share of other answers is at most the risk.

    A sample counts as changed at a limit if it would be changed there or at any higher one, so that the count falls
    with the limit, as conformal risk control needs: (changed + 1) / (N + 1) ≤ risk.
    """
    if not 0 < risk < 1:
        raise UsageError(f"the risk is {risk:g}", "risk", "give a share between 0 and 1, for example 0.005")
    if kept is None:
        what = "the run has kept no validation outputs, and a risk is fitted to them"
        raise UsageError(what, "risk", "train with data.validation_fraction of more than 0")
    num_samples = len(kept)
    allowed = math.floor(risk * (num_samples + 1) + 1e-9) - 1
    if allowed < 0:
        needed = math.ceil(1 / risk - 1e-9) - 1
        what = f"a risk of {risk:g} needs at least {needed} validation samples, and the run has {num_samples}"
        fix = f"allow a risk of {math.ceil(1e4 / (num_samples + 1)) / 1e4:g}, or train with more validation data"
        raise UsageError(what, "risk", fix)
    steps = list(_steps(combiner, kept.outputs, order))
    final = steps[-1][1]
    highest = torch.full((num_samples,), -math.inf, dtype=torch.float64)
    critical = highest.clone()
    for sureness, answer in steps[:-1]:
        # a limit below an earlier, higher sureness has stopped before this step
        stops_here_at_some_limit = sureness > highest
        critical = torch.where(stops_here_at_some_limit & (answer != final), sureness, critical)
        highest = torch.maximum(highest, sureness)
    return float(critical.sort(descending=True).values[min(allowed, num_samples - 1)])
