"""Ways to compute an ensemble; which one is used changes speed and memory, not results beyond rounding."""

from __future__ import annotations

from collections.abc import Sequence

from ensemblekit.core.threads import num_cores
from ensemblekit.engines.base import Engine, Settings, Slot
from ensemblekit.engines.sequential import SequentialEngine
from ensemblekit.engines.stacked import StackedEngine
from ensemblekit.engines.threaded import ThreadedEngine

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (SequentialEngine, ThreadedEngine, StackedEngine)}


def unsupported(name: str, slots: Sequence[Slot], settings: Settings, optimizer: str) -> str | None:
    """Why an engine cannot run these slots; None if it can."""
    if name == "threaded" and settings.device.type != "cpu":
        return f"threads are for the CPU, and the device is {settings.device}"
    if name == "threaded" and num_cores() < 2:
        return "there is only one core"
    if name == "threaded" and (drawing := next((slot for slot in slots if slot.draws_globally), None)):
        return f'model "{drawing.model.name}" draws random numbers from the one generator that all threads share'
    if name == "stacked":
        if not settings.elementwise:
            return f'the optimizer "{optimizer}" looks at a parameter as a whole'
        for slot in slots:
            if reason := slot.model.unsupported().get("vmap"):
                return f'model "{slot.model.name}": {reason}'
    return None


__all__ = ["ENGINES", "Engine", "Settings", "Slot", "unsupported"]
