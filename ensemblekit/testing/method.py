"""The contract of a method: correct hooks, a correct objective, and runs that agree and resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ensemblekit.api import read, resume_run, run_spec
from ensemblekit.core.seeds import generator
from ensemblekit.data.loading import Batch
from ensemblekit.engines.selection import engine_class
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.members.growing import GrowingMembers
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.run import Run
from ensemblekit.spec.sections import ENGINES, Spec
from ensemblekit.testing.checks import Check, check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.method_hooks import HookChecks
from ensemblekit.testing.method_members import MemberHookChecks
from ensemblekit.testing.method_objective import ObjectiveChecks
from ensemblekit.testing.method_state import StateChecks
from ensemblekit.testing.reviews import mismatch
from ensemblekit.testing.several_ranks import train_on_ranks
from ensemblekit.testing.toy_run import BATCH_SIZE, CopyAfterEpoch, empty_directory, trained_weights

STEPS = 3
RANKS = 2
AGREEMENT = 1e-5
"""Relative tolerance between engines in float32."""
TIMINGS = {"seconds", "samples_per_second"}
"""Metrics that differ between equal runs."""


class MethodContract(HookChecks, ObjectiveChecks, MemberHookChecks, StateChecks):
    """The checks of a method: those of its hooks, its objective, its members, its state, and of runs with it."""

    def checks(self) -> list[Check]:
        """All checks; if the hooks cannot be registered, only those that call none of them."""
        if self.hooks_are_known:
            return super().checks()
        return self.select(PluginContract, MethodContract.formula_is_given)

    @check("its formula is given")
    def formula_is_given(self) -> None:
        """`inspect` and `validate` show what the method minimises."""
        if not self.plugin_class.formula.strip():
            raise self.violation("the formula that the method minimises", "none", fix='write formula = "…"')

    @check("all engines agree", needs=[HookChecks, ObjectiveChecks])
    def engines_agree(self) -> None:
        """A few training steps with each engine that is supported here, compared with the sequential one."""
        expected = self._train_steps("sequential")
        assert expected is not None  # it supports everything
        for name in sorted(set(ENGINES) - {"sequential"}):
            actual = self._train_steps(name)
            if actual is None:
                continue
            for label, left, right in zip(("objectives", "outputs"), actual, expected, strict=True):
                if wrong := mismatch(left, right, AGREEMENT):
                    raise self.violation(
                        f"the {label} of the sequential engine after {STEPS} steps, up to {AGREEMENT}",
                        f"with the {name} engine {wrong}",
                        (self.implemented() or [""])[0],
                        "use only the hook's arguments: it may get the outputs of one member or of all, in any thread",
                    )

    def _train_steps(self, engine_name: str) -> tuple[Tensor, Tensor] | None:
        """The objectives of some steps and the outputs (M, B, C) after them; None if the engine is not supported."""
        spec, info = self.spec, self.info
        growing = GrowingMembers(spec, info, torch.device("cpu"), keep_start=self.objective.members.need_start)
        growing.start(self.members)
        members = growing.networks
        hooks, engine_type = self.objective.hooks, engine_class(engine_name)
        width, passes = growing.layout.width, hooks.passes(self.members)
        settings = EngineSettings.of(spec, torch.device("cpu"), passes, width, BATCH_SIZE)
        if engine_type.unsupported(members, settings) is not None:
            return None
        batches = [self._batch(step) for step in range(STEPS)]
        weights = hooks.sample_weights(BATCH_SIZE, self.members, seed=0, targets=batches[0].targets)
        engine = engine_type(members, self.objective, settings)
        try:
            values = [engine.train_step(batch, weights, 0.1, step)[0] for step, batch in enumerate(batches)]
            return torch.stack(values), engine.predict(batches[0].inputs)
        finally:
            engine.close()

    def _batch(self, step: int) -> Batch:
        info = self.info
        random = generator(0, "contract", "batch", step)
        inputs = torch.randn(BATCH_SIZE, *info.input_shape, generator=random)
        if info.task == "multilabel":
            targets = torch.randint(2, (BATCH_SIZE, info.num_outputs), generator=random).float()
        elif info.task == "regression":
            targets = torch.randn(BATCH_SIZE, info.num_outputs, generator=random)
        else:
            targets = torch.randint(info.num_outputs, (BATCH_SIZE,), generator=random)
        return Batch(inputs, targets, torch.arange(BATCH_SIZE))

    @check("a resumed run is bit-identical", needs=[HookChecks, ObjectiveChecks])
    def resumes(self) -> None:
        """A run, and one that resumes from a copy of it half-way, end with the same weights and metrics."""
        half = self.spec.training.epochs // 2
        with empty_directory() as folder:
            whole, copy = folder / "whole", folder / "stopped"
            expected = run_spec(self._evaluated_spec, self.registry, whole, [CopyAfterEpoch(half, copy)])
            resumed = resume_run(copy, self.registry)
            changed = _changed_weights(copy, whole) + _changed_metrics(resumed, expected)
        if changed:
            life_cycle = self.implemented(("epoch_started", "learning_rate", "members_at_start", "epoch_finished"))
            raise self.violation(
                f"a run resumed after epoch {half} of {self.spec.training.epochs} to be bit-identical to a whole one",
                f"{len(changed)} differences, the first in {changed[0]}",
                (life_cycle or self.implemented() or [""])[0],
                "derive what changes between epochs from epoch, num_epochs and the ensemble, or return it from state()",
            )

    @property
    def _evaluated_spec(self) -> Spec:
        """The spec, evaluated after every epoch, so that state that shows in metrics alone is seen too."""
        return replace(self.spec, training=self.spec.training.model_copy(update={"evaluate_every": 1}))

    @check(
        "it gives the same numbers on several ranks",
        needs=[HookChecks, ObjectiveChecks, MemberHookChecks, StateChecks, resumes],
    )
    def ranks_agree(self) -> None:
        """A run in one process, and one whose members are spread over two, end with the same weights and metrics."""
        with empty_directory() as folder:
            alone, together = folder / "alone", folder / "together"
            expected = run_spec(self._evaluated_spec, self.registry, alone)
            train_on_ranks(self._evaluated_spec, self.registry, together, RANKS)
            actual = read(RunDirectory.open(together), self.registry)
            changed = _changed_weights(together, alone) + _changed_metrics(actual, expected)
        if changed:
            raise self.violation(
                f"a run on {RANKS} ranks to be bit-identical to a run in one process",
                f"{len(changed)} differences, the first in {changed[0]}",
                (self.implemented() or [""])[0],
                "use only the hook's arguments: every rank calls it with the outputs of all members",
            )


def _changed_weights(left: Path, right: Path) -> list[str]:
    """The names of the tensors in which the models of two runs differ."""
    first, second = trained_weights(left), trained_weights(right)
    changed = sorted(first.keys() ^ second.keys())
    return changed or [name for name in first if not torch.equal(first[name], second[name])]


def _changed_metrics(resumed: Run, expected: Run) -> list[str]:
    """The metrics, by name and epoch, in which the histories of two runs differ."""
    if len(resumed.history) != len(expected.history):
        return ["the number of epochs"]
    return [
        f"{name} of epoch {second['epoch']}"
        for first, second in zip(resumed.history, expected.history, strict=True)
        for name in sorted((first.keys() | second.keys()) - TIMINGS)
        if first.get(name) != second.get(name)
    ]
