"""Random numbers inside a network (dropout, stochastic binarisation) that every engine draws alike.

A number is a hash of the layer's key, the training step and the element's position. So it does not depend on which
thread, stack or device a member runs, a run can be taken up at any step, and no global generator is touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ensemblekit.core.seeds import derive_seed

CALLS_PER_STEP = 256
"""How often a layer may draw in one step without repeating numbers of the next."""
_MASK = 0xFFFFFFFF
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97  # odd, and small enough that a product with 32 bits never overflows 64


class Noise(nn.Module):
    """A layer that draws random numbers where `draws` says so; derive from it and call `uniform`."""

    noise_key: Tensor
    noise_step: Tensor
    in_pass: bool = False
    """Whether a noisy pass of a prediction is being made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise_key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("noise_step", torch.zeros((), dtype=torch.int64), persistent=False)
        # Counted by Python: a step that changed in place would be wrong in a compiled network, whose backward pass may
        # draw the numbers of the forward pass again.
        self.calls = 0

    @property
    def draws(self) -> bool:
        """Whether it draws: in training, and in predictions of methods that want it (see `noise_of_pass`)."""
        return self.training or self.in_pass

    def uniform(self, shape: torch.Size) -> Tensor:
        """float32 numbers in [0, 1), of this shape (B, …), on the layer's device; others at each call.

        In a pass of a prediction they are alike for all samples, so that a sample's outputs depend on no other.
        """
        step = self.noise_step + self.calls
        self.calls += 1
        return uniform_numbers(self.noise_key, step, shape[1:] if self.in_pass else shape).expand(shape)


class Dropout(Noise):
    """`torch.nn.Dropout` with numbers of its own."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.draws or self.p == 0:
            return inputs
        return torch.where(self.uniform(inputs.shape) >= self.p, inputs / (1 - self.p), 0)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def with_own_noise(network: nn.Module, seed: int, member: int) -> nn.Module:
    """The network with every `nn.Dropout` replaced, and a key of its own for each layer that draws numbers."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p))
    for index, layer in enumerate(noise_layers(network)):
        layer.noise_key.fill_(derive_seed(seed, "noise", member, index))
        layer.calls = 0
    return network


def noise_layers(network: nn.Module) -> list[Noise]:
    """The layers that draw random numbers."""
    return [layer for layer in network.modules() if isinstance(layer, Noise)]


def first_call(step: int, second_pass: bool = False) -> int:
    """The number of a layer's first call in a step of training; the second pass has half of the step's calls."""
    return step * CALLS_PER_STEP + (CALLS_PER_STEP // 2 if second_pass else 0)


def set_noise_step(layers: Iterable[Noise], step: int, second_pass: bool = False) -> None:
    """Let layers draw the numbers of this step of training; without it, they go on from call to call."""
    for layer in layers:
        layer.noise_step.fill_(first_call(step, second_pass))
        layer.calls = 0


def first_call_of_pass(number: int) -> int:
    """The number of a layer's first call in a pass of a prediction: none that training ever comes to."""
    return -(number + 1) * CALLS_PER_STEP


@contextmanager
def noise_of_pass(network: nn.Module, number: int) -> Iterator[None]:
    """Let a network in evaluation draw too: the numbers of one pass, whenever it is made.

    Enter it anew for every call of the network.
    """
    layers = noise_layers(network)
    before = [(layer.noise_step.clone(), layer.calls) for layer in layers]
    for layer in layers:
        layer.in_pass, layer.calls = True, 0
        layer.noise_step.fill_(first_call_of_pass(number))
    try:
        yield
    finally:
        for layer, (step, calls) in zip(layers, before, strict=True):
            layer.in_pass, layer.calls = False, calls
            layer.noise_step.copy_(step)


def outputs_of_passes(network: nn.Module, inputs: Tensor, passes: int | None) -> Tensor:
    """What a network in evaluation says in S noisy passes (S, B, C); None: in one without noise, (1, B, C).

    Layers before the first that draws say the same in all passes, and run once.
    """
    if passes is None:
        return torch.stack([network(inputs)])
    quiet, noisy = _parted(network)
    features = quiet(inputs)
    outputs = []
    for number in range(passes):
        with noise_of_pass(noisy, number):
            outputs.append(noisy(features.clone()))  # which a layer may work on in place
    return torch.stack(outputs)


def _parted(network: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The layers before the first that draws, and the rest; it is known which they are in a plain `nn.Sequential`."""
    if type(network) is not nn.Sequential or network._forward_hooks or network._forward_pre_hooks:
        return nn.Identity(), network
    first = next((place for place, layer in enumerate(network) if noise_layers(layer)), len(network))
    return network[:first], network[first:]


def uniform_numbers(key: Tensor, step: Tensor, shape: torch.Size) -> Tensor:
    """float32 numbers in [0, 1), of this shape; if key and step are (K,), those of K layers, (K, *shape)."""
    position = torch.arange(shape.numel(), device=key.device).view(shape)
    key, step = (value.view(*key.shape, *[1] * len(shape)) for value in (key, step))
    low, high = key & _MASK, key >> 32
    mixed_key = _mixed(_mixed(step + low) + high + (step >> 32))
    return (_mixed(_mixed(position + mixed_key) + low) >> 8).float() * 2**-24


def _mixed(values: Tensor) -> Tensor:
    """A hash of 32 bits, kept in 64-bit integers."""
    values = values & _MASK
    values = ((values ^ (values >> 16)) * _FIRST) & _MASK
    values = ((values ^ (values >> 15)) * _SECOND) & _MASK
    return values ^ (values >> 15)
