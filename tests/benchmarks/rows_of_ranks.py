"""Rows of members on several ranks: speed against one process, and bytes against an all-reduce of the gradients."""

from __future__ import annotations

from collections.abc import Iterator

from measured import Measured, Options, Row, faster, workload

from ensemblekit.bench.ranks import RESNET_18_PARAMETERS, measure_ranks, thorough

RESNETS = "ResNet W=32, M=16, B=128"
SPEEDS = {
    "real-convolutions": (f"{RESNETS}, GNCL λ=0.5, 2 ranks", "≥ 0.9×"),
    "real-uncoupled": (f"{RESNETS}, independent, 2 ranks", "≥ 1×"),
}


def ranks(options: Options) -> Iterator[Measured]:
    for name, (work, asked) in SPEEDS.items():
        here = workload(name, options)
        result = measure_ranks(here if options.smoke else thorough(here))
        several = [entry for entry in result.entries if entry.num_ranks == 2]
        best, one = max(several, key=lambda entry: entry.speed), result.entries[0]
        note = f"engine {best.engine}; {100 * best.share_in_exchanges:.1f} % of the time in exchanges"
        yield faster(work, "threaded engine in one process", asked, one.timing, best.timing, note)
        if name == "real-uncoupled":
            continue
        models = {
            RESNETS: (result.parameters, "≥ 6×"),
            "16 ResNet-18 (computed)": (16 * RESNET_18_PARAMETERS, "≥ 800×"),
        }
        for model, (parameters, least) in models.items():
            times = result.all_reduce_bytes(2, parameters) / best.bytes_sent
            against = "bytes of a gradient all-reduce"
            yield Measured(f"bytes per step and rank, {model}", against, least, times, times, times)


ROWS_OF_RANKS: dict[str, Row] = {"ranks": ranks}
