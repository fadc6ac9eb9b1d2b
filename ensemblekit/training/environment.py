"""Where and with what a run is computed: its device, and the versions that its directory records."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from typing import Any

import torch

from ensemblekit.core import kernels
from ensemblekit.core.errors import UsageError
from ensemblekit.core.registry import Registry
from ensemblekit.core.threads import num_cores
from ensemblekit.spec.sections import Spec


def choose_device(name: str) -> torch.device:
    """Return the device that a spec names, or for "auto" the best available: cuda, mps, cpu."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device, is_available in available.items() if is_available)
    device = torch.device(name)
    if not available.get(device.type, True):
        fix = 'use "auto" or "cpu"; a run goes on elsewhere with: ensemblekit resume RUN --device cpu'
        raise UsageError(f'device "{name}" is not available here', "engine.device", fix)
    return device


def environment(spec: Spec, registry: Registry) -> dict[str, Any]:
    """Return the versions of Python, torch and all plugins of a run, and what else its results depend on."""
    used = [(plugin.kind, plugin.name) for _, plugin in spec.plugins()]
    infos = {registry.get(kind, name) for kind, name in used if name in registry.plugins(kind)}
    return {
        "ensemblekit": version("ensemblekit"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        **machine_facts(),
        "seed": spec.seed,
        "plugins": [
            {"kind": info.kind, "name": info.name, "package": info.package, "version": info.version}
            for info in sorted(infos, key=lambda info: (info.kind, info.name))
        ],
    }


def machine_facts() -> dict[str, Any]:
    """Return what the last bits of a result depend on, beside the spec and the engine."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": num_cores(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "compiled_code": kernels.library() is not None,
    }
