"""The public function `ensemblekit.export`, and the table of the formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ensemblekit.core.errors import RunError, UsageError, choices
from ensemblekit.export.formats import Exported, ExportRequest, Format, InputType
from ensemblekit.export.hub import write_hub
from ensemblekit.export.onnx_files import write_onnx
from ensemblekit.export.torch_files import write_torch
from ensemblekit.members.python_model import NetworkLike
from ensemblekit.members.python_specs import PluginLike, registry_of
from ensemblekit.runs.directory import RunDirectory

FORMATS: Mapping[str, Format] = {
    "onnx": Format("model.onnx", write_onnx, ("onnx", "onnxscript", "onnxruntime"), "onnx"),
    "torch": Format("model.pt2", write_torch),
    "hub": Format("hub", write_hub, option="licence"),
}
"""All formats by name."""


def export(
    path: str | Path,
    format: str = "onnx",
    output: str | Path | None = None,
    input_type: InputType | None = None,
    licence: str | None = None,
    data: Any = None,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
) -> Exported:
    """Write the ensemble of a run in a format of other tools.

    The formats "onnx" and "torch" (torch.export) have the whole ensemble as one graph for batches of any size: it
    prepares inputs, runs all members, combines and calibrates their outputs as the run does. The file is then run
    beside the original, on test samples.

    The format "hub" is a folder in the form that model hubs take: `model.safetensors`, `config.json` and README.md, a
    model card. `ensemblekit.load` reads it. Nothing is uploaded.

    Args:
        path: the directory of a finished run.
        format: "onnx", "torch" or "hub".
        output: the file or folder to write, which appears once it was checked. A folder must be empty or not exist.
            Default: model.onnx, model.pt2 or the folder hub in the run directory.
        input_type: type of inputs that are stored as bytes, such as images: "uint8" for values from 0 to 255,
            "float32" for values from 0 to 1. Default: as the run's test data has them, else "uint8" for images.
        licence: the licence of the model in the card of the format "hub", for example "MIT". Default: not stated.
        data: the same data as for `train`, if the run was started with data from Python; its test samples are compared.
        plugins: plugin classes that the run uses, or local Python files with such classes.
        model: the same model as for `train`, if the run was started with a model from Python.

    Returns:
        What was written: `path`, `num_bytes`, `usage`, and in `facts` the inputs, the outputs and the largest
        difference from the original; `to_dict()`.

    Raises:
        UsageError: the format is unknown, its extra is not installed, it has no such option, or the ensemble cannot be
            exported.
        PluginError: torch.export cannot trace a network of the run.
        NumericError: the outputs of the file differ from those of the original by more than 1e-4.
        RunError: the run has not finished, is damaged, or the file cannot be written.
    """
    if format not in FORMATS:
        raise UsageError(f'no format "{format}"', "format", choices(format, FORMATS))
    chosen = FORMATS[format]
    chosen.check_options(format, input_type=input_type, licence=licence)
    chosen.check_installed(format)
    directory = RunDirectory.open(path)
    if not directory.is_finished:
        raise RunError("the run has not finished", str(path), f"ensemblekit resume {path}")
    target = directory.path / chosen.default_name if output is None else Path(output)
    return chosen.write(ExportRequest(directory.path, target, registry_of(plugins, model), data, input_type, licence))
