"""The format "torch": a file of torch.export, which torch loads and runs without ensemblekit."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ensemblekit.export.formats import Exported, ExportRequest
from ensemblekit.export.graph_files import exported, writing
from ensemblekit.export.tracing import trace
from ensemblekit.export.verification import Runner, verify

METADATA_FILE = "ensemblekit.json"
"""The name of the metadata in the file."""


def write_torch(request: ExportRequest) -> Exported:
    """Write the graph of a run as a file of torch.export."""
    traced = trace(request)
    with writing(request.output) as staged:
        text = json.dumps(traced.metadata, ensure_ascii=False)
        with staged.open("wb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own code
            torch.export.save(traced.program, file, extra_files={METADATA_FILE: text})
        agreement = verify(traced.ensemble, traced.samples, torch_runner(staged), str(request.output))
    arguments = ", ".join(described.name for described in traced.samples.network.inputs)
    usage = f'import torch\nmodel = torch.export.load("{request.output}").module()\noutputs = model({arguments})'
    return exported(request, "torch", traced, agreement, usage)


def torch_runner(path: Path) -> Runner:
    """Load a file of torch.export; returns what runs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.export.load(path).module()

    def run(inputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        with torch.no_grad():
            outputs: Mapping[str, Tensor] = module(*inputs)
        return outputs

    return run
