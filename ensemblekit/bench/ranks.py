"""Training steps on several ranks against the threaded engine in one process, and what the ranks exchange."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from socket import socket

import torch

from ensemblekit.bench.progress import Report, RoundClock, unreported
from ensemblekit.bench.subprocesses import SubprocessContestant
from ensemblekit.bench.timing import Timing, interleaved
from ensemblekit.bench.workloads import Workload, all_workloads
from ensemblekit.core.errors import UsageError
from ensemblekit.core.memory import keep_freed_memory
from ensemblekit.core.threads import num_cores
from ensemblekit.engines.base import Engine
from ensemblekit.engines.selection import choose_engine, engine_class
from ensemblekit.engines.timed_steps import Work
from ensemblekit.ranks.group import ProcessGroup
from ensemblekit.ranks.session import joined_ranks

CPU = torch.device("cpu")
BASELINE, BASELINE_ENGINE = "one process", "threaded"
NUM_RANKS = (1, 2)
WORKLOADS = ("real-convolutions", "real-uncoupled", "tiny-16")
QUICK_WORKLOADS = ("small-convolutions", "tiny-uncoupled", "tiny-16")
ROUNDS = 7
STEPS_APART = 4
"""Steps in a round of members that do not wait for each other: as in a run, ranks meet only after several of them."""
BARE_EXCHANGES = 21
RESNET_18_CLASSES, RESNET_18_PARAMETERS = 100, 11_227_812
"""Of torchvision's ResNet-18."""
FLOAT_BYTES = 4


@dataclass(frozen=True)
class RoundOnRank:
    """What one rank did in one round."""

    seconds: float
    seconds_in_exchanges: float
    bytes_sent: int


class RankSteps:
    """Training steps of one rank, in a process of its own; calling it runs the steps of a round.

    Args:
        workload: what to train.
        engine: computes the members of this rank; None: the fastest.
        rank: of this process.
        num_ranks: how many there are.
        port: where the first one waits for the others.
    """

    def __init__(self, workload: Workload, engine: str | None, rank: int, num_ranks: int, port: int) -> None:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        environment = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in environment.items()})
        torch.set_num_threads(num_cores())
        keep_freed_memory()
        self.workload, self.stack = workload, ExitStack()
        self.group = self.stack.enter_context(joined_ranks())
        self.batch, self.weights = workload.batch(CPU), workload.sample_weights(CPU)
        members, objective = workload.members(CPU, self.group), workload.objective()
        settings = workload.settings(CPU, self.group)
        work = Work(members, objective, settings, self.batch, self.weights)
        self.engine_name = engine or choose_engine(work).engine
        self.engine: Engine = engine_class(self.engine_name)(members, objective, settings)
        self.stack.callback(self.engine.close)
        self.steps = count()

    def name_of_engine(self) -> str:
        """Return which engine computes the members of this rank."""
        return self.engine_name

    def __call__(self) -> RoundOnRank:
        sent, waited = self._exchanged()
        started = time.perf_counter()
        results = [
            self.engine.train_step(self.batch, self.weights, self.workload.learning_rate, next(self.steps))
            for _ in range(self.workload.steps)
        ]
        if self.engine.is_apart:  # as in a run, whose metrics need the outputs of all members
            self.engine.collect([value for value, _ in results], [outputs for _, outputs in results])
        sent_after, waited_after = self._exchanged()
        return RoundOnRank(time.perf_counter() - started, waited_after - waited, sent_after - sent)

    def _exchanged(self) -> tuple[int, float]:
        """Return the bytes that this rank has sent so far, and its seconds in exchanges."""
        return (self.group.bytes_sent, self.group.seconds) if isinstance(self.group, ProcessGroup) else (0, 0.0)

    def bare_exchange(self) -> float:
        """Return the median time of an exchange of one step's outputs, when no rank waits for another."""
        rows = torch.zeros(self.engine.active_rows.counts[self.group.rank], len(self.batch.index), self.workload.width)
        seconds = []
        for _ in range(BARE_EXCHANGES):
            self.group.gather_json(None)
            started = time.perf_counter()
            self.engine.gather(rows)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def close(self) -> None:
        """Leave the other ranks."""
        self.stack.close()


class RankContestants:
    """All ranks of one contestant; calling it runs a round and waits for the last of them."""

    def __init__(self, ranks: Sequence[SubprocessContestant]) -> None:
        self.ranks = ranks
        # waits until all are ready, so that nobody else measures engines at the same time
        self.engine = str(self.call("name_of_engine")[0])
        self.rounds: list[list[RoundOnRank]] = []

    def call(self, name: str) -> list[object]:
        """Call a method on all ranks at once; returns the result of each."""
        for rank in self.ranks:
            rank.begin(name)
        return [rank.result() for rank in self.ranks]

    def __call__(self) -> None:
        self.rounds.append([result for result in self.call("__call__") if isinstance(result, RoundOnRank)])

    @property
    def share_in_exchanges(self) -> float:
        """The share of their time that ranks spend in exchanges, in the median round after the first."""
        shares = [sum(r.seconds_in_exchanges for r in ranks) / sum(r.seconds for r in ranks) for ranks in self.rounds]
        return statistics.median(shares[1:])

    @property
    def bytes_per_round(self) -> int:
        """What the rank that sends most sends in a round."""
        return max(rank.bytes_sent for rank in self.rounds[-1])


@contextmanager
def rank_contestants(workload: Workload, engine: str | None, num_ranks: int) -> Iterator[RankContestants]:
    """Start ranks, each in a new process with its share of the cores."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ExitStack() as stack:
        makers = [partial(RankSteps, workload, engine, rank, num_ranks, port) for rank in range(num_ranks)]
        ranks = RankContestants([stack.enter_context(SubprocessContestant(make)) for make in makers])
        yield ranks
        ranks.call("close")


@dataclass(frozen=True)
class RankEntry:
    """Measurements of one contestant, per step."""

    contestant: str
    engine: str
    num_ranks: int
    timing: Timing
    speed: float
    """Relative to the threaded engine in one process: its median time divided by this one's."""
    share_in_exchanges: float
    """The share of time in exchanges, waiting for the slowest rank included."""
    bytes_sent: float
    """What a rank sends per step."""
    bare_exchange: float
    """Seconds of an exchange of one step's outputs, when no rank waits for another."""


@dataclass(frozen=True)
class RankResult:
    """All measurements of one workload on ranks."""

    workload: Workload
    entries: tuple[RankEntry, ...]
    parameters: int
    """Trainable parameters of all members together."""

    @property
    def num_members(self) -> int:
        return self.workload.run_spec.ensemble.members

    def all_reduce_bytes(self, num_ranks: int, parameters: int | None = None) -> float:
        """What a rank sends per step to average the gradients of all members; see `all_reduce_bytes`."""
        return all_reduce_bytes(num_ranks, self.parameters if parameters is None else parameters)


def all_reduce_bytes(num_ranks: int, parameters: int) -> float:
    """What a rank sends in a ring all-reduce of float32 gradients: 2 · (n − 1) / n · 4 · P bytes."""
    return 2 * (num_ranks - 1) / num_ranks * FLOAT_BYTES * parameters


def rank_workloads(names: Sequence[str], quick: bool = False) -> list[Workload]:
    """The workloads to train on ranks: those of these names, or three that differ in size and coupling.

    Raises:
        UsageError: a name is unknown, or the workload is not about training.
    """
    known = {name: workload for name, workload in all_workloads(quick).items() if workload.kind == "training"}
    for name in names:
        if name not in known:
            raise UsageError(f'no workload "{name}" for ranks', "--only", f"choose from {', '.join(known)}")
    chosen = [known[name] for name in names or (QUICK_WORKLOADS if quick else WORKLOADS)]
    return chosen if quick else [thorough(workload) for workload in chosen]


def thorough(workload: Workload) -> Workload:
    """The workload with enough rounds and steps to compare ranks with one process."""
    steps = max(workload.steps, STEPS_APART if workload.objective().separable else 1)
    return replace(workload, rounds=max(workload.rounds, ROUNDS), steps=steps)


def measure_ranks(workload: Workload, report: Report = unreported) -> RankResult:
    """Time the threaded engine in one process, and ranks with the engine that is fastest in them, in turn.

    Args:
        workload: What to train.
        report: Told what is measured now and how long the rest takes.
    """
    report("starting ranks", None)
    with ExitStack() as stack:
        contestants = {BASELINE: stack.enter_context(rank_contestants(workload, BASELINE_ENGINE, 1))}
        for number in NUM_RANKS:
            name = f"{number} rank{'s' * (number > 1)}"
            contestants[name] = stack.enter_context(rank_contestants(workload, None, number))
        if contestants[name].engine != BASELINE_ENGINE:
            same_engine = rank_contestants(workload, BASELINE_ENGINE, number)
            contestants[f"{name}, {BASELINE_ENGINE}"] = stack.enter_context(same_engine)
        clock = RoundClock(workload.rounds, report)
        rounds = interleaved(contestants, workload.rounds, clock.round_finished)
        timings = {name: timing.divided_by(workload.steps) for name, timing in rounds.items()}
        entries = [_entry(name, ranks, workload, timings) for name, ranks in contestants.items()]
    networks = [member.network for member in workload.members(CPU)]
    parameters = [parameter for network in networks for parameter in network.parameters() if parameter.requires_grad]
    return RankResult(workload, tuple(entries), sum(parameter.numel() for parameter in parameters))


def _entry(name: str, ranks: RankContestants, workload: Workload, timings: dict[str, Timing]) -> RankEntry:
    bare = [value for value in ranks.call("bare_exchange") if isinstance(value, float)]
    return RankEntry(
        name,
        ranks.engine,
        len(ranks.ranks),
        timings[name],
        timings[BASELINE].median / timings[name].median,
        ranks.share_in_exchanges,
        ranks.bytes_per_round / workload.steps,
        max(bare) if len(ranks.ranks) > 1 else 0.0,
    )
