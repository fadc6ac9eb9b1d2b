"""Rows of growth: time against members, batch size and samples, and the share of a run that is not training."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from fitting import CPU, chosen_engine, clothing, tensors
from measured import Measured, Options, Row, ratios, workload
from torch.utils.data import TensorDataset

import ensemblekit as ek
from ensemblekit.bench.contestants import contest_of
from ensemblekit.bench.timing import interleaved
from ensemblekit.bench.workloads import Workload

TIMES = 4
"""Factor by which the work grows."""


def growth(options: Options) -> Iterator[Measured]:
    """Four times as much work takes four times as long: the cost of a member, sample or batch stays the same."""
    base = workload("small-convolutions", options)
    few = base.changed(ensemble={"members": 4})
    many = base.changed(ensemble={"members": 4 * TIMES})
    yield per_piece("time for each member, ResNet W=16, M=16", "M=4", few, many)
    small = replace(base, batch_size=max(8, base.batch_size // 2))
    large = replace(small, batch_size=small.batch_size * TIMES)
    yield per_piece("time for each sample of a batch, ResNet W=16, M=8, B=256", "B=64", small, large)
    yield reading(options)


def per_piece(work: str, against: str, small: Workload, large: Workload) -> Measured:
    """Time per unit of work, with the engine that is chosen for the larger workload."""
    engine = chosen_engine(large)
    with ExitStack() as stack:
        makers = {"small": contest_of(small, CPU).makers[engine], "large": contest_of(large, CPU).makers[engine]}
        timings = interleaved({name: make(stack) for name, make in makers.items()}, small.rounds)
    by_round = [ratio / TIMES for ratio in ratios(timings["large"], timings["small"])]
    ratio = timings["large"].median / timings["small"].median / TIMES
    return Measured(work, against, "≤ 1.1×", ratio, min(by_round), max(by_round), f"engine {engine}")


def reading(options: Options) -> Measured:
    """Reading the batches of one epoch with four times as many images."""
    num_samples = 256 if options.smoke else 12_500
    splits = {}
    for name, size in {"small": num_samples, "large": TIMES * num_samples}.items():
        images = torch.zeros(size, 3, 32, 32, dtype=torch.uint8)
        samples = (images, torch.zeros(size, dtype=torch.int64))
        splits[name] = ek.data_from_datasets(
            samples, samples, 0, augment=("crop", "flip"), normalise=True, validation_fraction=0
        ).train

    def one_epoch(split: ek.Split) -> None:
        for _ in split.training_batches(128, 0, epoch=1):
            pass

    timings = interleaved({name: lambda split=split: one_epoch(split) for name, split in splits.items()}, 5)
    ratio = timings["large"].median / timings["small"].median / TIMES
    by_round = [ratio / TIMES for ratio in ratios(timings["large"], timings["small"])]
    work = "time for each sample of an epoch's batches, N=50,000"
    return Measured(work, "N=12,500", "≤ 1.1×", ratio, min(by_round), max(by_round), "crop, flip and normalise")


def shares(options: Options) -> Iterator[Measured]:
    """A run of ten epochs with evaluation and a checkpoint after every epoch."""
    epochs, sizes = (1, (64, 32)) if options.smoke else (10, (6000, 1000))
    data, source = clothing(*sizes)
    base = workload("small-convolutions", options).run_spec
    spec = ek.load_spec(
        {
            "data": {"name": "given"},
            "model": base.model.to_table(),
            "ensemble": {"members": base.ensemble.members},
            "method": {"name": "gncl"},
            "training": {"epochs": epochs, "batch_size": 128},
        }
    )
    out = Path(tempfile.mkdtemp(), "run")
    parts = tuple(TensorDataset(*tensors(part)) for part in (data.train, data.test))
    seconds = ek.train(spec, out=out, data=parts, progress=False).seconds
    shutil.rmtree(out.parent)
    total = sum(seconds.values())
    note = (
        f"{source}, {sizes[0]:,} training samples, {sizes[1]:,} test samples, {epochs} epochs, {total:.0f} s in total"
    )
    for what in ("start", "evaluation", "checkpoints"):
        share = 100 * seconds[what] / total
        work = f"share of {what if what != 'start' else 'start-up'}, ResNet W=16, M=8"
        asked = "≤ 5 %" if what == "evaluation" else "≤ 3 %"
        yield Measured(work, "the whole run", asked, share, share, share, note)


ROWS_OF_GROWTH: dict[str, Row] = {"growth": growth, "shares": shares}
