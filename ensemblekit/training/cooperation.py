"""What the processes of one training settle before it: that they are alike, and who trains which network."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import EnsemblekitError, RanksDifferError, UsageError
from ensemblekit.data.loading import Data
from ensemblekit.members.build import build_network
from ensemblekit.members.layout import output_layout
from ensemblekit.members.state import MemberState
from ensemblekit.ranks.assignment import assign
from ensemblekit.ranks.group import Group
from ensemblekit.ranks.launch import local_rank
from ensemblekit.ranks.session import is_restarted, launch
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.manifests import Position
from ensemblekit.runs.own_files import ENVIRONMENT
from ensemblekit.spec.sections import NetworkPlan, Spec

SHARED_SECONDS = 5.0
"""After so long, shared storage shows on one machine what another has written."""


def rank_device(device: torch.device, group: Group) -> torch.device:
    """Return the device of this rank: with several ranks on a machine, each has its own.

    Raises:
        UsageError: a machine has fewer devices than ranks.
    """
    if group.is_alone or device.type == "cpu" or device.index is not None:
        return device
    count = torch.accelerator.device_count()
    if local_rank() >= count:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", str(local_rank() + 1))
        what = f"there are {ranks} ranks on this machine, but {count} devices of type {device.type}"
        raise UsageError(what, "torchrun", f"start at most {count} with --nproc-per-node, or set engine.device = cpu")
    return torch.device(device.type, local_rank())


def check_alike(spec: Spec, data: Data, device: torch.device, group: Group) -> None:
    """Raise a `RanksDifferError` on all ranks if one has another spec, data, versions or kind of device."""
    if group.is_alone:
        return
    facts = {
        "ensemblekit": version("ensemblekit"),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": device.type,
        "spec": spec.to_dict(),
        "data": data.fingerprint,
    }
    rows = group.gather_json(facts)
    for rank, row in enumerate(rows):
        for fact, value in row.items():
            if value != rows[0][fact]:
                what = f"rank {rank} has another {fact} than rank 0: {_difference(rows[0][fact], value)}"
                raise RanksDifferError(what, "torchrun", "give all ranks the same files, versions and arguments")


def _difference(first: Any, other: Any) -> str:
    """Say in which keys two facts differ, or in which values."""
    if not isinstance(first, Mapping):
        return f"{other} and {first}"
    before, after = dict(_items(first)), dict(_items(other))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return ", ".join(f"{key} is {after.get(key)} and {before.get(key)}" for key in keys[:3])


def _items(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _items(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def check_generators(members: Sequence[MemberState], group: Group) -> None:
    """Raise a `UsageError` if networks use torch's global random generator: its numbers depend on who else uses it."""
    for member in members:
        if member.uses_global_rng and not group.is_alone:
            what = f'model "{member.model.name}" uses torch\'s global random generator, which differs from rank to rank'
            fix = "train it in one process, or let its layers sample as docs/writing-plugins.md says"
            raise UsageError(what, "torchrun", fix)


def check_shared(path: Path, group: Group) -> None:
    """Raise a `RanksDifferError` on all ranks if one of them does not see what rank 0 has just written to the run."""
    if group.is_alone:
        return
    written = group.first(_digest(path))
    deadline = time.monotonic() + SHARED_SECONDS
    while not (is_shared := _digest(path) == written) and time.monotonic() < deadline:
        time.sleep(SHARED_SECONDS / 20)
    for rank, is_seen in enumerate(group.gather_json(is_shared)):
        if not is_seen:
            what = f"rank {rank} does not see the run directory that rank 0 writes"
            raise RanksDifferError(what, str(path), "choose a directory on storage that all ranks share")


def _digest(path: Path) -> str:
    """Return a checksum of what a run records about its environment; empty if it is not there."""
    with suppress(OSError):
        return sha256((path / ENVIRONMENT).read_bytes()).hexdigest()
    return ""


def check_same_checkpoint(position: Position, group: Group) -> None:
    """Raise a `RanksDifferError` on all ranks if one of them has found another checkpoint than rank 0."""
    positions = group.gather_json(str(position))
    for rank, found in enumerate(positions):
        if found != positions[0]:
            what = f"rank {rank} found the checkpoint of {found}, and rank 0 that of {positions[0]}"
            raise RanksDifferError(what, "run directory", "resume on storage that all ranks share")


def run_begun_before(out: str | Path | None, name: str) -> str | None:
    """Return the run directory of processes that torchrun has started again; None if it has not, or there is none."""
    if not is_restarted():
        return None
    own = launch()
    for path in [Path(out)] if out else sorted(Path("runs").glob(f"{name}-*")):
        with suppress(EnsemblekitError):
            # one in common is enough: torchrun may have taken another machine for one that is gone
            if own & set(RunDirectory.open(path).environment.get("launch", ())):
                return str(path.absolute())
    return None


def network_ranks(spec: Spec, info: DataInfo, device: torch.device, group: Group) -> dict[int, int]:
    """Return the rank of each network by its index: as evenly as their measured costs allow."""
    if group.is_alone:
        return {}
    plans = spec.networks
    costs = dict.fromkeys((plan.group.model.key for plan in plans), 1.0)
    if len(costs) > 1 and group.is_first:
        costs = {plan.group.model.key: _step_seconds(plan, spec, info, device) for plan in plans}
    costs = group.agree("costs", costs)
    ranks = assign([costs[plan.group.model.key] for plan in plans], group.size)
    return {plan.index: rank for plan, rank in zip(plans, ranks, strict=True)}


def _step_seconds(plan: NetworkPlan, spec: Spec, info: DataInfo, device: torch.device) -> float:
    """Measure a batch forward and backward; a network that does not learn costs next to nothing."""
    model = plan.group.model
    network = build_network(plan, output_layout(spec, info), info, spec.seed).to(device)
    if model.fitted or not any(parameter.requires_grad for parameter in network.parameters()):
        return 1e-6
    inputs = torch.zeros(spec.training.batch_size, *info.input_shape, device=device)
    shortest = float("inf")
    for _ in range(2):  # the first pays for the set-up
        started = time.perf_counter()
        network(inputs).float().sum().backward()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest
