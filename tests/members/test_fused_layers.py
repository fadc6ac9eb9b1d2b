"""Fused layers: equal to torch's own operations in double precision, used only where that is valid."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from helpers.compiled_code import VERSIONS, needs_compiled_code, version
from torch import Tensor, nn
from torch.nn import functional

import ensemblekit as ek
from ensemblekit.core.threads import threads
from ensemblekit.members.folding import FoldedMember, folded
from ensemblekit.members.fused_layers import NormReLU, norm_relu, with_fused_layers

SHAPES = [(5, 16, 28, 28), (33, 32, 7, 7), (2, 5, 6, 5), (4, 100, 8, 8), (20, 3, 5, 5), (40, 7, 2, 2), (3, 300, 3, 4)]


def images(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=source) * 3 + 5
    return values.contiguous(memory_format=torch.channels_last)


def batch_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.3)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def in_torch(inputs: Tensor, norm: nn.Module, skip: Tensor | None) -> Tensor:
    results = functional.relu(norm(inputs))
    return results if skip is None else functional.max_pool2d(skip + results, 2)


def trained(compute, norm: nn.BatchNorm2d, tensors: list[Tensor]) -> list[Tensor]:
    """Outputs, gradients of all tensors and parameters, and the new statistics."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    outputs = compute(leaves[0], norm, leaves[1] if len(leaves) > 1 else None)
    slopes = images(tuple(outputs.shape), seed=9).to(outputs.dtype) - 5
    gradients = torch.autograd.grad(outputs, [*leaves, norm.weight, norm.bias], slopes)
    return [outputs.detach(), *gradients, norm.running_mean, norm.running_var, norm.num_batches_tracked]


@needs_compiled_code
@pytest.mark.parametrize("pooled", [False, True], ids=["norm and ReLU", "end of a block"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("highest", VERSIONS)
def test_results_gradients_and_statistics_are_those_of_double_precision(highest, shape, pooled):
    tensors = [images(shape), images(shape, seed=1).relu() - 4][: 2 if pooled else 1]
    norm = batch_norm(shape[1])
    expected = trained(in_torch, deepcopy(norm).double(), [tensor.double() for tensor in tensors])
    with version(highest):
        found = trained(norm_relu, norm, tensors)
    for number, (value, exact) in enumerate(zip(found, expected, strict=True)):
        scale = float(exact.double().abs().max())
        torch.testing.assert_close(value.double(), exact.double(), rtol=1e-5, atol=2e-6 * scale, msg=f"number {number}")


@needs_compiled_code
@pytest.mark.parametrize("pooled", [False, True])
def test_bits_do_not_depend_on_the_number_of_threads(pooled):
    tensors = [images((33, 16, 8, 8)), images((33, 16, 8, 8), seed=1)][: 2 if pooled else 1]
    results = []
    for number in (1, 2, 3):
        with threads(number):
            results.append(trained(norm_relu, batch_norm(16), tensors))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@needs_compiled_code
def test_a_channel_far_from_zero_keeps_its_variance():
    inputs = images((16, 16, 8, 8)) + 1000
    norm = batch_norm(16)
    norm_relu(inputs, norm)
    exact = inputs.double().var(dim=(0, 2, 3))
    torch.testing.assert_close(norm.running_var.double(), 0.7 + 0.3 * exact, rtol=1e-5, atol=0)


@needs_compiled_code
def test_the_first_of_equal_maxima_gets_the_gradient_as_in_torch():
    norm = nn.BatchNorm2d(16)
    norm.bias.data.fill_(-100)  # all results are 0, so that the sums are equal
    tensors = [images((2, 16, 4, 4)), torch.ones(2, 16, 4, 4).contiguous(memory_format=torch.channels_last)]
    found, expected = trained(norm_relu, deepcopy(norm), tensors), trained(in_torch, deepcopy(norm), tensors)
    assert torch.equal(found[2], expected[2])
    assert (found[2][:, :, ::2, ::2] != 0).all()


@needs_compiled_code
@pytest.mark.parametrize("where", [0, 1])
def test_nan_is_never_hidden(where):
    tensors = [images((2, 16, 4, 4)), images((2, 16, 4, 4), seed=1)]
    tensors[where][0, 3, 2, 1] = float("nan")
    outputs, expected = (
        norm_relu(tensors[0], batch_norm(16), tensors[1]),
        in_torch(tensors[0], batch_norm(16), tensors[1]),
    )
    assert torch.equal(outputs.isnan(), expected.isnan())
    assert outputs.isnan().any()


def is_fused(outputs: Tensor) -> bool:
    return "NormReLU" in outputs.grad_fn.name()


@needs_compiled_code
def test_it_is_one_operation_only_where_compiled_code_can_compute_it():
    inputs, norm = images((2, 16, 4, 4)), batch_norm(16)
    assert is_fused(norm_relu(inputs, norm))
    assert not is_fused(norm_relu(inputs.contiguous(), norm))
    assert not is_fused(norm_relu(inputs.double(), deepcopy(norm).double()))
    assert not is_fused(norm_relu(inputs, deepcopy(norm).eval()))
    assert not is_fused(norm_relu(inputs, norm, torch.zeros(16, 4, 4)))
    assert not is_fused(norm_relu(inputs, nn.GroupNorm(4, 16)))
    without_average = nn.BatchNorm2d(16, momentum=None)
    assert not is_fused(norm_relu(inputs, without_average))
    assert norm_relu(inputs.to("meta"), deepcopy(norm).to("meta")).device.type == "meta"
    with pytest.raises(ValueError, match="more than 1 value"):
        norm_relu(images((1, 16, 1, 1)), norm)
    with pytest.raises(RuntimeError, match="running_mean should contain"):
        norm_relu(images((2, 8, 4, 4)), norm)


@needs_compiled_code
def test_the_end_of_a_folded_block_has_the_same_bits():
    inputs, skip = images((3, 20, 7, 8)) - 5, images((3, 20, 7, 8), seed=1)
    with torch.inference_mode():
        found = norm_relu(inputs, nn.Identity(), skip)
    assert torch.equal(found, in_torch(inputs, nn.Identity(), skip))
    leaf = inputs.clone().requires_grad_()
    assert norm_relu(leaf, nn.Identity(), skip).requires_grad


def network(model: str = "resnet") -> nn.Module:
    built = ek.build_model({"name": model, "width": 16}, input_shape=(3, 16, 16), num_outputs=10)
    return built.to(memory_format=torch.channels_last)


@needs_compiled_code
def test_a_network_with_fused_layers_trains_like_the_network():
    plain = network()
    own = deepcopy(plain)
    fused = with_fused_layers(own)
    assert sum(isinstance(layer, NormReLU) for layer in fused.modules()) == 5
    inputs = images((8, 3, 16, 16))
    outputs, expected = fused(inputs), plain(inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(outputs.square().sum(), list(own.parameters()))
    exact = torch.autograd.grad(expected.square().sum(), list(plain.parameters()))
    largest = max(float(value.abs().max()) for value in exact)
    for found, value in zip(gradients, exact, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-5 * largest)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(own.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)


@needs_compiled_code
def test_fused_layers_share_parameters_and_leave_the_network_as_it_is():
    plain = network()
    before = repr(plain)
    fused = with_fused_layers(plain)
    assert repr(plain) == before
    assert {id(value) for value in fused.parameters()} == {id(value) for value in plain.parameters()}
    assert {id(value) for value in fused.buffers()} == {id(value) for value in plain.buffers()}


@needs_compiled_code
def test_layers_with_hooks_are_not_fused():
    layers = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    seen = []
    layers[1].register_forward_hook(lambda *arguments: seen.append(arguments))
    with_fused_layers(layers)(images((2, 4, 3, 3)))
    assert len(seen) == 1
    watched = network()
    watched.register_forward_hook(lambda *arguments: seen.append(arguments))
    assert with_fused_layers(watched) is watched


@needs_compiled_code
def test_layers_of_other_classes_are_left_alone():
    class Doubled(nn.BatchNorm2d):
        def forward(self, inputs: Tensor) -> Tensor:
            return 2 * super().forward(inputs)

    layers = nn.Sequential(Doubled(4), nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU6())
    inputs = images((2, 4, 3, 3))
    assert torch.equal(with_fused_layers(deepcopy(layers))(inputs), layers(inputs))


@needs_compiled_code
def test_predictions_of_folded_members_have_the_bits_of_the_folded_network():
    plain = network().eval()
    inputs = images((9, 3, 16, 16))
    with torch.inference_mode():
        expected = folded(plain)[0].to(memory_format=torch.channels_last)(inputs)
    assert torch.equal(FoldedMember(plain, channels_last=True)(inputs)[0], expected)


def test_without_compiled_code_nothing_changes(monkeypatch):
    monkeypatch.setattr("ensemblekit.core.kernels.library", lambda: None)
    plain = network()
    assert with_fused_layers(plain) is plain
    inputs, norm = images((2, 16, 4, 4)), batch_norm(16)
    assert torch.equal(norm_relu(inputs, deepcopy(norm)), in_torch(inputs, deepcopy(norm), None))
