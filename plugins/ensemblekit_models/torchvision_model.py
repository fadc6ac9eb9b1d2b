"""The classification networks of torchvision, untrained or pretrained."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast
from urllib.parse import urlparse

import torch
from pydantic import Field, field_validator
from torch import nn
from torchvision import models

from ensemblekit import DataError, Problem, did_you_mean
from ensemblekit_models.image_model import ImageModel
from ensemblekit_models.softmax import SOFTMAX

AnyLayer = TypeVar("AnyLayer", bound=nn.Module)
RGB = 3
STOCHASTIC_DEPTH = ("convnext_", "efficientnet_", "maxvit_", "swin_")
"""Prefixes of the names of networks with stochastic depth."""
ATTENTION = ("vit_",)
"""Prefixes of the names of networks that use torch's fused attention."""


class TorchVision(ImageModel):
    """Any classification network of torchvision, untrained or pretrained, with an output layer for the data."""

    paper = "https://pytorch.org/vision/stable/models.html#classification"

    arch: str = Field("resnet18", description="name of the network in torchvision, as listed on that page")
    pretrained: bool = Field(
        False,
        description="start from torchvision's default weights, downloaded on first use; only the output layer is new",
    )
    softmax: bool = SOFTMAX

    def gives_probabilities(self) -> bool:
        return self.softmax

    @field_validator("arch")
    @classmethod
    def _is_known(cls, arch: str) -> str:
        known = models.list_models(module=models)
        if arch not in known:
            hint = did_you_mean(arch, known) or f"known: {', '.join(known)}"
            raise ValueError(f"is not a classification network of torchvision; {hint}")
        return arch

    def unsupported(self) -> dict[str, str]:
        if self.arch.startswith(STOCHASTIC_DEPTH):
            return {"vmap": "its stochastic depth creates random tensors, which vmap does not support"}
        if self.arch.startswith(ATTENTION):
            return {"vmap": "vmap has no batching rule for attention on the CPU: it warns and runs member by member"}
        return {}

    def input_problem(self, input_shape: tuple[int, ...]) -> Problem | None:
        problem = super().input_problem(input_shape)
        if problem is None and self.pretrained and input_shape[0] != RGB:
            what = f"the weights are for images with {RGB} channels, but these have {input_shape[0]}"
            problem = Problem("pretrained", what, "set pretrained = false")
        return problem or self._size_problem(input_shape)

    def _size_problem(self, input_shape: tuple[int, ...]) -> Problem | None:
        """Try a forward pass on the meta device, without any arithmetic, to see whether the size is supported."""
        if self.arch.startswith("regnet_"):  # supports any size, and cannot be built on the meta device
            return None
        try:
            with torch.device("meta"), torch.no_grad():
                self._new_network(input_shape, 1).eval()(torch.empty(1, *input_shape))
        except (RuntimeError, ValueError, AssertionError) as error:
            _, height, width = input_shape
            what = f'"{self.arch}" does not support images of {height}×{width}: {_first_line(error)}'
            return Problem("arch", what, "use images of the size that it is designed for, mostly 224, or another arch")
        return None

    def network(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        if self.pretrained:
            return self._pretrained_network(num_outputs)
        return self._new_network(input_shape, num_outputs)

    def _new_network(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        channels, height, width = input_shape
        options: dict[str, Any] = {}
        if self.arch in ("googlenet", "inception_v3"):
            options["init_weights"] = True
        elif self.arch.startswith("vit_"):
            options["image_size"] = self._trained_size() if self.pretrained else height
        elif self.arch.startswith("maxvit_"):
            options["input_size"] = (self._trained_size(),) * 2 if self.pretrained else (height, width)
        network = models.get_model(self.arch, weights=None, num_classes=num_outputs, **options)
        if channels != RGB:
            path, first = next(_layers(network, nn.Conv2d))
            _replace(network, path, _convolution_like(first, in_channels=channels))
        return _without_auxiliary_heads(network)

    def _pretrained_network(self, num_outputs: int) -> nn.Module:
        network = _without_auxiliary_heads(_load_pretrained(self.arch))
        linear = [*_layers(network, nn.Linear)]
        if linear:
            path, head = linear[-1]
            _replace(network, path, nn.Linear(head.in_features, num_outputs, bias=head.bias is not None))
        else:  # SqueezeNet ends with a convolution
            path, last = [*_layers(network, nn.Conv2d)][-1]
            _replace(network, path, _convolution_like(last, out_channels=num_outputs))
        return network

    def _trained_size(self) -> int:
        size: int = models.get_model_weights(self.arch).DEFAULT.meta["min_size"][0]
        return size


def _load_pretrained(arch: str) -> nn.Module:
    weights = models.get_model_weights(arch).DEFAULT
    folder = Path(torch.hub.get_dir(), "checkpoints")
    file = folder / PurePosixPath(urlparse(weights.url).path).name
    try:
        # torchvision alone would unpickle anything in the file; this makes sure that it holds only tensors.
        weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        network: nn.Module = models.get_model(arch, weights=weights, progress=False)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        if file.exists():
            raise DataError(
                f'file is not the pretrained weights of "{arch}": {_first_line(error)}',
                str(file),
                "delete the file, so that it is downloaded again",
            ) from error
        raise DataError(
            f'the pretrained weights of "{arch}", {file.name}, are missing and cannot be downloaded: {error}',
            f"looked for in {folder}",
            f"put {weights.url} there, or set pretrained = false",
        ) from error
    return network


def _without_auxiliary_heads(network: nn.Module) -> nn.Module:
    """Remove the auxiliary heads of GoogLeNet and Inception, with which they return a tuple in training."""
    if hasattr(network, "aux_logits"):
        for name, value in {"aux_logits": False, "aux1": None, "aux2": None, "AuxLogits": None}.items():
            if hasattr(network, name):
                setattr(network, name, value)
    return network


def _layers(network: nn.Module, kind: type[AnyLayer]) -> Iterator[tuple[str, AnyLayer]]:
    return ((path, layer) for path, layer in network.named_modules() if isinstance(layer, kind))


def _replace(network: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(network.get_submodule(parent), name, layer)


def _convolution_like(conv: nn.Conv2d, in_channels: int | None = None, out_channels: int | None = None) -> nn.Conv2d:
    """Make a convolution with the hyperparameters of another one, but other channels."""
    return nn.Conv2d(
        in_channels or conv.in_channels,
        out_channels or conv.out_channels,
        kernel_size=cast("tuple[int, int]", conv.kernel_size),
        stride=cast("tuple[int, int]", conv.stride),
        padding=cast("tuple[int, int]", conv.padding),
        bias=conv.bias is not None,
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
