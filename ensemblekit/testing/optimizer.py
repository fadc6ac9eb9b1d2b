"""The contract of an optimizer: what it declares about itself holds, and runs with it resume on every engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ensemblekit.api import resume_run, run_spec
from ensemblekit.core.registry import Registry
from ensemblekit.core.seeds import generator
from ensemblekit.spec.optimizers import OptimizerPlugin
from ensemblekit.spec.sections import Spec
from ensemblekit.testing.checks import check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.reviews import describe, mismatch
from ensemblekit.testing.toy_run import CopyAfterEpoch, empty_directory, toy_registry, toy_spec, trained_weights

SHAPES = ((4, 3), (7,), (2, 3, 2))
STEPS = 4
TOLERANCE = 1e-5


class OptimizerContract(PluginContract[OptimizerPlugin]):
    """The checks of an optimizer."""

    kind = "optimizer"

    @check("it builds an optimizer that changes the parameters")
    def changes(self) -> None:
        """Without a closure, and by finite numbers."""
        parameters = _parameters()
        optimizer = self.plugin.build(parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self.violation("a torch.optim.Optimizer", describe(optimizer), "build")
        if [id(value) for group in optimizer.param_groups for value in group["params"]] != list(map(id, parameters)):
            raise self.violation("the parameters that were passed, in their order", "others", "build")
        _take_steps(optimizer, parameters)
        for value, start in zip(parameters, _parameters(), strict=True):
            if torch.equal(value, start) or not bool(value.isfinite().all()):
                got = "unchanged ones" if torch.equal(value, start) else "nan or infinity"
                raise self.violation("other, finite parameters after some steps", got, "build")

    @check("its steps follow the learning rate of the parameter groups", needs=[changes])
    def learning_rate(self) -> None:
        """Schedules change `lr` of the groups before every step."""
        results = []
        for factor in (1.0, 0.5):
            parameters = _parameters()
            optimizer = self.plugin.build(parameters)
            for group in optimizer.param_groups:
                if group.get("lr") != self.plugin.lr:
                    raise self.violation(f"lr = {self.plugin.lr} in every group", f"{group.get('lr')}", "build")
                group["lr"] *= factor
            _take_steps(optimizer, parameters)
            results.append(parameters[0])
        if torch.equal(*results):
            fix = 'use group["lr"] in step()'
            raise self.violation("smaller steps with half the learning rate", "the same steps", "build", fix)

    @check("it is element-wise if it says so", needs=[changes])
    def elementwise(self) -> None:
        """Its steps on one flat tensor are those on the parts."""
        if not self.plugin.elementwise:
            return
        parts, flat = _parameters(), _flat(_parameters())
        _take_steps(self.plugin.build(parts), parts)
        _take_steps(self.plugin.build([flat]), [flat])
        if wrong := mismatch(flat.detach(), torch.cat([value.detach().flatten() for value in parts]), TOLERANCE):
            fix = "set elementwise = False: it then gets every parameter by itself"
            raise self.violation("the same steps on one flat tensor as on its parts", wrong, "build", fix)

    @check("its state can be saved", needs=[changes])
    def state(self) -> None:
        """Checkpoints keep tensors and plain values; of an element-wise one, tensors of a parameter's shape are cut."""
        parameters = _parameters()
        optimizer = self.plugin.build(parameters)
        _take_steps(optimizer, parameters)
        for value in parameters:
            for key, part in optimizer.state.get(value, {}).items():
                if isinstance(part, Tensor):
                    self._check_tensor(key, part, value)
                elif not _is_plain(part):
                    expected = f'tensors, numbers, texts, truth values or None in the state, also for "{key}"'
                    raise self.violation(expected, describe(part), "build")

    def _check_tensor(self, key: str, part: Tensor, parameter: Tensor) -> None:
        if self.plugin.elementwise and part.shape != parameter.shape and key not in self.plugin.per_tensor_state:
            names = ", ".join(f'"{name}"' for name in sorted({*self.plugin.per_tensor_state, key}))
            expected = f'state "{key}" with the shape of its parameter, or listed as kept once per tensor'
            fix = f"set per_tensor_state = frozenset({{{names}}})"
            raise self.violation(expected, f"shape {tuple(part.shape)}", "per_tensor_state", fix)

    @check("a resumed run is bit-identical", needs=[state])
    def resumes(self) -> None:
        """Two epochs, and the second again from a copy of the run directory as it was after the first."""
        registry = toy_registry(self.plugin)
        with empty_directory() as folder:
            whole, copy = folder / "whole", folder / "stopped"
            run_spec(self._spec(registry, "sequential"), registry, whole, [CopyAfterEpoch(1, copy)])
            resume_run(copy, registry, [])
            self._compare(copy, whole, 0.0, "a resumed run")

    @check("all engines give the same result", needs=[elementwise, state])
    def engines(self) -> None:
        """Element-wise optimizers also run on stacked members, others on single ones."""
        registry = toy_registry(self.plugin)
        others = ["threaded", *(["stacked"] if self.plugin.elementwise else [])]
        with empty_directory() as folder:
            run_spec(self._spec(registry, "sequential"), registry, folder / "sequential")
            for name in others:
                run_spec(self._spec(registry, name), registry, folder / name)
                self._compare(folder / name, folder / "sequential", 1e-4, f'engine "{name}"')

    def _compare(self, run: Path, reference: Path, tolerance: float, label: str) -> None:
        expected = trained_weights(reference)
        for name, value in trained_weights(run).items():
            if wrong := mismatch(value, expected[name], tolerance):
                raise self.violation(f"the same weights from {label}", f"{name}: {wrong}", "build")

    def _spec(self, registry: Registry, engine: str) -> Spec:
        spec = toy_spec(registry, {"training.epochs": 2, "engine.name": engine})
        return replace(spec, optimizer=self.plugin)


def _parameters() -> list[Tensor]:
    random = generator(0, "contract", "parameters")
    return [torch.randn(shape, generator=random).requires_grad_() for shape in SHAPES]


def _flat(parameters: list[Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten() for value in parameters]).requires_grad_()


def _take_steps(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
    """Take some steps with gradients that do not depend on how the parameters are divided."""
    sizes = [value.numel() for value in parameters]
    for step in range(STEPS):
        gradient = torch.randn(sum(sizes), generator=generator(0, "contract", "gradients", step))
        for value, part in zip(parameters, gradient.split(sizes), strict=True):
            value.grad = part.view(value.shape).clone()
        optimizer.step()


def _is_plain(value: object) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
