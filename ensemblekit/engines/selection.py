"""Chooses an engine: by trials of those that support the members, and by the layers where trials cannot tell."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.nn.modules.conv import _ConvNd as _Convolution

from ensemblekit.core.errors import UsageError
from ensemblekit.engines.base import Engine
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.engines.timed_steps import EnginesOnTrial, Work
from ensemblekit.engines.trials import Trials
from ensemblekit.members.state import MemberState
from ensemblekit.ranks.group import Pretended
from ensemblekit.spec.sections import ENGINES


@dataclass(frozen=True)
class Choice:
    """The engine that was chosen."""

    engine: str
    seconds_per_step: Mapping[str, float]
    """Those of the engines that took part in the last trials; empty if there was nothing to choose."""


def engine_class(name: str) -> type[Engine]:
    """Import the engine of a name."""
    engine: type[Engine] = pkgutil.resolve_name(ENGINES[name])
    return engine


def check_engine(name: str, members: Sequence[MemberState], settings: EngineSettings) -> None:
    """Raise a `UsageError` if the engine of that name does not support these members."""
    if reason := engine_class(name).unsupported(members, settings):
        raise UsageError(f'engine "{name}" does not support this run: {reason}', "engine.name", 'set it to "auto"')


def preferred_engine(members: Sequence[MemberState], settings: EngineSettings) -> str:
    """Return the engine to use without measuring: stacked if it supports the members and is not known to be slower."""
    is_slow = _stacks_slowly(members, settings) or engine_class("stacked").unsupported(members, settings)
    return "sequential" if is_slow else "stacked"


def expected_order(members: Sequence[MemberState], settings: EngineSettings) -> list[str]:
    """Return all engines, from the one that is expected to be the fastest to the slowest."""
    if _stacks_slowly(members, settings):
        return sorted(ENGINES, key=["threaded", "sequential", "stacked"].index)
    return sorted(ENGINES, key=["stacked", "threaded", "sequential"].index)


def _stacks_slowly(members: Sequence[MemberState], settings: EngineSettings) -> bool:
    """Whether stacked members are known to be slow: grouped convolutions, which stacking makes, are slow on a CPU."""
    convolves = any(isinstance(layer, _Convolution) for member in members for layer in member.network.modules())
    return settings.device.type == "cpu" and convolves


def choose_engine(work: Work) -> Choice:
    """Choose the engine for a training step by trials.

    Engines that fall far behind or run out of memory are left out. Several processes measure at once, each its own
    members, and the slowest counts. Of engines that are equally fast, the one that is expected to be faster is taken.
    """
    group, order = work.settings.group, expected_order(work.members, work.settings)
    alone = replace(work, settings=replace(work.settings, group=Pretended(group))) if not group.is_alone else work
    rows = group.gather_json(_measure_here(alone, order))
    common = [name for name in rows[0]["seconds"] if all(name in row["seconds"] for row in rows)]
    seconds = {name: max(row["seconds"][name] for row in rows) for name in common}
    contenders = [name for name in common if all(name in row["contenders"] for row in rows)] or common
    if not contenders:
        return Choice("sequential", seconds)
    longest = max(row["reliable_ratio"] for row in rows) * min(seconds[name] for name in contenders)
    return Choice(next(name for name in order if name in contenders and seconds[name] <= longest), seconds)


def _measure_here(work: Work, order: Sequence[str]) -> dict[str, Any]:
    """Time the engines with the members of this process.

    Args:
        work: the step.
        order: the engines, from the one that is expected to be the fastest.

    Returns:
        The seconds per step of engines, those that can still win, and the ratio of times below which these count as
        equally fast; as JSON.
    """
    classes = {name: engine_class(name) for name in order}
    names = [name for name in order if classes[name].unsupported(work.members, work.settings) is None]
    if len(names) == 1:
        return {"seconds": {}, "contenders": [], "reliable_ratio": 1.0}
    with EnginesOnTrial(classes) as engines:
        trials = Trials(names, engines, work)
    seconds, contenders = trials.seconds_per_step, trials.contenders
    return {"seconds": seconds, "contenders": contenders, "reliable_ratio": trials.reliable_ratio}
