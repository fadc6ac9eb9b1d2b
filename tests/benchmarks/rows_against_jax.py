"""Rows that measure against JAX, which runs in an environment of its own: see jax_digits.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from fitting import CPU, chosen_engine
from measured import Measured, Options, Row, faster
from rows_against_others import timed_command

from ensemblekit.bench.contestants import OURS, contest_of
from ensemblekit.bench.timing import interleaved
from ensemblekit.bench.workloads import all_workloads

JAX = "JAX"
SCRIPT = Path(__file__).with_name("jax_digits.py")
STEPS = 50
"""Steps of an epoch that jax_digits.py compiles."""
ASKED = {4: "≥ 1×", 8: "≥ 1×", 16: "≥ 1.1×", 64: "≥ 1.2×", 256: "≥ 1.5×"}


def steps(options: Options) -> Iterator[Measured]:
    """Training steps of MLPs; an epoch of JAX is one compiled scan over its batches."""
    assert options.jax_python is not None
    for members, asked in ASKED.items():
        here = replace(all_workloads()["tiny-16"], steps=STEPS).changed(ensemble={"members": members})
        engine = chosen_engine(here)
        with ExitStack() as stack:
            theirs = stack.enter_context(epochs_of_jax(options.jax_python, members))
            ours = contest_of(here, CPU).makers[engine](stack)
            timings = interleaved({JAX: theirs, OURS: ours}, 1 if options.smoke else 9)
        work = f"MLP step (64-64-64-10, batch norm, B=64), M={members}"
        against = "JAX: jit, vmap over members, an epoch in one scan"
        note = f"engine {engine}, {1e3 * timings[OURS].median / STEPS:.3g} ms per step"
        yield faster(work, against, asked, timings[JAX], timings[OURS], note)


@contextmanager
def epochs_of_jax(python: Path, members: int) -> Iterator[object]:
    """A process that has compiled an epoch; calling this runs it."""
    command = [str(python), str(SCRIPT), "--serve", "--members", str(members)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        def epoch() -> None:
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()

        yield epoch
        process.stdin.close()


def whole_run(members: int, options: Options) -> Iterator[Measured]:
    """The command and a JAX script that does the same work, each as a process from start to end."""
    assert options.jax_python is not None
    epochs = 1 if options.smoke else 30
    script = [str(options.jax_python), str(SCRIPT), "--members", str(members), "--epochs", str(epochs)]
    timings, accuracy = timed_command(members, epochs, {JAX: script}, 1 if options.smoke else 5)
    work = f"whole `ensemblekit train specs/digits.toml`, M={members}"
    note = f"{epochs} epochs, wall clock with start-up, compiling, evaluation and, ours only, checkpoints; "
    note += f"{timings[OURS].median:.3g} s, test accuracy {accuracy:.3f}"
    yield faster(work, "JAX script", "≥ 1×", timings[JAX], timings[OURS], note)


ROWS_AGAINST_JAX: dict[str, Row] = {
    "jax-steps": steps,
    "jax-whole-8": partial(whole_run, 8),
    "jax-whole-16": partial(whole_run, 16),
}
