"""The format "onnx": a graph for onnxruntime and other runtimes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ensemblekit.core.errors import PluginError
from ensemblekit.export.formats import Exported, ExportRequest
from ensemblekit.export.graph_files import exported, writing
from ensemblekit.export.graph_metadata import BATCH, as_text
from ensemblekit.export.onnx_operators import translations
from ensemblekit.export.tracing import TracedRun, trace
from ensemblekit.export.verification import Runner, verify

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.onnx import ONNXProgram

OPSET = 18
"""Version of ONNX's operators: what onnxruntime has from 1.14 on."""
MAX_BYTES = 1_900_000_000
"""Weights above this are stored in a second file: ONNX's own format ends at 2 GiB."""


def write_onnx(request: ExportRequest) -> Exported:
    """Write the graph of a run as an ONNX file."""
    traced = trace(request)
    names = [described.name for described in traced.samples.network.inputs]
    model = translate(traced.program, names, list(traced.outputs))
    _describe(model, traced)
    size = sum(tensor.numel() * tensor.element_size() for tensor in traced.program.state_dict.values())
    with writing(request.output) as staged:
        model.save(staged, external_data=size > MAX_BYTES)
        agreement = verify(traced.ensemble, traced.samples, onnx_runner(staged), str(request.output))
    arguments = ", ".join(f'"{name}": {name}' for name in names)
    usage = f'import onnxruntime\nsession = onnxruntime.InferenceSession("{request.output}")\n'
    first = next(iter(traced.outputs))
    usage += f'{first} = session.run(["{first}"], {{{arguments}}})[0]'
    return exported(request, "onnx", traced, agreement, usage, {"opset": OPSET})


def translate(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> ONNXProgram:
    """Translate a traced graph to ONNX, optimised; a `PluginError` if an operation has no translation."""
    try:
        with _quiet():
            model = torch.onnx.export(
                program,
                dynamo=True,
                input_names=inputs,
                output_names=outputs,
                opset_version=OPSET,
                custom_translation_table=translations(),
                verbose=False,
            )
    except Exception as error:  # torch.onnx raises errors of many classes
        cause = error.__cause__ or error
        first = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        what = f"ONNX has no translation of an operation of the ensemble: {first:.300}"
        raise PluginError(what, "--format onnx", "use --format torch") from error
    assert model is not None
    return model


def onnx_runner(path: Path, threads: int = 0) -> Runner:
    """Load an ONNX file on the CPU; returns what runs it. `threads` is 0 for all cores."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs, outputs = ([node.name for node in nodes] for nodes in (session.get_inputs(), session.get_outputs()))

    def run(values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        arrays = {name: value.numpy() for name, value in zip(inputs, values, strict=True)}
        return {
            name: torch.from_numpy(array) for name, array in zip(outputs, session.run(outputs, arrays), strict=True)
        }

    return run


def _describe(model: ONNXProgram, traced: TracedRun) -> None:
    """Add the metadata, and call the first dimension of the inputs by its name."""
    ir_model: Any = model.model
    for node in ir_model.graph.all_nodes():
        node.metadata_props.clear()  # where its operation comes from in the source code of this machine
    ir_model.producer_name = "ensemblekit"
    ir_model.producer_version = traced.metadata["ensemblekit_version"]
    ir_model.metadata_props.update(as_text(traced.metadata))
    for value, described in zip(ir_model.graph.inputs, traced.samples.network.inputs, strict=True):
        value.doc_string = described.description
    values = [*ir_model.graph.inputs, *(output for node in ir_model.graph.all_nodes() for output in node.outputs)]
    old = str(ir_model.graph.inputs[0].shape[0])
    for value in values:
        if value.shape is not None:
            value.shape = type(value.shape)([BATCH if str(size) == old else size for size in value.shape])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter, which warns about its own code and about packages that the graph does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
