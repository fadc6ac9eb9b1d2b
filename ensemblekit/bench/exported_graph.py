"""Predictions by onnxruntime, from the exported graph of the same ensemble."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from ensemblekit.core.errors import UsageError
from ensemblekit.export.exporting import FORMATS
from ensemblekit.export.input_networks import NumberInputs
from ensemblekit.export.onnx_files import onnx_runner, translate
from ensemblekit.export.tracing import trace_ensemble
from ensemblekit.inference.ensemble import Ensemble

ONNXRUNTIME = "onnxruntime"
"""The name of the contestant."""


def missing_packages() -> str:
    """Say which packages onnxruntime's contestant needs and how to install them; empty if they are there."""
    try:
        FORMATS["onnx"].check_installed("onnx")
    except UsageError as error:
        return f"{error.what}; {error.fix}"
    return ""


def onnx_step(ensemble: Ensemble, inputs: Tensor, stack: ExitStack) -> Callable[[], object]:
    """Export an ensemble; returns a step that predicts inputs (B, *input_shape) by onnxruntime, on all cores."""
    directory = Path(stack.enter_context(TemporaryDirectory(prefix="ensemblekit-")))
    network = NumberInputs(ensemble.info.input_shape, "float32")
    program, outputs = trace_ensemble(ensemble, network)
    translate(program, [one.name for one in network.inputs], list(outputs)).save(directory / "model.onnx")
    run = onnx_runner(directory / "model.onnx")
    return lambda: run([inputs])
