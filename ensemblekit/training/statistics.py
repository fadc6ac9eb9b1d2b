"""Statistics of an epoch's steps: sums on the device, and whether everything is still finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.decomposition import quadratic_diversity
from ensemblekit.core.errors import NumericError
from ensemblekit.core.objective import Objective
from ensemblekit.core.tasks import task_of
from ensemblekit.data.loading import Batch
from ensemblekit.engines.base import Engine
from ensemblekit.training.stopwatch import Elapsed

PENDING_BYTES = 2**24
"""Outputs of steps are kept up to this size and then summed together, which costs less than step by step."""
LOWER_RATE = "lower training.optimizer.lr, or set training.clip_norm"
"""What helps against numbers that become nan or infinite."""

DIVERSITY = "train_diversity"

Step = tuple[Tensor, Tensor, Tensor]
"""Objective, outputs (R, B, W) of all networks and targets of a step."""


class EpochStatistics:
    """Means of an epoch, summed on the device: values are read back only by `check_finite` and `means`."""

    def __init__(
        self,
        objective: Objective,
        member_indices: list[int],
        indices: Tensor | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.objective, self.member_indices = objective, member_indices
        self.indices = indices
        """The same indices on the device."""
        self.engine = engine
        """What trains the steps, if they may be trained apart from other processes."""
        self.num_apart = 0
        """How many of the last pending steps were trained apart from other processes, and are not collected yet."""
        self.pending: list[Step] = []
        """The steps that are not summed yet."""
        self.latest: list[Step] = []
        """The steps that were summed last."""
        self.sums: dict[str, Tensor] = {}
        self.finite: list[Tensor] = []
        """For each step since the last check, whether each member's outputs and the objective are finite, (M + 1,)."""
        self.num_steps = self.num_samples = 0
        self.is_over = False
        """Whether methods have changed the ensemble after the last step."""
        self.earlier_seconds = 0.0
        """Seconds that the steps took before the epoch was interrupted."""
        self.elapsed: Elapsed | None = None
        """Measures the steps since then."""

    @property
    def seconds(self) -> float:
        """Seconds that the steps have taken."""
        return self.earlier_seconds + (self.elapsed.seconds if self.elapsed else 0.0)

    def add(self, value: Tensor, outputs: Tensor, batch: Batch) -> None:
        """Add a step: its objective and its outputs (M, B, C)."""
        self.pending.append((value, outputs, batch.targets))
        self.num_steps += 1
        is_apart = self.engine is not None and self.engine.is_apart
        self.num_apart += is_apart
        # of all members, wherever they are, so that sums are rounded in the same way
        num_rows = sum(self.engine.active_rows.counts) if self.engine is not None and is_apart else len(outputs)
        if len(self.pending) * num_rows * outputs.shape[1:].numel() * outputs.element_size() >= PENDING_BYTES:
            self._sum_pending()

    def _collect(self) -> None:
        """Complete the pending steps that were trained apart from other processes."""
        if self.num_apart and self.engine is not None:
            apart = self.pending[-self.num_apart :]
            values, outputs = self.engine.collect([step[0] for step in apart], [step[1] for step in apart])
            self.pending[-self.num_apart :] = zip(values, outputs, (step[2] for step in apart), strict=True)
            self.num_apart = 0

    @property
    def last_objective(self) -> Tensor:
        """The objective of the last step, of all processes."""
        self._collect()
        return (self.pending or self.latest)[-1][0]

    def _sum_pending(self) -> None:
        if not self.pending:
            return
        self._collect()
        values, outputs, targets, sizes = _joined(self.pending)
        predictions = self.objective.train_predictions(outputs)
        loss, combined = self.objective.loss, self.objective.combine(outputs, self.indices)
        weighted = sum(value * size for value, size in zip(values, sizes, strict=True))
        sums = {"train_objective": weighted, "train_loss": loss(combined, targets).sum()}
        correct = task_of(loss, combined, targets).correct(combined, targets, loss)
        if correct is not None:
            sums["train_accuracy"] = correct.sum()
        if self._has_diversity(len(predictions)):
            diversity = quadratic_diversity(predictions, predictions.mean(dim=0), targets, loss)
            sums[DIVERSITY] = diversity.mean(dim=0).sum()
        for name, number in sums.items():
            self.sums[name] = self.sums[name] + number if name in self.sums else number
        self.finite.append(_finite(values, outputs, sizes))
        self.num_samples += sum(sizes)
        self.latest = _divided(values, outputs, targets, sizes)
        self.pending.clear()

    def _has_diversity(self, num_members: int) -> bool:
        """Whether the diversity is summed: not if an older version has begun the epoch without it."""
        has_begun_without = self.num_samples > 0 and DIVERSITY not in self.sums
        return num_members > 1 and self.objective.loss.twice_differentiable and not has_begun_without

    def check_finite(self, epoch: int, kept: str) -> None:
        """Raise a `NumericError` that names the step, and the member or the plugin if one of them is to blame.

        Args:
            epoch: the number of this epoch.
            kept: says which checkpoint is kept.
        """
        self._sum_pending()
        self._check(self.finite, self.latest, epoch, kept)
        self.finite.clear()

    def check_all(self, epoch: int, kept: str) -> None:
        """Check like `check_finite`, without summing: where that happens changes the rounding of the sums."""
        self._collect()
        pending = [_finite(*_joined_outputs(self.pending))] if self.pending else []
        self._check([*self.finite, *pending], self.pending or self.latest, epoch, kept)

    def _check(self, flags: Sequence[Tensor], steps: Sequence[Step], epoch: int, kept: str) -> None:
        if not flags or flags[0].is_meta:
            return
        finite = torch.cat(list(flags))
        if bool(finite.all()):
            return
        bad_step = int((~finite.all(dim=1)).nonzero()[0])
        bad_rows = (~finite[bad_step, :-1]).nonzero().flatten().tolist()
        fix = LOWER_RATE
        if bad_rows:
            names = [f"member {index}" for index in self.member_indices]
            name = names[bad_rows[0]] if bad_rows[0] < len(names) else "an auxiliary network"
            what = f"the outputs of {name} became nan or infinite"
        else:
            what = "the objective became nan or infinite"
            what, fix = self._culprit(steps, bad_step - len(finite)) or (what, fix)
        step = self.num_steps - len(finite) + bad_step + 1
        raise NumericError(f"{what} at epoch {epoch}, step {step}", kept, fix)

    def _culprit(self, steps: Sequence[Step], index: int) -> tuple[str, str] | None:
        """Find the plugin whose hook returned a value that is not finite, if that step (from the end) is still here."""
        if len(steps) < -index:
            return None
        try:
            self.objective.check_finite(*steps[index][1:])
        except NumericError as error:
            return error.what, error.fix
        return None

    def means(self) -> dict[str, float]:
        """Return the means over the samples of the epoch."""
        return {name: float(number) / self.num_samples for name, number in self.sums.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums and the pending steps, for a checkpoint inside the epoch."""
        self._collect()
        tensors = {f"sums.{name}": value for name, value in self.sums.items()}
        if self.pending:
            values, outputs, targets, _ = _joined(self.pending)
            tensors |= {"pending.values": values, "pending.outputs": outputs, "pending.targets": targets}
        return tensors

    def state(self) -> dict[str, Any]:
        """Return the rest of what `restore` needs, as JSON."""
        sizes = [outputs.shape[1] for _, outputs, _ in self.pending]
        state = {"steps": self.num_steps, "samples": self.num_samples, "pending": sizes, "seconds": self.seconds}
        return {**state, "over": True} if self.is_over else state

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue from what `tensors` and `state` returned."""
        self.num_steps, self.num_samples, sizes = state["steps"], state["samples"], state["pending"]
        self.earlier_seconds, self.is_over = state["seconds"], state.get("over", False)
        prefix = "sums."
        self.sums = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        if sizes:
            values, outputs, targets = (tensors[f"pending.{name}"] for name in ("values", "outputs", "targets"))
            self.pending = _divided(values, outputs, targets, sizes)


def _joined(steps: Sequence[Step]) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Join steps: their objectives (S,), outputs (M, N, C) and targets, and the number of samples of each."""
    values, outputs, sizes = _joined_outputs(steps)
    return values, outputs, torch.cat([targets for _, _, targets in steps]), sizes


def _joined_outputs(steps: Sequence[Step]) -> tuple[Tensor, Tensor, list[int]]:
    sizes = [outputs.shape[1] for _, outputs, _ in steps]
    return torch.stack([value for value, _, _ in steps]), torch.cat([outputs for _, outputs, _ in steps], dim=1), sizes


def _divided(values: Tensor, outputs: Tensor, targets: Tensor, sizes: list[int]) -> list[Step]:
    """Return the steps that `_joined` has joined."""
    return list(zip(values, outputs.split(sizes, dim=1), targets.split(sizes), strict=True))


def _finite(values: Tensor, outputs: Tensor, sizes: list[int]) -> Tensor:
    """Return for each step whether each member's outputs and the objective are finite, (S, M + 1)."""
    by_step = outputs.isfinite().all(dim=-1).split(sizes, dim=1)
    members = torch.stack([finite.all(dim=1) for finite in by_step])
    return torch.cat([members, values.isfinite().unsqueeze(1)], dim=1)
