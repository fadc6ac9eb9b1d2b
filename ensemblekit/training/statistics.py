"""Statistics of an epoch's steps: sums on the device, and whether everything is still finite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ensemblekit.core.errors import NumericError
from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch

PENDING_BYTES = 2**24
"""Outputs of steps are kept up to this size and then summed together, which costs less than step by step."""


class EpochStatistics:
    """Means of an epoch, summed on the device: values are read back only by `check_finite` and `means`."""

    def __init__(self, objective: Objective, member_indices: list[int]) -> None:
        self.objective, self.member_indices = objective, member_indices
        self.pending: list[tuple[Tensor, Tensor, Tensor]] = []
        """Objective, outputs (M, B, C) and targets of the steps that are not summed yet."""
        self.latest: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())
        """Outputs and targets of the steps that were summed last."""
        self.sums: dict[str, Tensor] = {}
        self.finite: list[Tensor] = []
        """For each step since the last check, whether each member's outputs and the objective are finite, (M + 1,)."""
        self.num_steps = self.num_samples = 0

    def add(self, value: Tensor, outputs: Tensor, batch: Batch) -> None:
        """Add a step: its objective and its outputs (M, B, C)."""
        self.pending.append((value, outputs, batch.targets))
        self.num_steps += 1
        if len(self.pending) * outputs.numel() * outputs.element_size() >= PENDING_BYTES:
            self._sum_pending()

    def _sum_pending(self) -> None:
        if not self.pending:
            return
        sizes = [outputs.shape[1] for _, outputs, _ in self.pending]
        values = torch.stack([value for value, _, _ in self.pending])
        outputs = torch.cat([outputs for _, outputs, _ in self.pending], dim=1)
        targets = torch.cat([targets for _, _, targets in self.pending])
        loss, combined = self.objective.loss, self.objective.combine(outputs)
        weighted = sum(value * size for value, size in zip(values, sizes, strict=True))
        sums = {"train_objective": weighted, "train_loss": loss(combined, targets).sum()}
        if not targets.is_floating_point():
            classes = loss.probabilities(combined).argmax(dim=-1)
            sums["train_accuracy"] = (classes == targets.clamp_min(0)).sum()
        for name, number in sums.items():
            self.sums[name] = self.sums[name] + number if name in self.sums else number
        by_step = outputs.isfinite().all(dim=-1).split(sizes, dim=1)
        members = torch.stack([finite.all(dim=1) for finite in by_step])
        self.finite.append(torch.cat([members, values.isfinite().unsqueeze(1)], dim=1))
        self.num_samples += sum(sizes)
        self.latest = outputs.split(sizes, dim=1), targets.split(sizes)
        self.pending.clear()

    def check_finite(self, epoch: int, path: Path) -> None:
        """Raise a `NumericError` that names the step, and the member or the plugin if one of them is to blame."""
        self._sum_pending()
        if not self.finite or self.finite[0].is_meta:
            return
        finite = torch.cat(self.finite)
        if not bool(finite.all()):
            bad_step = int((~finite.all(dim=1)).nonzero()[0])
            bad_rows = (~finite[bad_step, :-1]).nonzero().flatten().tolist()
            fix = "lower training.optimizer.lr, or set training.clip_norm"
            if bad_rows:
                what = f"the outputs of member {self.member_indices[bad_rows[0]]} became nan or infinite"
            else:
                what = "the objective became nan or infinite"
                what, fix = self._culprit(bad_step - len(finite)) or (what, fix)
            step = self.num_steps - len(finite) + bad_step + 1
            kept = f"{path} keeps the checkpoint of epoch {epoch - 1}"
            raise NumericError(f"{what} at epoch {epoch}, step {step}", kept, fix)
        self.finite.clear()

    def _culprit(self, index: int) -> tuple[str, str] | None:
        """Find the plugin whose hook returned a value that is not finite, if that step (from the end) is still here."""
        outputs, targets = self.latest
        if len(outputs) < -index:
            return None
        try:
            self.objective.check_finite(outputs[index], targets[index])
        except NumericError as error:
            return error.what, error.fix
        return None

    def means(self) -> dict[str, float]:
        """Return the means over the samples of the epoch."""
        return {name: float(number) / self.num_samples for name, number in self.sums.items()}
