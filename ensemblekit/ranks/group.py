"""What the processes of one training exchange: rows of outputs, tensors of checkpoints, and small facts as JSON.

A process is called a rank, as in torch.distributed. Outputs travel on the device (nccl between GPUs, gloo between
CPUs), everything else through the CPU. Nothing is pickled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rejoining:
    """What a rank that was started again alone has to know."""

    epoch: int
    step: int
    """The checkpoint to begin with."""
    facts: Mapping[str, Any]
    """What ranks have agreed on before, by name."""


class Group:
    """The processes of a training: here only this one. Several are a `ProcessGroup`."""

    rank = 0
    size = 1
    rejoins: Rejoining | None = None
    """What a rank that was started again alone begins with, until it has caught up with the others' checkpoint."""
    gives_up: Callable[[], bool] = staticmethod(lambda: False)
    """Whether this rank is asked to stop, so that it does not wait for one that is started again."""
    keeps_journal = False
    """Whether a rank can be started again alone: what follows a checkpoint must depend on that checkpoint only."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which owns the run directory and the display."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks, rank by rank; `counts` says how many each has."""
        return rows

    def gather_json(self, value: Any) -> list[Any]:
        """Return a value of each rank, on all ranks."""
        return [value]

    def gather_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return the named tensors of all ranks on rank 0, those of other ranks on the CPU; only its own elsewhere."""
        return dict(tensors)

    def broadcast_tensors(self, tensors: Tensors, source: int) -> dict[str, Tensor]:
        """Return the tensors of one rank on all ranks, on the CPU where they are not its own."""
        return dict(tensors)

    def first(self, value: Any) -> Any:
        """Return the value of rank 0 on all ranks."""
        return self.gather_json(value)[0]

    def agree(self, name: str, value: Any) -> Any:
        """Return the value of rank 0 on all ranks, also on one that is started again later and asks by this name."""
        return self.first(value)

    def saved(self, epoch: int, step: int) -> None:
        """Say on all ranks that rank 0 has written a checkpoint, which a rank that is started again begins with."""


ALONE = Group()


class Pretended(Group):
    """Stands in for a group while engines are measured: rows of other ranks are made up, and nobody is waited for."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        repeated = rows.repeat(-(-sum(counts) // max(len(rows), 1)), *[1] * (rows.ndim - 1))
        return repeated[: sum(counts)] if len(rows) else rows.new_zeros(sum(counts), *rows.shape[1:])


class ProcessGroup(Group):
    """Several processes, joined by torch.distributed.

    Args:
        lost: called with the error of torch if an exchange fails, because a rank is gone or hangs; it returns the error
            to raise, which says which.
    """

    def __init__(self, lost: Callable[[Exception], Exception]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.lost = lost
        self.exchanges = 0
        """The number of exchanges so far; a rank that falls behind in it hangs."""
        self.bytes_sent = 0
        """What this rank has sent: in a ring, it also passes on what it has received."""
        self.seconds = 0.0
        """Time in exchanges, waiting for the slowest rank included; on a GPU only until they are queued."""

    @contextmanager
    def _counted(self, num_bytes: int) -> Iterator[None]:
        """Count an exchange in which this rank sends so many bytes, and say which rank is lost if it fails."""
        self.exchanges += 1
        self.bytes_sent += num_bytes
        started = time.perf_counter()
        try:
            yield
        except (RuntimeError, ValueError) as error:  # a lost peer, or a group that was shut down
            raise self.lost(error) from error
        finally:
            self.seconds += time.perf_counter() - started

    def _all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have the same shape, stacked."""
        received = tensor.new_empty(self.size, *tensor.shape)
        with self._counted((self.size - 1) * tensor.numel() * tensor.element_size()):
            dist.all_gather_into_tensor(received.flatten(), tensor.flatten())
        return received

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        own, most = rows.contiguous(), max(counts)
        if len(own) < most:  # all ranks send the same number of bytes
            own = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
        received = self._all_gather(own)
        if min(counts) == most:
            return received.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])

    def gather_json(self, value: Any) -> list[Any]:
        return [json.loads(data) for data in self._gather_bytes(json.dumps(value).encode())]

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of each rank, on all ranks."""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(data)]))]
        padded = torch.cat([own, own.new_zeros(max(sizes) - len(own))])
        received = self._all_gather(padded) if max(sizes) else padded.expand(self.size, 0)
        return [part[:size].numpy().tobytes() for part, size in zip(received, sizes, strict=True)]

    def gather_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        data = b"" if self.is_first else packed(tensors)
        sizes = [int(size) for size in self._all_gather(torch.tensor([len(data)]))]
        gathered = dict(tensors)
        with self._counted(len(data)):
            if not self.is_first:
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
                return gathered
            for source in range(1, self.size):
                received = torch.empty(sizes[source], dtype=torch.uint8)
                dist.recv(received, source)
                gathered |= tensors_from_bytes(received.numpy().tobytes())
        return gathered

    def broadcast_tensors(self, tensors: Tensors, source: int) -> dict[str, Tensor]:
        is_source = self.rank == source
        data = packed(tensors) if is_source else b""
        size = max(int(size) for size in self._all_gather(torch.tensor([len(data)])))
        buffer = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8)
        with self._counted(len(data)):
            dist.broadcast(buffer, source)
        return dict(tensors) if is_source else tensors_from_bytes(buffer.numpy().tobytes())


def packed(tensors: Tensors) -> bytes:
    """Return named tensors as bytes in the format of safetensors."""
    return tensors_to_bytes({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
