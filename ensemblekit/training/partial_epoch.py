"""The state of an epoch in its middle, for a checkpoint there: its statistics, and torch's random generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ensemblekit.training.statistics import EpochStatistics

PREFIX = "epoch."
"""Begins the names of its tensors in a checkpoint."""
KEY = "epoch"
"""The key of the rest in a checkpoint's state."""
RANDOM = "random."
"""Begins the names of the states of torch's random generators; the type of the device follows."""


def tensors_of(statistics: EpochStatistics, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors that the rest of the epoch needs, beside those of the members."""
    tensors = {f"{PREFIX}{name}": value for name, value in statistics.tensors().items()}
    tensors[f"{PREFIX}{RANDOM}cpu"] = torch.get_rng_state()
    if device.type not in ("cpu", "meta"):
        tensors[f"{PREFIX}{RANDOM}{device.type}"] = torch.get_device_module(device).get_rng_state(device)
    return tensors


def restore_epoch(
    statistics: EpochStatistics, tensors: Mapping[str, Tensor], state: Mapping[str, Any], device: torch.device
) -> None:
    """Continue an epoch in its middle: restore its statistics and torch's random generators."""
    own = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
    torch.set_rng_state(own[f"{RANDOM}cpu"])
    # a run that goes on on a device of another type starts that device's generator anew
    if device.type != "cpu" and (random := own.get(f"{RANDOM}{device.type}")) is not None:
        torch.get_device_module(device).set_rng_state(random, device)
    rest = {name: value.to(device) for name, value in own.items() if not name.startswith(RANDOM)}
    statistics.restore(rest, state[KEY])
