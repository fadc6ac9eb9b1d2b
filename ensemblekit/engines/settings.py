"""Settings that all engines share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ensemblekit.ranks.group import ALONE, Group
from ensemblekit.spec.optimizers import AnyOptimizer
from ensemblekit.spec.sections import Spec


@dataclass(frozen=True)
class EngineSettings:
    """Settings that all engines share."""

    device: torch.device
    optimizer: AnyOptimizer
    bf16: bool = False
    compile: bool = False
    recompute: bool = False
    clip_norm: float | None = None
    passes: int | None = None
    """Stochastic passes per network in predictions; None: one deterministic pass."""
    width: int | None = None
    """Columns of the outputs, if networks with fewer have to be padded."""
    seed: int = 0
    num_samples: int = 1
    """Number of training samples, N."""
    num_members: int | None = None
    """Number of members of the spec, M; None: of those that are trained."""
    group: Group = ALONE
    """The processes that train the members together."""

    @classmethod
    def of(
        cls,
        spec: Spec,
        device: torch.device,
        passes: int | None,
        width: int | None = None,
        num_samples: int = 1,
        group: Group = ALONE,
    ) -> EngineSettings:
        """Return the settings of a spec."""
        return cls(
            device,
            spec.optimizer,
            bf16=spec.engine.precision == "bf16",
            compile=spec.engine.compile,
            recompute=spec.engine.recompute,
            clip_norm=spec.training.clip_norm,
            passes=passes,
            width=width,
            seed=spec.seed,
            num_samples=num_samples,
            num_members=spec.ensemble.members,
            group=group,
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that sets the networks' precision; the objective is always computed in float32."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()
