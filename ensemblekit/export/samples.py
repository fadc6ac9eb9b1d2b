"""Samples on which an exported graph is compared with the original: test samples of the run, else random inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import DataError, EnsemblekitError, UsageError
from ensemblekit.core.input_network import InputNetwork
from ensemblekit.core.seeds import generator
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.data.loading import load_data
from ensemblekit.data.python_data import split_parts
from ensemblekit.export.formats import InputType
from ensemblekit.export.input_networks import ImageInputs, NumberInputs, input_network
from ensemblekit.inference.ensemble import Ensemble

NUM_SAMPLES = 64


@dataclass(frozen=True)
class Samples:
    """Inputs of a graph, and the same inputs as the original takes them."""

    network: InputNetwork
    """Prepares the inputs of the graph."""
    raw: tuple[Tensor, ...]
    """Inputs of the graph (N, …)."""
    inputs: Tensor
    """Inputs of the original: bytes (N, …), or prepared numbers (N, *input_shape)."""
    are_random: bool = False
    problem: str = ""
    """Why they are random."""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def description(self) -> str:
        """What they are: `64 test samples`."""
        return f"{len(self)} {'random inputs' if self.are_random else 'test samples'}"

    def first(self, number: int) -> Samples:
        """Return the first of these samples."""
        return replace(self, raw=tuple(part[:number] for part in self.raw), inputs=self.inputs[:number])


def samples_of(ensemble: Ensemble, data: Any, input_type: InputType | None) -> Samples:
    """Return the inputs of an ensemble's graph and samples to compare it on.

    Args:
        ensemble: the trained ensemble.
        data: the data of the run, if it was passed in Python.
        input_type: the type of inputs that are stored as bytes; None: as the data has them.

    Raises:
        UsageError: the run's inputs are no bytes, and these were asked for.
    """
    try:
        stored, problem = _test_inputs(ensemble, data), ""
    except (EnsemblekitError, OSError) as error:
        stored, problem = None, error.what if isinstance(error, EnsemblekitError) else str(error)
    are_bytes = ensemble.transform is not None if stored is None else stored.dtype == torch.uint8
    network = input_network(ensemble, input_type or ("uint8" if are_bytes else "float32"))
    if input_type is not None and not isinstance(network, ImageInputs) and not are_bytes:
        what = "the inputs of the run are numbers with all their digits, not bytes"
        raise UsageError(what, "--input-type", "leave it out")
    if stored is None:
        return replace(_random(ensemble, network), are_random=True, problem=problem)
    raw = network.raw(stored)
    return _as_taken(ensemble, network, *raw) if _takes_stored(network) else Samples(network, raw, stored)


def _test_inputs(ensemble: Ensemble, data: Any) -> Tensor:
    """Read some test inputs of the run as they are stored, spread over the whole split."""
    spec = ensemble.spec
    dataset = spec.data if data is None else InMemoryData.in_place_of(spec.data).of(*split_parts(data))
    split = load_data(dataset, spec.seed).test
    index = torch.linspace(0, len(split) - 1, min(NUM_SAMPLES, len(split))).round().long()
    stored = split.inputs[index] if isinstance(split.inputs, Tensor) else next(split.inputs.stream([index]))
    expected = ensemble.info.input_shape if ensemble.transform is None else ensemble.transform.stored_shape
    if tuple(stored.shape[1:]) != expected:
        raise DataError(f"the data has inputs of shape {tuple(stored.shape[1:])}, not {expected}")
    return stored


def _random(ensemble: Ensemble, network: InputNetwork) -> Samples:
    source = generator(ensemble.spec.seed, "export")
    if _takes_stored(network):
        (described,) = network.inputs
        shape = (NUM_SAMPLES, *described.shape)
        if described.dtype == torch.uint8:
            raw = torch.randint(256, shape, generator=source, dtype=torch.uint8)
        else:
            fill = torch.rand if isinstance(network, ImageInputs) else torch.randn
            raw = fill(shape, generator=source)
        return _as_taken(ensemble, network, raw)
    prepared = torch.randn(NUM_SAMPLES, *ensemble.info.input_shape, generator=source)
    raw_inputs = network.raw(prepared)
    # what a random number stands for need not be a category: prepared anew, inputs are possible ones
    with torch.no_grad():
        return Samples(network, raw_inputs, network(*raw_inputs))


def _takes_stored(network: InputNetwork) -> bool:
    """Whether a graph takes inputs as the data set stores them, and not as their owner has them before."""
    return isinstance(network, ImageInputs | NumberInputs)


def _as_taken(ensemble: Ensemble, network: InputNetwork, raw: Tensor) -> Samples:
    """Return samples with what the original takes: bytes as they are, images of numbers prepared by its transform."""
    if raw.dtype == torch.uint8 or ensemble.transform is None:
        return Samples(network, (raw,), raw)
    return Samples(network, (raw,), ensemble.transform.to("cpu").plain(raw))
