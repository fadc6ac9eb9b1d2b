"""Rows that measure the project against itself: memory and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from fitting import CPU, chosen_engine
from measured import Measured, Options, Row, ratios, workload

from ensemblekit.bench.contestants import contest_of
from ensemblekit.bench.peak_memory import peak_memory
from ensemblekit.bench.report import MEGABYTE
from ensemblekit.bench.timing import interleaved
from ensemblekit.bench.workloads import Workload


def memory(options: Options) -> Iterator[Measured]:
    base = workload("real-uncoupled", options)
    for method in ("independent", "bagging"):
        many = replace(base, spec={**base.spec, "method": {"name": method}})
        engine = chosen_engine(many)
        few = many.changed(ensemble={"members": 1 if options.smoke else 2})
        # the same number of member steps in both: fragmentation of memory grows with them, up to a point
        times = many.run_spec.ensemble.members // few.run_spec.ensemble.members
        yield memory_ratio(f"peak memory, {method}, M=16", "M=2", "≤ 1.3×", many, few, engine, times)


def memory_ratio(
    work: str, against: str, asked: str, one: Workload, other: Workload, engine: str, steps_of_other: int = 1
) -> Measured:
    """Growth of memory when training `one`, as a multiple of that when training `other`."""
    mine, theirs = peak_memory(one, engine), peak_memory(other, engine, steps_of_other)
    ratio = mine / theirs
    note = f"engine {engine}; growth {mine / MEGABYTE:,.0f} MB against {theirs / MEGABYTE:,.0f} MB"
    return Measured(work, against, asked, ratio, ratio, ratio, note)


def recompute(options: Options) -> Iterator[Measured]:
    keeping = workload("real-convolutions", options)
    again = keeping.changed(engine={"recompute": True})
    engine = chosen_engine(keeping)
    work, against = "GNCL λ=0.5 with `recompute`, W=32, M=16", "without"
    yield memory_ratio(f"peak memory, {work}", against, "≤ 0.35×", again, keeping, engine)
    with ExitStack() as stack:
        makers = {"keeping": contest_of(keeping, CPU).makers[engine], "again": contest_of(again, CPU).makers[engine]}
        timings = interleaved({name: make(stack) for name, make in makers.items()}, keeping.rounds)
    times = ratios(timings["again"], timings["keeping"])
    ratio = timings["again"].median / timings["keeping"].median
    yield Measured(f"time, {work}", against, "≤ 1.4×", ratio, min(times), max(times), f"engine {engine}")


ROWS_AGAINST_ITSELF: dict[str, Row] = {"memory": memory, "recompute": recompute}
