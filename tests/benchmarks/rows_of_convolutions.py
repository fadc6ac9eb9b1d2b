"""Rows of convolutional members: their share of the machine's peak rate, and models other than the ResNet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from fitting import CPU
from measured import Measured, Options, Row, against_naive, workload

from ensemblekit.bench.contestants import contest_of
from ensemblekit.bench.timing import GemmMeter, interleaved

ENGINE, MATRIX_PRODUCTS = "threaded", "rate of matrix products"
SHARES = {
    "real-convolutions": ("ResNet W=32, M=16, GNCL", 0.78),
    "small-convolutions": ("ResNet W=16, M=8, GNCL", 0.55),
    "small-weighted": ("ResNet W=16, M=8, bagging", 0.62),
}
"""For each workload, its description and the share of the rate of matrix products that is asked for."""


def gemm_share(options: Options) -> Iterator[Measured]:
    """Useful arithmetic per second as a share of two peaks: of matrix products, and the better of these and others."""
    for name, (work, asked) in SHARES.items():
        here = workload(name, options)
        contest, meter = contest_of(here, CPU), GemmMeter(CPU)
        with ExitStack() as stack:
            step = contest.makers[ENGINE](stack)
            timing = interleaved({ENGINE: step}, here.rounds, meter.measure)[ENGINE].divided_by(here.steps)
        assert contest.flops_of_step is not None
        flops = contest.flops_of_step()
        peaks = {MATRIX_PRODUCTS: meter.rates["matmul"], "peak rate": meter.best_rate}
        for against, rate in peaks.items():
            shares = [flops / seconds / rate for seconds in timing.seconds]
            wanted = f"≥ {asked}" if against == MATRIX_PRODUCTS else "–"
            note = f"engine {ENGINE}; {flops / timing.median / 1e9:,.0f} of {rate / 1e9:,.0f} GFLOP/s"
            yield Measured(work, against, wanted, flops / timing.median / rate, min(shares), max(shares), note)


def binary_training(options: Options) -> Iterator[Measured]:
    yield against_naive("binary-8", "binary_resnet W=32, M=8, B=128, 3×32×32, GNCL, training", "≥ 1.5×", options)


def mobilenet(options: Options) -> Iterator[Measured]:
    yield against_naive("mobilenet-8", "mobilenet_v3_tiny, M=8, B=32, 3×64×64, GNCL", "≥ 1.5×", options)


ROWS_OF_CONVOLUTIONS: dict[str, Row] = {
    "gemm-share": gemm_share,
    "binary-training": binary_training,
    "mobilenet": mobilenet,
}
