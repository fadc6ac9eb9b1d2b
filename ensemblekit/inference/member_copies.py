"""Copies of an ensemble's members for predictions on a CPU, which follow the members' changes.

A large batch is computed by folded copies of the members, each on a core of its own. A small one is computed by all
members as one network with stacked parameters where that is possible, and the smallest ones in the calling thread
alone: handing work to threads would take longer than the work, and threads that wait for each other lose most where
other programs run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from ensemblekit.core.adaptive_threads import AdaptiveThreads
from ensemblekit.core.threads import one_thread
from ensemblekit.engines.stacked_layers import StackedNetwork
from ensemblekit.members.folding import FoldedMember, folded, has_own_prediction

SMALL_FLOPS = 2**27
"""Floating-point operations of one member up to which a batch is small: about where two cores gain as much as a stack
(ResNets of width 16 and 32; batches of 12 and 3 images)."""
SPLIT_FLOPS = 2**27
"""Floating-point operations of a call from which a stack is split over torch's threads: about a millisecond's work of
one core. Beyond, two cores took 0.67 to 0.77 of the time of one (16 ResNets of width 16 and 32, one image)."""
SMALL_SAMPLES = {"stacked": 256, "in turn": 8}
"""Samples of a small batch at most, for members as one stack, and for members that cannot be stacked."""
STACK_TOLERANCE = 1e-4
"""How much a stack may differ from its members, as a share of the largest output: far above rounding."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Layers that may get their first child later."""
_WITHOUT_MODES = (*_CONTAINERS, nn.Conv2d, nn.Linear, nn.ReLU, nn.Flatten, nn.MaxPool2d, nn.Identity)
"""Layers, exactly of these classes, that compute the same in training."""
_version, _training = attrgetter("_version"), attrgetter("training")


class Watch:
    """Notices changes of networks: of layers and hooks, and of tensors and their values.

    Values are compared by the tensors' addresses and version counters, which only writing to ``parameter.data``
    bypasses. It is asked before every prediction, when the networks' many small objects are no longer in the cache:
    therefore it looks at as few of them as it can, and avoids loops in Python.
    """

    def __init__(self, networks: nn.ModuleList) -> None:
        layers = list(networks.modules())
        self.with_modes = [*networks, *(layer for layer in layers if type(layer) not in _WITHOUT_MODES)]
        """The networks, and the layers that may compute something else in training."""
        tensor_names = [names for layer in layers for names in (layer._parameters, layer._buffers) if names]
        containers = [layer._modules for layer in layers if layer._modules or isinstance(layer, _CONTAINERS)]
        self.parts: list[dict[str, Any]] = [*containers, *tensor_names]
        self.objects = self._objects()
        self.hooks = [hooks for layer in layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks)]
        self.hook_counts = list(map(len, self.hooks))
        self.next_hook = RemovableHandle.next_id
        # batch norm counts its batches where it also changes its statistics
        named = [item for names in tensor_names for item in names.items() if item[0] != "num_batches_tracked"]
        self.tensors: list[Tensor] = [tensor for _, tensor in named if tensor is not None]
        self.has_versions = not any(tensor.is_inference() for tensor in self.tensors)
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.dtype = next((tensor.dtype for tensor in self.tensors if tensor.is_floating_point()), torch.float32)

    def _objects(self) -> list[Any]:
        """Return all layers, parameters and buffers."""
        return list(chain.from_iterable(map(dict.values, self.parts)))

    @property
    def is_same_structure(self) -> bool:
        """Whether layers, tensors and hooks are still the same objects, on the same device and of the same type."""
        objects = self._objects()
        if len(objects) != len(self.objects) or not all(map(is_, objects, self.objects)):
            return False
        if not self._has_same_hooks:
            return False
        return not self.tensors or (self.tensors[0].device == self.device and self._has_same_type)

    @property
    def _has_same_hooks(self) -> bool:
        # torch numbers all hooks of a process: without a new number, there can only be fewer of them
        if self.next_hook == RemovableHandle.next_id and not any(self.hook_counts):
            return True
        self.next_hook = RemovableHandle.next_id
        return list(map(len, self.hooks)) == self.hook_counts

    @property
    def _has_same_type(self) -> bool:
        return self.dtype in (self.tensors[0].dtype, self.tensors[-1].dtype) or any(
            tensor.dtype == self.dtype for tensor in self.tensors
        )

    @property
    def in_evaluation(self) -> bool:
        """Whether all layers are in evaluation mode."""
        return not any(map(_training, self.with_modes))

    def values(self) -> list[int] | None:
        """Return numbers that change with the values of the tensors; None if tensors do not count their versions."""
        if not self.has_versions:
            return None
        return [*map(Tensor.data_ptr, self.tensors), *map(_version, self.tensors)]


class MemberCopies:
    """Copies of members with their current weights.

    Args:
        members: the networks.
        watch: watches them.
        channels_last: whether they compute images in that memory format.
        can_stack: whether they are of one architecture, and `torch.func.vmap` can compute it.
        stochastic: whether predictions are stochastic passes.
    """

    def __init__(
        self, members: Sequence[nn.Module], watch: Watch, channels_last: bool, can_stack: bool, stochastic: bool
    ) -> None:
        self.members, self.channels_last, self.stochastic = members, channels_last, stochastic
        self.watch, self.values = watch, watch.values()
        self.references = [tensor.detach() for tensor in watch.tensors]
        """So that no other tensor can get one of these addresses."""
        self.can_stack = can_stack and not any(map(has_own_prediction, members))
        self._folded: list[FoldedMember] | None = None
        self._stack: StackedMembers | None = None
        self._flops: int | None = None
        self._adaptive_threads = AdaptiveThreads()
        self._same_with_one_thread: dict[torch.Size, bool] = {}
        """By the shape of the inputs, whether the stack's outputs have the same bits with one thread."""

    @property
    def is_current(self) -> bool:
        """Whether the members still have the weights of the copies."""
        return self.values is not None and self.watch.values() == self.values

    @property
    def folded(self) -> list[FoldedMember]:
        """A copy of each member."""
        if self._folded is None:
            self._folded = [FoldedMember(member, self.channels_last, self.stochastic) for member in self.members]
        return self._folded

    def stacked_outputs(self, inputs: Tensor) -> Tensor | None:
        """Compute the outputs (M, B, C) of all members for a small batch; None if they are not computed as a stack."""
        if not self.can_stack or not self._is_small(inputs, SMALL_SAMPLES["stacked"]):
            return None
        if self._stack is None:
            with torch.no_grad(), one_thread():
                self._stack = stack_of(self.members, inputs, self.channels_last)
                self.can_stack = self._stack is not None
        if self._stack is None:
            return None
        with torch.no_grad(), self._threads(self._stack, inputs):
            return self._stack(inputs)

    def _threads(self, stack: StackedMembers, inputs: Tensor) -> AbstractContextManager[None]:
        """Limit torch to one thread for little work, and for more of it while that is faster and changes no bit."""
        assert self._flops is not None
        if self._flops * len(inputs) * len(self.members) < SPLIT_FLOPS:
            return one_thread()

        def is_same_with_one_thread() -> bool:
            if inputs.shape not in self._same_with_one_thread:
                outputs = stack(inputs)
                with one_thread():
                    self._same_with_one_thread[inputs.shape] = torch.equal(stack(inputs), outputs)
            return self._same_with_one_thread[inputs.shape]

        return self._adaptive_threads.step(is_same_with_one_thread)

    def outputs(
        self, networks: Sequence[int], views: Sequence[Tensor], passes: int | None, spread: Callable[..., list[Tensor]]
    ) -> list[Tensor]:
        """Compute the outputs (S, B, C) of networks, each for its view of the inputs.

        Args:
            networks: their indices.
            views: what each of them sees of the batch (B, …).
            passes: the number S of stochastic passes; None: a deterministic one.
            spread: maps a function over items on several cores.
        """

        def work(pair: tuple[FoldedMember, Tensor]) -> Tensor:
            return pair[0](pair[1], passes)

        pairs = list(zip([self.folded[index] for index in networks], views, strict=True))
        if len(pairs) > 1 and self._is_small(views[0], SMALL_SAMPLES["in turn"]):
            with one_thread():
                return [work(pair) for pair in pairs]
        return spread(work, pairs)

    def _is_small(self, inputs: Tensor, max_samples: int) -> bool:
        if not 0 < len(inputs) <= max_samples:
            return False
        if self._flops is None:  # of the first member, for one sample
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                folded(self.members[0], self.stochastic)[0](inputs[:1])
            self._flops = counter.get_total_flops()
        return self._flops * len(inputs) <= SMALL_FLOPS


class StackedMembers:
    """Members of one architecture as one network: each parameter of all of them is one tensor (M, …).

    Args:
        networks: copies of the members that are folded for inference.
        channels_last: whether they compute images in that memory format.
    """

    def __init__(self, networks: Sequence[nn.Module], channels_last: bool) -> None:
        self.channels_last = channels_last
        states: list[dict[str, Tensor]] = [dict(chain(n.named_parameters(), n.named_buffers())) for n in networks]
        self.tensors = {name: torch.stack([state[name] for state in states]).detach() for name in states[0]}
        if channels_last:  # convolutions of all members are computed as groups of one convolution
            self.tensors = {name: _filters_last(tensor) for name, tensor in self.tensors.items()}
        self.network = StackedNetwork(deepcopy(networks[0]).to("meta"))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Compute outputs (M, B, C) for inputs (B, …) in evaluation mode."""
        if self.channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return self.network(self.tensors, inputs)


def _filters_last(tensor: Tensor) -> Tensor:
    """Return stacked filters (M, O, I, H, W) with the memory format channels_last; other tensors as they are."""
    if tensor.ndim != 5:
        return tensor
    return tensor.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, tensor.shape[:2])


def stack_of(members: Sequence[nn.Module], inputs: Tensor, channels_last: bool = False) -> StackedMembers | None:
    """Return the members as one stack; None unless it gives their outputs for these inputs, up to rounding."""
    networks = [folded(member)[0] for member in members]
    if len({repr(network) for network in networks}) > 1:
        return None
    expected = torch.stack([network(inputs) for network in networks])
    try:
        stack = StackedMembers(networks, channels_last)
        outputs: Any = stack(inputs)
    except (RuntimeError, ValueError, TypeError, KeyError, NotImplementedError):
        return None  # a network that vmap cannot compute, which its model need not know
    if not isinstance(outputs, Tensor) or outputs.shape != expected.shape:
        return None
    tolerance = STACK_TOLERANCE * float(expected.abs().max().nan_to_num(posinf=0.0))
    return stack if torch.allclose(outputs, expected, STACK_TOLERANCE, tolerance, equal_nan=True) else None
