"""The engine of a run: chosen once, by measuring if the spec says so, and made anew when the members change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines.base import Engine
from ensemblekit.engines.selection import check_engine, choose_engine, engine_class
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.engines.timed_steps import Work
from ensemblekit.engines.together import SharedStack, TogetherEngine
from ensemblekit.members.growing import GrowingMembers
from ensemblekit.training.resuming import place_notices


class EngineInUse:
    """The engine of the current members.

    Args:
        name: its name, or "auto".
        members: the networks in training.
        objective: what they minimise.
        settings: those that all engines share.
        trial: returns a batch to measure engines on, and the weights of its samples.
        num_steps: the steps of the run.
        shared: the stack that the run shares with others; its engine is then "stacked".
    """

    def __init__(
        self,
        name: str,
        members: GrowingMembers,
        objective: Objective,
        settings: EngineSettings,
        trial: Callable[[], tuple[Batch, Tensor | None]],
        num_steps: int,
        shared: SharedStack | None = None,
    ) -> None:
        self.name = name if shared is None else TogetherEngine.name
        self.shared = shared
        self.members, self.objective, self.settings, self.trial = members, objective, settings, trial
        self.num_steps = num_steps
        self.engine: Engine | None = None

    def choose(self) -> Mapping[str, float]:
        """Choose the engine, by measuring if its name is "auto"; returns the measured seconds per step."""
        states = self.members.networks
        seconds_per_step: Mapping[str, float] = {}
        if self.name == "auto":
            choice = choose_engine(Work(states, self.objective, self.settings, *self.trial(), self.num_steps))
            seconds_per_step = choice.seconds_per_step
            self.name = self.settings.group.agree("engine", choice.engine)
        check_engine(self.name, states, self.settings)
        self.objective.hooks.call.engine_chosen(engine=self.name, seconds_per_step=seconds_per_step)
        return seconds_per_step

    def choose_again(self, recorded: Mapping[str, Any]) -> Iterator[str]:
        """Choose the engine of a resumed run: that of its start, unless another was asked for or it cannot be used.

        Args:
            recorded: the environment of the run.

        Returns:
            What has changed, in words.
        """
        before, reason = recorded.get("engine"), "as asked"
        if before == self.name:
            unsupported = engine_class(self.name).unsupported(self.members.networks, self.settings)
            if unsupported:
                self.name, reason = "auto", unsupported
        self.choose()
        return place_notices(recorded, self.name, str(self.settings.device), reason)

    def current(self) -> Engine:
        """Return the engine for the current members; a new one if they have changed."""
        if self.engine is not None:
            if not self.members.changed:
                return self.engine
            self.engine.close()
        self.engine = self._make()
        self.members.changed = False
        return self.engine

    def _make(self) -> Engine:
        if self.shared is not None:
            return TogetherEngine(self.members.networks, self.objective, self.settings, self.shared)
        return engine_class(self.name)(self.members.networks, self.objective, self.settings)

    def store_optimizer_state(self) -> None:
        """Bring the optimizer's state of the members up to date."""
        if self.engine is not None:
            self.engine.store_optimizer_state()

    def close(self) -> None:
        """Release threads and the like."""
        if self.engine is not None:
            self.engine.close()
