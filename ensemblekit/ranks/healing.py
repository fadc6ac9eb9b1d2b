"""Ranks of which a lost one is started again alone, and catches up by the journal of what was exchanged.

The others keep their state. The new process loads the checkpoint that the journal begins with and trains again what
followed: exchanges return what the journal has, without communication, up to the one that the others wait in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from traceback import clear_frames
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load as tensors_from_bytes
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from ensemblekit.core.errors import ResourceError
from ensemblekit.core.streams import report
from ensemblekit.ranks.group import ProcessGroup, Rejoining, Tensors, packed
from ensemblekit.ranks.journal import CHECKPOINT_TENSORS, FACTS, ROWS, SAVED, TENSORS, Journal, equal_rows, pack, unpack
from ensemblekit.ranks.process import Process
from ensemblekit.ranks.watch import Watch

PAUSE_SECONDS = 0.02
GENERATION = "generation"
"""The key of the store that counts how often a rank was replaced."""


class Broken(Exception):
    """An exchange has failed, because a rank is gone."""


class Meeting:
    """Where ranks join each other: at the start, and again when a lost one was started again.

    Args:
        store: a connection to the store that all ranks share.
        watch: looks for signs of life of the others.
        join: joins all ranks by torch.distributed, with a store of its own for each time.
    """

    def __init__(self, store: Store, watch: Watch, join: Callable[[Store], None]) -> None:
        self.store, self.watch, self.join = store, watch, join
        self.generation = int(store.get(GENERATION)) if store.check([GENERATION]) else 0

    def join_again(self, gives_up: Callable[[], bool]) -> bool:
        """Wait for all ranks, unless `gives_up` says not to, and join them; returns whether all have come."""
        self.generation += 1
        keys = [f"again/{self.generation}/{process.rank}" for process in self.watch.processes]
        self.store.set(keys[self.watch.rank], "")
        deadline = time.monotonic() + self.watch.timeout
        while not self.store.check(keys):
            if time.monotonic() > deadline or gives_up() or self.watch.has_failures:
                return False
            time.sleep(PAUSE_SECONDS)
        self.store.set(GENERATION, str(self.generation))
        self.join(PrefixStore(f"{GENERATION}/{self.generation}", self.store))
        return True


class HealingGroup(ProcessGroup):
    """Several processes that keep a journal, so that one of them can be started again alone.

    Args:
        meeting: where ranks join each other.
        lost: returns the error to raise if a lost rank does not come back.
        is_new: whether this process takes the place of one that was lost.
    """

    keeps_journal = True

    def __init__(self, meeting: Meeting, lost: Callable[[Exception], Exception], is_new: bool) -> None:
        self.meeting, self.journal, self.give_up = meeting, Journal(), lost
        self.facts: dict[str, Any] = {}
        self.replaced: list[int] = []
        """The ranks that were replaced, if it is this one that tells the user when they have caught up."""
        if not is_new:
            meeting.join(meeting.store)
        elif not meeting.join_again(self.gives_up):
            raise lost(Broken())
        super().__init__(Broken)
        if is_new:
            self._catch_up_or_end(is_new=True)

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        is_known = self.journal.number in self.journal.entries
        all_rows: Tensor = self._exchange(ROWS, lambda: ProcessGroup.gather_rows(self, rows, counts)).to(rows.device)
        first = sum(counts[: self.rank])
        if is_known and not equal_rows(all_rows[first : first + len(rows)], rows):
            what = f"rank {self.rank} was started again, and computes other outputs than before"
            raise ResourceError(what, "engine.journal", "resume the run; use an engine that is deterministic")
        return all_rows.clone()  # nobody may change the journal

    def gather_json(self, value: Any) -> list[Any]:
        if self.rejoins is not None:  # others have settled it
            return [value] * self.size
        values: list[Any] = self._exchange(FACTS, lambda: ProcessGroup.gather_json(self, value))
        return values

    def agree(self, name: str, value: Any) -> Any:
        if self.rejoins is not None:
            return self.rejoins.facts.get(name)
        self.facts[name] = self.first(value)
        return self.facts[name]

    def broadcast_tensors(self, tensors: Tensors, source: int) -> dict[str, Tensor]:
        values = self._exchange(TENSORS, lambda: ProcessGroup.broadcast_tensors(self, tensors, source))
        return {name: value.clone() for name, value in values.items()}

    def gather_tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        if self.rejoins is not None:
            return dict(tensors)
        journal = self.journal
        if not self.is_first:
            journal.given[journal.number] = tensors

        def gather() -> dict[str, Tensor]:
            gathered = ProcessGroup.gather_tensors(self, tensors)
            if self.is_first:  # it is complete, whether or not the others learn of it
                journal.add(CHECKPOINT_TENSORS, gathered)
            self._all_gather(torch.zeros(1))
            return gathered if self.is_first else {}

        others: dict[str, Tensor] = self._exchange(CHECKPOINT_TENSORS, gather)
        return dict(tensors) | others

    def saved(self, epoch: int, step: int) -> None:
        journal, position = self.journal, (epoch, step)
        if self.rejoins is not None:
            if position != (self.rejoins.epoch, self.rejoins.step):
                what = f"rank {self.rank} was started again, and does not find the last checkpoint"
                raise ResourceError(what, "run directory", "resume the run")
            self.rejoins = None
            return
        number = journal.number
        if (journal.begin, journal.position) == (number, position):
            return  # nothing was exchanged since

        def save() -> list[Any]:
            if self.is_first and journal.position is not None:  # it is written, whether or not the others learn of it
                journal.start(number, position)
            return ProcessGroup.gather_json(self, position)

        self._exchange(SAVED, save)
        journal.start(number, position)
        self.meeting.watch.patience = self.meeting.watch.timeout

    def _exchange(self, kind: str, exchange: Callable[[], Any]) -> Any:
        """Return what the journal has, or exchange; if that fails, do it again when the lost rank was replaced."""
        journal, started = self.journal, time.monotonic()
        while journal.number not in journal.entries:
            try:
                value = exchange()
            except Broken as error:
                if journal.position is None:
                    raise self.give_up(error) from error.__cause__
                self._heal(error)
            else:
                if journal.position is None and kind != SAVED:
                    journal.number += 1
                    return value
                journal.add(kind, value)
        self._tell_replaced(time.monotonic() - started)
        entry = journal.entries[journal.number]
        if entry.kind != kind:
            what = f"rank {self.rank} was started again, and exchanges {kind} where it was {entry.kind}"
            raise ResourceError(what, "engine.journal", "resume the run")
        journal.number += 1
        return entry.value

    def _tell_replaced(self, seconds: float) -> None:
        """Say which ranks were replaced, and for how long the others have waited for them, if one was."""
        if self.replaced:
            ranks = f"rank{'s' * (len(self.replaced) > 1)} {', '.join(map(str, self.replaced))}"
            report(f"note: {ranks} caught up with the others, which have waited {seconds:.1f} s")
            self.replaced = []

    def _heal(self, error: Exception) -> None:
        """Join the others again, with a new process in the place of the lost one."""
        if error.__cause__ is not None:
            clear_frames(error.__cause__.__traceback__)  # they refer to the group of torch, and keep it open
        dist.destroy_process_group()  # which frees those that wait for this rank
        if not self.meeting.join_again(self.gives_up):
            raise self.give_up(error) from error.__cause__
        self._catch_up_or_end(is_new=False)

    def _catch_up_or_end(self, is_new: bool) -> None:
        try:
            self._catch_up(is_new)
        except Broken as again:
            raise self.give_up(again) from again.__cause__

    def _catch_up(self, is_new: bool) -> None:
        """Give whoever lacks exchanges those of the rank that has most; a new process gets all of them."""
        journal, watch = self.journal, self.meeting.watch
        process = asdict(watch.processes[self.rank])
        own = {"new": is_new, "begin": journal.begin, "end": journal.end, "position": journal.position}
        rows = ProcessGroup.gather_json(self, {**own, "process": process, "facts": self.facts})
        watch.replace([Process(**row["process"]) for row in rows])
        survivors = [rank for rank, row in enumerate(rows) if not row["new"]]
        if not survivors or any(rows[rank]["position"] is None for rank in survivors):
            raise Broken
        self.replaced = [rank for rank, row in enumerate(rows) if row["new"]] if self.rank == survivors[0] else []
        donor = max(survivors, key=lambda rank: rows[rank]["end"])
        begin, end = rows[donor]["begin"], rows[donor]["end"]
        firsts = [begin if row["new"] else min(row["end"], end) for row in rows]
        self._hand_over(donor, firsts, end)
        if rows[0]["new"]:
            self._hand_over_tensors(survivors, begin)
        if is_new:
            journal.number = journal.begin = begin
            journal.position = tuple(rows[donor]["position"])
            self.facts = rows[donor]["facts"]
            self.rejoins = Rejoining(*journal.position, self.facts)

    def _hand_over(self, donor: int, firsts: Sequence[int], end: int) -> None:
        """Send the exchanges that each rank lacks, from its first one."""
        needy = [rank for rank, first in enumerate(firsts) if first < end]
        if self.rank == donor:
            for rank in needy:
                self._send(pack(self.journal.part(firsts[rank], end)), rank)
        elif self.rank in needy:
            self.journal.entries |= unpack(self._receive(donor))

    def _hand_over_tensors(self, survivors: Sequence[int], begin: int) -> None:
        """Send the tensors of a checkpoint again that a lost rank 0 had collected, but may not have written."""
        journal = self.journal
        complete = [number for number, entry in journal.entries.items() if entry.kind == CHECKPOINT_TENSORS]
        numbers = [number for number in sorted(complete) if number >= begin]
        if self.rank in survivors:
            for number in numbers:
                self._send(packed(journal.given[number]), 0)
            return
        if self.is_first and numbers and len(survivors) < self.size - 1:
            what = "several ranks were lost while a checkpoint was saved"
            raise ResourceError(what, "engine.journal", "resume the run")
        for rank in survivors if self.is_first else ():
            for number in numbers:
                journal.entries[number].value.update(tensors_from_bytes(self._receive(rank)))

    def _send(self, data: bytes, rank: int) -> None:
        try:
            dist.send(torch.tensor([len(data)]), rank)
            dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)
        except (RuntimeError, ValueError) as error:
            raise Broken from error

    def _receive(self, rank: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            dist.recv(size, rank)
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, rank)
        except (RuntimeError, ValueError) as error:
            raise Broken from error
        return data.numpy().tobytes()
