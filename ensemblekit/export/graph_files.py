"""What the formats with a graph share: a file that appears once it was checked, and the facts about it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ensemblekit.core.files import atomic_write
from ensemblekit.export.formats import Exported, ExportRequest
from ensemblekit.export.tracing import TracedRun
from ensemblekit.export.verification import Agreement
from ensemblekit.runs.atomic import write_errors

WEIGHTS_SUFFIX = ".data"
"""Ending of the file that ONNX keeps large weights in."""


@contextmanager
def writing(output: Path) -> Iterator[Path]:
    """Yield a temporary path; the file appears under its final name when the block ends without an error."""
    with write_errors(output), atomic_write(output) as staged:
        yield staged
        weights = staged.with_name(staged.name + WEIGHTS_SUFFIX)
        if weights.exists():  # before the graph, which refers to it
            os.replace(weights, output.with_name(weights.name))


def exported(
    request: ExportRequest,
    name: str,
    traced: TracedRun,
    agreement: Agreement,
    usage: str,
    facts: Mapping[str, Any] | None = None,
) -> Exported:
    """Return what there is to say about a graph that was written."""
    notes = list(traced.notes)
    if agreement.num_unstable:
        notes.append(
            f"{agreement.num_unstable} of {agreement.samples} were left out of the comparison: rounding decides a sign "
            "or a threshold in their networks, in the original too"
        )
    weights = request.output.with_name(request.output.name + WEIGHTS_SUFFIX)
    files = [request.output, *([weights] if weights.exists() else [])]
    about = {
        **(facts or {}),
        "inputs": traced.metadata["inputs"],
        "outputs": traced.metadata["outputs"],
        "largest_difference": agreement.largest,
        "differences": dict(agreement.differences),
        "compared_on": agreement.samples,
        "batch_sizes": list(agreement.batch_sizes),
    }
    size = sum(file.stat().st_size for file in files)
    return Exported(request.output, name, size, usage, about, tuple(notes))
