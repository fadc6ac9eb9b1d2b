"""What an epoch's steps gave: sums on the device, and whether everything is still finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ensemblekit.core.errors import NumericError
from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch

KEPT_BYTES = 2**24
"""How much of the steps' outputs is kept until they are counted together, which costs less than one by one."""


class Seen:
    """What an epoch's steps gave, kept on the device: nothing is read back but every CHECK_EVERY steps."""

    def __init__(self, objective: Objective, columns: list[int]) -> None:
        self.objective, self.columns = objective, columns
        self.kept: list[tuple[Tensor, Tensor, Tensor]] = []
        """Objective, outputs (M, B, C) and targets of the steps that are not counted yet."""
        self.counted: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())
        """Outputs and targets of the steps that were counted last."""
        self.sums: dict[str, Tensor] = {}
        self.finite: list[Tensor] = []
        """For each step since the last look, whether each member's outputs and the objective are finite, (M + 1,)."""
        self.steps = self.samples = 0

    def add(self, value: Tensor, outputs: Tensor, batch: Batch) -> None:
        self.kept.append((value, outputs, batch.targets))
        self.steps += 1
        if len(self.kept) * outputs.numel() * outputs.element_size() >= KEPT_BYTES:
            self._count()

    def _count(self) -> None:
        """Add up what was kept."""
        if not self.kept:
            return
        sizes = [outputs.shape[1] for _, outputs, _ in self.kept]
        values = torch.stack([value for value, _, _ in self.kept])
        outputs = torch.cat([outputs for _, outputs, _ in self.kept], dim=1)
        targets = torch.cat([targets for _, _, targets in self.kept])
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
        self.samples += sum(sizes)
        self.counted = outputs.split(sizes, dim=1), targets.split(sizes)
        self.kept.clear()

    def check_finite(self, epoch: int, path: object) -> None:
        """Raise an error that names the step, and the member if one of them is to blame."""
        self._count()
        if not self.finite or self.finite[0].is_meta:
            return
        good = torch.cat(self.finite)
        if not bool(good.all()):
            bad_step = int((~good.all(dim=1)).nonzero()[0])
            members = [self.columns[place] for place in (~good[bad_step, :-1]).nonzero().flatten().tolist()]
            what = f"the outputs of member {members[0]}" if members else "the objective"
            what, fix = f"{what} became nan or infinite", "lower training.optimizer.lr, or set training.clip_norm"
            if not members:
                what, fix = self._blamed(bad_step - len(good)) or (what, fix)
            step = self.steps - len(good) + bad_step + 1
            kept = f"{path} keeps the checkpoint of epoch {epoch - 1}"
            raise NumericError(f"{what} at epoch {epoch}, step {step}", kept, fix)
        self.finite.clear()

    def _blamed(self, place: int) -> tuple[str, str] | None:
        """The plugin whose hook gave what is not finite, and what to do, if that step (from the end) is at hand."""
        outputs, targets = self.counted
        if len(outputs) < -place:
            return None
        try:
            self.objective.check_finite(outputs[place], targets[place])
        except NumericError as error:
            return error.what, error.fix
        return None

    def means(self) -> dict[str, float]:
        """The means over the epoch's samples."""
        return {name: float(number) / self.samples for name, number in self.sums.items()}
