"""Stochastic layers (dropout, stochastic binarisation) whose random numbers are identical on every engine.

A number is a hash of the layer's key, the training step and the element's index. So it does not depend on the thread,
stack or device that computes a member, a run can be resumed at any step, and no global generator is touched.
torch's own generators cannot give this: their sequence depends on the order of the calls, which threads and stacks
change. A hash of the index is also what makes a stack of K members one operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn

from ensemblekit.core.seeds import derive_seed

CALLS_PER_STEP = 256
"""How often a layer may sample in one step without repeating the numbers of the next step."""
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97  # odd, and below 2**31


class StochasticLayer(nn.Module):
    """A layer that samples random numbers while `draws` is true; derive from it and call `uniform`."""

    noise_key: Tensor
    noise_step: Tensor
    in_stochastic_pass: bool = False
    """Whether a stochastic pass of a prediction is being computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("noise_key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("noise_step", torch.zeros((), dtype=torch.int64), persistent=False)
        # Counted in Python: a counter on the device that is changed in place would be wrong in a compiled network,
        # whose backward pass may compute the random numbers of the forward pass again.
        self.calls = 0

    @property
    def draws(self) -> bool:
        """Whether it samples: in training, and in stochastic passes of a prediction (see `stochastic_pass`)."""
        return self.training or self.in_stochastic_pass

    def uniform(self, shape: torch.Size, channels_last: bool = False) -> Tensor:
        """Sample float32 numbers in [0, 1) of a shape (B, …), on the layer's device; each call gives new numbers.

        In a stochastic pass of a prediction all samples share them, so that the outputs of a sample do not depend on
        the other samples of its batch.

        Args:
            shape: (B, …).
            channels_last: lay out numbers (B, C, H, W) in this memory format. The numbers are the same; operations with
                tensors of that format are faster.
        """
        step = self._next_call()
        if self.in_stochastic_pass:
            return uniform_numbers(self.noise_key, step, shape[1:]).expand(shape)
        return uniform_numbers(self.noise_key, step, shape, channels_last)

    def symmetric(self, shape: torch.Size, channels_last: bool = False) -> Tensor:
        """Sample float32 numbers in (-1, 1] that are multiples of 2 ** -15: several times as fast as `uniform`.

        Otherwise as `uniform`; arguments as there.
        """
        step = self._next_call()
        if self.in_stochastic_pass:
            return symmetric_numbers(self.noise_key, step, torch.Size((1, *shape[1:])), channels_last).expand(shape)
        return symmetric_numbers(self.noise_key, step, shape, channels_last)

    def _next_call(self) -> Tensor:
        step = self.noise_step + self.calls
        self.calls += 1
        return step


Noise = StochasticLayer
"""The public name for authors of models."""


class Dropout(StochasticLayer):
    """`torch.nn.Dropout` with reproducible random numbers."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.draws or self.p == 0:
            return inputs
        return torch.where(self.uniform(inputs.shape) >= self.p, inputs / (1 - self.p), 0)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def make_reproducible(network: nn.Module, seed: int, member: int) -> nn.Module:
    """Replace every `nn.Dropout` of a network in place, and give each stochastic layer a key of its own."""
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p))
    for index, layer in enumerate(stochastic_layers(network)):
        layer.noise_key.fill_(derive_seed(seed, "noise", member, index))
        layer.calls = 0
    return network


def stochastic_layers(network: nn.Module) -> list[StochasticLayer]:
    """Return the stochastic layers of a network."""
    return [layer for layer in network.modules() if isinstance(layer, StochasticLayer)]


def first_call(step: int, in_second_pass: bool = False) -> int:
    """Return the number of a layer's first call in a training step; the second pass has half of the step's calls."""
    return step * CALLS_PER_STEP + (CALLS_PER_STEP // 2 if in_second_pass else 0)


def set_training_step(layers: Iterable[StochasticLayer], step: int, in_second_pass: bool = False) -> None:
    """Let layers sample the numbers of this training step; without it, they continue from call to call."""
    for layer in layers:
        layer.noise_step.fill_(first_call(step, in_second_pass))
        layer.calls = 0


def first_call_of_pass(number: int) -> int:
    """Return the number of a layer's first call in a pass of a prediction: negative, so that training never uses it."""
    return -(number + 1) * CALLS_PER_STEP


@contextmanager
def stochastic_pass(network: nn.Module, number: int) -> Iterator[None]:
    """Let a network in evaluation mode sample too: the numbers of one pass. Enter it anew for every call."""
    layers = stochastic_layers(network)
    before = [(layer.noise_step.clone(), layer.calls) for layer in layers]
    for layer in layers:
        layer.in_stochastic_pass, layer.calls = True, 0
        layer.noise_step.fill_(first_call_of_pass(number))
    try:
        yield
    finally:
        for layer, (step, calls) in zip(layers, before, strict=True):
            layer.in_stochastic_pass, layer.calls = False, calls
            layer.noise_step.copy_(step)


def outputs_of_passes(network: nn.Module, inputs: Tensor, passes: int | None) -> Tensor:
    """Compute the outputs (S, B, C) of S stochastic passes in evaluation mode; None: of a deterministic one, (1, B, C).

    Layers before the first stochastic one give the same in all passes, and run once.
    """
    if passes is None:
        return torch.stack([network(inputs)])
    deterministic, stochastic = split_at_first_stochastic(network)
    features = deterministic(inputs)
    outputs = []
    for number in range(passes):
        with stochastic_pass(stochastic, number):
            outputs.append(stochastic(features.clone()))  # a layer may work in place
    return torch.stack(outputs)


def split_at_first_stochastic(network: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split a network before its first stochastic layer; only a plain `nn.Sequential` has a known order of layers."""
    if type(network) is not nn.Sequential or network._forward_hooks or network._forward_pre_hooks:
        return nn.Identity(), network
    first = next((index for index, layer in enumerate(network) if stochastic_layers(layer)), len(network))
    return network[:first], network[first:]


class MemberUniform:
    """Random numbers of K members for a hook: the same on every engine, and when a run is resumed."""

    def __init__(self, keys: Tensor, step: int) -> None:
        self.keys, self.step = keys, step
        self.calls = 0

    @staticmethod
    def keys_of(seed: int, members: Sequence[int], device: torch.device) -> Tensor:
        """Return the key of each member."""
        return torch.tensor([derive_seed(seed, "inputs", member) for member in members], device=device)

    def __call__(self, *shape: int, fixed: bool = False) -> Tensor:
        """Sample float32 numbers in [0, 1), (K, *shape); `fixed` ones do not depend on the step."""
        first = first_call_of_pass(0) if fixed else first_call(self.step)
        numbers = uniform_numbers(self.keys, torch.full_like(self.keys, first + self.calls), torch.Size(shape))
        self.calls += 1
        return numbers


def uniform_numbers(key: Tensor, step: Tensor, shape: torch.Size, channels_last: bool = False) -> Tensor:
    """Return float32 numbers in [0, 1) of a shape; (K, *shape) if key and step are those of K layers, (K,).

    Args:
        key: of the layer, int64.
        step: number of the call, int64.
        shape: of the numbers of one layer.
        channels_last: lay out numbers (B, C, H, W) in this memory format; the numbers themselves are the same.
    """
    index = _index(shape, channels_last, key.device)
    key, step = (value.view(*key.shape, *[1] * len(shape)) for value in (key, step))
    bits = _hash(_hash(index + _mixed(key, step)).add_(_low_bits(key)))
    return (bits >> 8).bitwise_and_(0xFFFFFF).float().mul_(2**-24)


def symmetric_numbers(key: Tensor, step: Tensor, shape: torch.Size, channels_last: bool = False) -> Tensor:
    """Return float32 numbers in (-1, 1] of a shape (B, C, …): multiples of 2 ** -15, two for each hash.

    A hash of the sample and the pixel plus a hash of a pair of channels is hashed again; each channel of the pair takes
    16 bits of it.

    Args:
        key: of the layer, int64, without dimensions.
        step: number of the call, int64, without dimensions.
        shape: (B, C, …), or (B,).
        channels_last: lay out numbers (B, C, H, W) in this memory format; the numbers themselves are the same.
    """
    batch, channels, *pixels = [*shape, 1] if len(shape) == 1 else list(shape)
    mixed, low = _mixed(key, step), _low_bits(key)
    places = _hash(_low_bits(torch.arange(batch * prod(pixels), device=key.device)) + mixed).view(batch, *pixels)
    pairs = _hash(_hash(_low_bits(torch.arange((channels + 1) // 2, device=key.device)) + low).add_(mixed))
    if channels_last and len(pixels) == 2:
        halves = _hash(places.unsqueeze(-1) + pairs).view(torch.int16)
        return halves[..., :channels].movedim(-1, 1).float().mul_(-(2.0**-15))
    hashes = _hash(places.unsqueeze(1) + pairs.view(-1, *[1] * len(pixels)))
    upper = torch.stack((hashes << 16, hashes & -(2**16)), dim=2).flatten(1, 2)  # the 16 bits are the upper ones
    return upper[:, :channels].float().mul_(-(2.0**-31)).view(shape)


def _mixed(key: Tensor, step: Tensor) -> Tensor:
    """Return 32 bits that depend on all bits of the key and the step."""
    low, high = _low_bits(key), _low_bits(key >> 32)
    return _hash(_hash(_low_bits(step) + low) + high + _low_bits(step >> 32))


def _index(shape: torch.Size, channels_last: bool, device: torch.device) -> Tensor:
    """Return the 32 low bits of the index of each element."""
    dtype = torch.int32 if shape.numel() < 2**31 else torch.int64
    if not (channels_last and len(shape) == 4):
        return _low_bits(torch.arange(shape.numel(), dtype=dtype, device=device).view(shape))
    batch, channels, height, width = shape
    pixels, samples = height * width, torch.arange(batch, dtype=dtype, device=device)
    pixel = torch.arange(pixels, dtype=dtype, device=device) + samples.mul_(channels * pixels).unsqueeze(1)
    channel = torch.arange(channels, dtype=dtype, device=device).mul_(pixels)
    return _low_bits(pixel.view(batch, height, width, 1) + channel).permute(0, 3, 1, 2)


def _low_bits(values: Tensor) -> Tensor:
    """Return the 32 low bits of integers."""
    return values.to(torch.int32)


def _hash(values: Tensor) -> Tensor:
    """Hash 32 bits, in place.

    Signed integers hold them, as torch has no arithmetic for unsigned ones. Products and sums wrap around, and the bits
    that a shift copies from the sign are cleared.
    """
    for shift, factor in ((16, _FIRST), (15, _SECOND)):
        values.bitwise_xor_(_shifted(values, shift)).mul_(factor)
    return values.bitwise_xor_(_shifted(values, 15))


def _shifted(values: Tensor, bits: int) -> Tensor:
    return (values >> bits).bitwise_and_((1 << (32 - bits)) - 1)
