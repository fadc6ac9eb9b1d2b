"""Members with losses of their own, such as other label smoothing: one loss for the outputs of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.losses import Loss


class MemberLosses:
    """The loss of each member of a spec; those of all members have one name and differ in their parameters."""

    def __init__(self, common: Loss, losses: Sequence[Loss]) -> None:
        self.common = common
        self.distinct = list({loss.key: loss for loss in losses}.values())
        keys = [loss.key for loss in self.distinct]
        self.kinds = torch.tensor([keys.index(loss.key) for loss in losses])

    def of(self, members: Tensor) -> Any:
        """Return the loss for the outputs (M, B, C) of these members; it takes the place of a `Loss` in hooks."""
        return _LossOfRows(self.common, self.distinct, self.kinds.to(members.device)[members])


class _LossOfRows:
    """A loss of outputs (M, B, C), row by row; outputs (B, C), such as the combined ones, have the common loss."""

    def __init__(self, common: Loss, losses: Sequence[Loss], kinds: Tensor) -> None:
        self._common, self._losses, self._kinds = common, losses, kinds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._common, name)

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        if outputs.ndim != 3 or len(outputs) != len(self._kinds):
            return self._common(outputs, target)
        losses = self._losses[0](outputs, target)
        for kind, loss in enumerate(self._losses[1:], start=1):
            # every loss for all rows: to select rows, their number would have to be read back from the device
            losses = torch.where((self._kinds == kind).unsqueeze(-1), loss(outputs, target), losses)
        return losses
