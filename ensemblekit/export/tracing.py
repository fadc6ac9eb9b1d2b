"""Traces the ensemble of a run to one graph by torch.export, and says why where that is not possible."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from ensemblekit.core.errors import EnsemblekitError, PluginError, UsageError
from ensemblekit.core.input_network import InputNetwork
from ensemblekit.export.formats import ExportRequest
from ensemblekit.export.graph import EnsembleGraph
from ensemblekit.export.graph_metadata import BATCH, graph_metadata
from ensemblekit.export.input_networks import NumberInputs
from ensemblekit.export.samples import Samples, samples_of
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.loading import load_ensemble

EXAMPLE_SIZE = 4
"""Samples of the batch that is traced: torch takes sizes of 0 and 1 for special cases."""

_FIX = (
    "in forward(), use x.shape[0] instead of len(x), and no if or loop that depends on values of tensors; a model "
    'declares it: unsupported() returns {"export": "why"}'
)


@dataclass(frozen=True)
class TracedRun:
    """The graph of a run, before it is written."""

    ensemble: Ensemble
    """The original."""
    samples: Samples
    program: ExportedProgram
    outputs: dict[str, Tensor]
    """Outputs of the example by name, in the order of the graph."""
    metadata: dict[str, Any]
    notes: tuple[str, ...] = ()


def trace(request: ExportRequest) -> TracedRun:
    """Load the ensemble of a run and trace it.

    Raises:
        UsageError: a member has no network, or its model says that it cannot be exported.
        PluginError: torch.export fails.
    """
    ensemble, notes = load_ensemble(request.run, request.registry), []
    check_exportable(ensemble)
    if ensemble.spec.engine.precision == "bf16":
        ensemble.spec = replace(ensemble.spec, engine=ensemble.spec.engine.model_copy(update={"precision": "float32"}))
        notes.append("the run computes in bf16, the graph in float32: it is compared with the original in float32")
    samples = samples_of(ensemble, request.data, request.input_type)
    if samples.are_random:
        notes.append(f"compared on random inputs, since the run's data cannot be read: {samples.problem}")
    if ensemble.preparation is not None and isinstance(samples.network, NumberInputs):
        notes.append("the graph takes prepared inputs: the data set cannot prepare them inside a graph")
    program, outputs = trace_ensemble(ensemble, samples.network)
    metadata = graph_metadata(request, ensemble, samples.network, outputs)
    return TracedRun(ensemble, samples, program, outputs, metadata, tuple(notes))


def trace_ensemble(ensemble: Ensemble, network: InputNetwork) -> tuple[ExportedProgram, dict[str, Tensor]]:
    """Trace an ensemble behind the network that prepares its inputs; also returns outputs of an example.

    The example is zeros, not samples of the run: torch.export saves it.
    """
    example = tuple(torch.zeros(EXAMPLE_SIZE, *one.shape, dtype=one.dtype) for one in network.inputs)
    with torch.no_grad(), _tracing(ensemble):
        graph = EnsembleGraph(ensemble, network, network(*example)).eval()
        outputs = graph(*example)
        shapes = {"inputs": tuple({0: Dim(BATCH, min=1)} for _ in example)}
        program = torch.export.export(graph, example, dynamic_shapes=shapes, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it has the paths of this machine
    return program, outputs


def check_exportable(ensemble: Ensemble) -> None:
    """Raise a `UsageError` that says why an ensemble cannot be exported."""
    for model in {plan.group.model.key: plan.group.model for plan in ensemble.plans}.values():
        if model.knows_outputs:
            what = f'the model "{model.name}" has no network: it knows its predictions for the samples of the run only'
            raise UsageError(what, "the model of the run", "export an ensemble without this member")
        if reason := model.unsupported().get("export"):
            fix = "use another model, or ensemblekit predict"
            raise UsageError(f'the model "{model.name}" cannot be exported: {reason}', "the model of the run", fix)


@contextmanager
def _tracing(ensemble: Ensemble) -> Iterator[None]:
    """Turn failures of torch.export into an error that names the models; its warnings are about its own code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except EnsemblekitError:
        raise
    except Exception as error:  # torch.export raises errors of many classes
        names = ", ".join(dict.fromkeys(f'"{plan.group.model.name}"' for plan in ensemble.plans))
        raise PluginError(_reason(error), f"models {names}, and what combines them", _FIX) from error


def _reason(error: Exception) -> str:
    if "Constraints violated" in str(error):
        return (
            "torch.export cannot trace the ensemble for batches of any size: the size of the batch becomes a constant"
        )
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"torch.export cannot trace the ensemble: {first:.300}"
