"""Rows of inference: one sample at a time, and binary networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from fitting import CPU
from measured import Measured, Options, Row, faster, workload

from ensemblekit.bench.contestants import NAIVE, OURS, repeated
from ensemblekit.bench.naive_loop import naive_outputs
from ensemblekit.bench.timing import Timing, interleaved
from ensemblekit.bench.workloads import Workload
from ensemblekit.core.memory import keep_freed_memory
from ensemblekit.inference.ensemble import Ensemble

ROUNDS = 9


def single_sample(options: Options) -> Iterator[Measured]:
    """One sample at a time, as a service computes it, with everything that a call of the ensemble does."""
    rows = {"tiny-16": ("MLP 64-64-64-10", "≥ 3×", 100), "inference-16": ("ResNet W=32 on 3×32×32", "≥ 2×", 10)}
    for name, (what, asked, steps) in rows.items():
        here = replace(workload(name, options), batch_size=1, steps=1 if options.smoke else steps)
        timings = in_turn({NAIVE: naive_round(here), OURS: our_round(here)}, options)
        note = f"{1e3 * timings[OURS].median / here.steps:.3g} ms a call"
        yield faster(f"one sample at a time, {what}, M=16", "naive loop", asked, timings[NAIVE], timings[OURS], note)


def binary(options: Options) -> Iterator[Measured]:
    """Binary networks against the loop over them, and against networks of the same width with float weights."""
    width = 4 if options.smoke else 32
    floats = workload("inference-16", options).changed(ensemble={"members": 2 if options.smoke else 8})
    floats = replace(floats.changed(model={"width": width}), steps=1)
    signs = floats.changed(model={"name": "binary_resnet", "width": width})
    works = {NAIVE: naive_round(signs), OURS: our_round(signs), "float": our_round(floats)}
    timings = in_turn(works, options)
    work = "inference, binary_resnet W=32, M=8, batch 256"
    yield faster(work, "naive loop", "≥ 1.5×", timings[NAIVE], timings[OURS], "")
    yield faster(work, "resnet W=32, M=8", "≥ 1.5×", timings["float"], timings[OURS], "both by ensemblekit")


def naive_round(here: Workload) -> Callable[[], object]:
    networks = [member.network.eval() for member in here.members(CPU)]
    inputs = here.batch(CPU).inputs
    return torch.inference_mode()(repeated(lambda: naive_outputs(networks, inputs), here.steps))


def our_round(here: Workload) -> Callable[[], object]:
    ensemble = Ensemble([member.network for member in here.members(CPU)], here.run_spec, here.info).eval()
    inputs = here.batch(CPU).inputs
    return repeated(lambda: ensemble(inputs), here.steps)


def in_turn(works: dict[str, Callable[[], object]], options: Options) -> dict[str, Timing]:
    keep_freed_memory()  # as in a run, for all of them: they share the process
    return interleaved(works, 1 if options.smoke else ROUNDS)


ROWS_OF_INFERENCE: dict[str, Row] = {"single-sample": single_sample, "binary-inference": binary}
