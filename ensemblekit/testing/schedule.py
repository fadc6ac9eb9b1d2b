"""The contract of a schedule: a factor that is finite, never negative and a function of the time alone."""

from __future__ import annotations

import math
from dataclasses import replace

from ensemblekit.spec.schedules import Schedule
from ensemblekit.testing.checks import check
from ensemblekit.testing.common import PluginContract
from ensemblekit.testing.reviews import describe
from ensemblekit.testing.toy_run import toy_registry, toy_spec, train_toy_run

EPOCHS = (1, 2, 10, 100)
STEPS = 4
"""Steps in an epoch."""


class ScheduleContract(PluginContract[Schedule]):
    """The checks of a schedule."""

    kind = "schedule"

    @check("its factor is finite and not negative at all times")
    def factors(self) -> None:
        """For runs of any length, at every step, and not always zero."""
        for num_epochs in EPOCHS:
            times = [step / STEPS for step in range(num_epochs * STEPS)]
            values = [self.plugin.decay(time, num_epochs) for time in times]
            for time, value in zip(times, values, strict=True):
                when = f"after {time:g} of {num_epochs} epochs"
                if not isinstance(value, float | int):
                    raise self.violation(f"a number {when}", describe(value), "decay", "return a float")
                if not math.isfinite(value) or value < 0:
                    raise self.violation(f"a finite factor of at least 0 {when}", str(value), "decay")
            if not any(values):
                raise self.violation("a factor that is not always 0", f"0 for {num_epochs} epochs", "decay")

    @check("its factor depends on the time alone", needs=[factors])
    def pure(self) -> None:
        """A resumed run asks for the factor of its first step without having asked for those before."""
        forward = [self.plugin.factor(step / STEPS, 10) for step in range(10 * STEPS)]
        backward = [self.plugin.factor(step / STEPS, 10) for step in reversed(range(10 * STEPS))]
        if forward != backward[::-1]:
            fix = "keep no state: compute the factor from epoch and num_epochs"
            raise self.violation("the same factors in any order", "other factors", "decay", fix)

    @check("a run with it finishes", needs=[pure])
    def run_finishes(self) -> None:
        """Two epochs."""
        registry = toy_registry(self.plugin)
        train_toy_run(replace(toy_spec(registry, {"training.epochs": 2}), schedule=self.plugin), registry)
