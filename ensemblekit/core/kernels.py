"""Compiled code for training steps on a CPU: small networks (kernels.c) and norms of images (image_norms.c).

Pip builds it where it finds a C compiler. Without it everything works, more slowly.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p, sizeof
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

VERSION_OF_CALLS = 1
"""Also in kernels.c; an older library is not used."""
SWITCH = "ENSEMBLEKIT_COMPILED_CODE"
"""The environment variable that turns compiled code off, by the value 0."""


IMAGE_NORM = "image_norm_forward", "image_norm_backward"
MAX_CHANNELS, SLICES = 512, 16
"""Also in image_norms.c: the most channels of images, and the slices of a batch of which each has sums of its own."""


class Layer(Structure):
    """A linear layer, with batch norm and ReLU where it has them; pointers are to float32 of all members."""

    _fields_: ClassVar = [
        ("inputs", c_int64),
        ("outputs", c_int64),
        *((name, c_void_p) for name in ("weight", "bias", "weight_gradient", "bias_gradient")),
        ("has_norm", c_int64),
        ("has_relu", c_int64),
        *((name, c_void_p) for name in ("scale", "shift", "scale_gradient", "shift_gradient")),
        *((name, c_void_p) for name in ("mean", "variance", "counter")),
        ("eps", c_float),
        ("momentum", c_float),
        *((name, c_void_p) for name in ("inverse", "kept")),
    ]


class Pass(Structure):
    """A pass through the layers of all members, forward or backward."""

    _fields_: ClassVar = [
        ("layers", POINTER(Layer)),
        ("num_layers", c_int64),
        ("num_members", c_int64),
        ("batch", c_int64),
        ("inputs", c_void_p),
        ("input_stride", c_int64),
        ("outputs", c_void_p),
        ("gradient", c_void_p),
        ("widest", c_int64),
        ("scratch", c_void_p),
    ]


class CrossEntropy(Structure):
    """The cross-entropy of rows of outputs, with the gradient of each."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("outputs", "target", "losses", "slopes")),
        *((name, c_int64) for name in ("rows", "batch", "classes")),
    ]


class Update(Structure):
    """A step of AdaBelief."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("values", "mean", "variance", "gradient")),
        ("size", c_int64),
        *((name, c_float) for name in ("beta1", "beta2", "rest1", "rest2", "eps", "rate")),
        ("is_adaptive", c_int64),
    ]


class ImageNorm(Structure):
    """Batch norm and ReLU of images in channels_last layout, or the end of a residual block."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("images", "height", "width", "channels")),
        *((name, c_void_p) for name in ("inputs", "skip", "outputs", "gradient", "input_gradient", "skip_gradient")),
        *((name, c_void_p) for name in ("scale", "shift", "scale_gradient", "shift_gradient", "mean", "inverse")),
        *((name, c_void_p) for name in ("running_mean", "running_variance", "sums")),
        ("eps", c_float),
        ("momentum", c_float),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions; None if they were not built, or for another version of this file."""
    if os.environ.get(SWITCH) == "0":
        return None
    for path in (Path(__file__).with_name("_kernels" + suffix) for suffix in EXTENSION_SUFFIXES):
        with suppress(OSError, AttributeError):  # it is not there, for another processor, or older
            functions = _declared(ctypes.CDLL(str(path)))
            layout = 1_000_000 * VERSION_OF_CALLS + 1000 * sizeof(Layer) + sizeof(Pass)
            if functions.layout() == layout and functions.image_norm_size() == sizeof(ImageNorm):
                return functions
    return None


def _declared(functions: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of arguments and results."""
    for name in ("layout", "image_norm_size", "scratch_size", "compute_cross_entropy"):
        getattr(functions, name).restype = c_int64
    functions.scratch_size.argtypes = [c_int64, c_int64]
    for name in ("compute_forward", "compute_backward", "compute_cross_entropy", "adabelief", *IMAGE_NORM):
        getattr(functions, name).argtypes = [c_void_p, c_int64]
    return functions


def accept(*tensors: Tensor) -> bool:
    """Return whether compiled code can read and write tensors."""
    return library() is not None and all(
        tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors
    )


def scratch_size(widest: int, batch: int) -> int:
    """Return how many numbers of memory a thread needs for a `Pass`."""
    return int(_functions().scratch_size(widest, batch))


def compute_forward(plan: Pass, num_threads: int) -> None:
    """Compute the results of all layers, in training mode."""
    _functions().compute_forward(byref(plan), num_threads)


def compute_backward(plan: Pass, num_threads: int) -> None:
    """Compute the gradients of all parameters, after a pass forward."""
    _functions().compute_backward(byref(plan), num_threads)


def cross_entropy(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Compute the cross-entropy (R, B) of outputs (R, B, C) and its gradient (R, B, C) for classes int64 (B,).

    Returns:
        None where there is no compiled code for such tensors, or a target is not a class.
    """
    is_known = outputs.ndim == 3 and target.dtype == torch.int64 and target.is_contiguous()
    if not is_known or target.shape != outputs.shape[1:2] or not accept(outputs):
        return None
    losses, slopes = outputs.new_empty(outputs.shape[:2]), torch.empty_like(outputs)
    memory = (tensor.data_ptr() for tensor in (outputs, target, losses, slopes))
    plan = CrossEntropy(*memory, losses.numel(), *outputs.shape[1:])
    return (losses, slopes) if _functions().compute_cross_entropy(byref(plan), 1) else None


def adabelief(plan: Update, num_threads: int) -> None:
    """Take a step of AdaBelief."""
    _functions().adabelief(byref(plan), num_threads)


def image_norm_forward(plan: ImageNorm, num_threads: int) -> None:
    """Compute the statistics and the outputs."""
    _functions().image_norm_forward(byref(plan), num_threads)


def image_norm_backward(plan: ImageNorm, num_threads: int) -> None:
    """Compute the gradients, after a pass forward."""
    _functions().image_norm_backward(byref(plan), num_threads)


def _functions() -> ctypes.CDLL:
    functions = library()
    assert functions is not None
    return functions
