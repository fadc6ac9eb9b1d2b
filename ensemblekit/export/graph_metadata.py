"""What an exported file says about itself: task, classes, inputs, outputs, metrics, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from torch import Tensor

from ensemblekit.core.files import sha256_of_file
from ensemblekit.core.input_network import InputNetwork
from ensemblekit.export.formats import ExportRequest
from ensemblekit.export.graph_outputs import DESCRIPTIONS
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.evaluation import evaluate_kept
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.run import read_run
from ensemblekit.runs.sealing import finite

BATCH = "batch"
"""The name of the size of a batch."""


def graph_metadata(
    request: ExportRequest, ensemble: Ensemble, network: InputNetwork, outputs: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the metadata of the graph of a run, as JSON has it."""
    combiner = ensemble.combiner
    return finite(
        {
            "producer": "ensemblekit",
            "ensemblekit_version": version("ensemblekit"),
            "task": ensemble.info.task,
            "classes": None if ensemble.classes is None else list(ensemble.classes),
            "members": len(next(value for name, value in outputs.items() if name == "member_outputs")),
            "loss": ensemble.loss.name,
            "combiner": combiner.name,
            "calibration": None if combiner.calibration is None else combiner.calibration.description,
            "conformal": None if combiner.conformal is None else combiner.conformal.to_json(),
            "inputs": [described.to_json() for described in network.inputs],
            "outputs": [_described(name, value) for name, value in outputs.items()],
            "metrics": _test_metrics(request, ensemble),
            "spec_sha256": sha256_of_file(request.run / "spec.toml"),
        }
    )


def _described(name: str, example: Tensor) -> dict[str, Any]:
    """Describe an output; None in its shape stands for the size of the batch."""
    shape: list[int | None] = [*example.shape]
    shape[1 if name == "member_outputs" else 0] = None
    about = {"name": name, "type": str(example.dtype).removeprefix("torch."), "shape": shape}
    return {**about, "description": DESCRIPTIONS.get(name, f"{name.replace('_', ' ')}, as the loss has it")}


def _test_metrics(request: ExportRequest, ensemble: Ensemble) -> dict[str, Any]:
    """Return the metrics of the run on its test data, with its calibration if it has kept the outputs."""
    directory = RunDirectory.open(request.run)
    loader = RunLoader(directory, request.registry)
    is_plain = ensemble.calibration is None and ensemble.conformal is None
    if is_plain or directory.read_outputs() is None:
        return dict(read_run(directory, request.registry, loader).metrics)
    return dict(evaluate_kept(loader, loader.combiner()))


def as_text(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata as texts, for formats that have nothing else: JSON, except for values that are texts."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in metadata.items()
        if value is not None
    }
