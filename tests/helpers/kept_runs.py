"""Runs with outputs of a test's choice: a tiny trained run whose kept outputs and history are replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ensemblekit as ek
from ensemblekit.core.objective import Objective
from ensemblekit.inference.combining import Combiner
from ensemblekit.runs.outputs import KeptOutputs
from ensemblekit.runs.run import Run

SPEC: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "hidden": [4]},
    "ensemble": {"members": 4},
    "method": {"name": "gncl", "lambda": 0.5},
    "training": {"loss": "cross_entropy"},
}


@dataclass(frozen=True)
class KeptLoader:
    """Loads outputs that were never computed by a network."""

    kept: Mapping[str, KeptOutputs]
    spec: ek.Spec
    fitted: Tensor | None = None

    def ensemble(self) -> ek.Ensemble:
        raise AssertionError("an analysis must not run a network")

    def outputs(self, split: str, data: Any) -> KeptOutputs:
        if split not in self.kept:
            raise ek.UsageError(f"the run has no {split} data")
        return self.kept[split]

    def combiner(self) -> Combiner:
        return Combiner(Objective(self.spec.methods, self.spec.loss), self.spec.ensemble.members, self.fitted)


def kept(outputs: Tensor, targets: Tensor) -> KeptOutputs:
    return KeptOutputs(outputs, targets, torch.arange(len(targets)))


@dataclass(frozen=True)
class Outputs:
    """Outputs (M, N, C) of synthetic classifiers: a signal for the true class plus noise, common and of each member."""

    num_members: int = 4
    num_samples: int = 2000
    num_classes: int = 5
    signal: float = 3.0
    common_noise: float = 1.0
    member_noise: float = 1.0
    scale: float = 1.0
    seed: int = 0
    targets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(99)  # all have the same test data
        object.__setattr__(self, "targets", torch.randint(self.num_classes, (self.num_samples,), generator=random))

    def kept(self) -> KeptOutputs:
        random = torch.Generator().manual_seed(self.seed)
        shape = (self.num_samples, self.num_classes)
        truth = torch.nn.functional.one_hot(self.targets, self.num_classes)
        common = self.common_noise * torch.randn(shape, generator=random)
        own = self.member_noise * torch.randn((self.num_members, *shape), generator=random)
        return kept(self.scale * (self.signal * truth + common + own), self.targets)

    def but(self, **changes: Any) -> Outputs:
        return replace(self, **changes)


def kept_run(
    outputs: Outputs | KeptOutputs,
    path: str = "runs/made",
    overrides: Mapping[str, Any] | None = None,
    history: Mapping[str, float] | None = None,
    validation: KeptOutputs | None = None,
    **facts: Any,
) -> Run:
    """A finished run with these outputs on its test data."""
    test = outputs if isinstance(outputs, KeptOutputs) else outputs.kept()
    spec = ek.load_spec(SPEC, {"ensemble.members": len(test.outputs), **(overrides or {})})
    splits = {"test": test} | ({} if validation is None else {"validation": validation})
    return Run(
        path=Path(path),
        spec=spec,
        status="finished",
        metrics={},
        members=[{"index": index, "parameters": 100} for index in range(len(test.outputs))],
        history=[{"epoch": 1, "train_loss": 0.05, **(history or {})}],
        environment={"seconds": {"training": 1.5}},
        checkpoints=[],
        validation={} if validation is None else {"validation_loss": 1.0},
        loader=KeptLoader(splits, spec),
        **facts,
    )


def opener(*runs: Run) -> Callable[[Path], Run]:
    """Opens runs that were never on disk, by their path."""
    by_path = {run.path: run for run in runs}
    return lambda path: by_path[Path(path)]
