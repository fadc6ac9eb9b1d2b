"""Parameters in one flat tensor: the same numbers as one by one, whatever their order in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ensemblekit.members.flat_parameters import FlatParameters, Layout, clip_per_member
from ensemblekit.spec.optimizers import ELEMENTWISE, Optimizer, optimizer_classes, optimizer_section

SHAPES = {
    "weight": (4, 3, 3, 3),
    "one_channel": (4, 1, 3, 3),
    "one_pixel": (4, 3, 1, 1),
    "matrix": (5, 2),
    "bias": (7,),
}


def tensors(channels_last: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if not channels_last:
        return made
    return {
        name: value.to(memory_format=torch.channels_last) if value.ndim == 4 else value for name, value in made.items()
    }


def optimizer(name: str) -> Optimizer:
    return optimizer_section(name).from_table({"name": name, "lr": 0.01})


@pytest.mark.parametrize("channels_last", [False, True])
def test_what_is_joined_splits_into_equal_tensors_with_the_same_strides(channels_last):
    given = tensors(channels_last)
    layout = Layout(given)
    flat = layout.join(list(given.values()))
    assert flat.shape == (sum(value.numel() for value in given.values()),)
    for name, view in layout.split(flat).items():
        assert torch.equal(view, given[name])
        assert view.stride() == given[name].stride()
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_gradients_of_another_order_in_memory_land_on_their_own_elements():
    given = tensors(channels_last=True)
    layout = Layout(given)
    contiguous = layout.split(layout.join([value.contiguous() for value in given.values()]))
    for name, view in contiguous.items():
        assert torch.equal(view, given[name])


def test_an_optimizer_that_is_not_known_to_be_elementwise_gets_every_parameter_by_itself(monkeypatch):
    monkeypatch.delitem(ELEMENTWISE, "adam")
    assert len(FlatParameters(tensors(), optimizer("adam")).optimized) == len(SHAPES)
    assert set(ELEMENTWISE) <= set(optimizer_classes())


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_every_optimizer_gives_the_same_numbers_on_the_flat_tensor(name):
    one_by_one = [value.clone().requires_grad_() for value in tensors().values()]
    reference = optimizer_section(name).from_table({"name": name, "lr": 0.01}).build(one_by_one)
    joined = FlatParameters(tensors(), optimizer(name))
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(value.shape, generator=generator) for value in one_by_one]
        for value, gradient in zip(one_by_one, gradients, strict=True):
            value.grad = gradient.clone()
        reference.step()
        joined.step(gradients, 0.01)
    torch.testing.assert_close(list(joined.tensors.values()), [v.detach() for v in one_by_one], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adabelief", "adam", "sgd", "nadam", "asgd"])
def test_the_state_by_names_can_be_loaded_and_training_continues_identically(name):
    def gradients(step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]

    first = FlatParameters(tensors(), optimizer(name))
    for step in range(3):
        first.step(gradients(step), 0.01)
    second = FlatParameters({key: value.clone() for key, value in first.tensors.items()}, optimizer(name))
    second.load_state(first.state())
    for step in range(3, 6):
        first.step(gradients(step), 0.01)
        second.step(gradients(step), 0.01)
    for key, value in first.tensors.items():
        assert torch.equal(value, second.tensors[key])


def test_an_optimizer_that_looks_at_whole_parameters_sees_them():
    parameters = FlatParameters(tensors(), optimizer("adafactor"))
    assert [value.shape for value in parameters.optimized] == [torch.Size(shape) for shape in SHAPES.values()]
    assert len(FlatParameters(tensors(), optimizer("adam")).optimized) == 1


def test_parameters_of_several_types_are_not_joined():
    mixed = {"single": torch.ones(2), "double": torch.ones(2, dtype=torch.float64)}
    parameters = FlatParameters(mixed, optimizer("sgd"))
    parameters.step([torch.ones(2), torch.ones(2, dtype=torch.float64)], 0.5)
    assert parameters.tensors["double"].dtype == torch.float64
    assert parameters.tensors["single"].tolist() == [0.5, 0.5]


def test_the_state_before_the_first_step_is_empty():
    parameters = FlatParameters(tensors(), optimizer("adam"))
    assert parameters.state() == {}
    parameters.load_state({})


def test_each_members_gradient_is_clipped_as_torch_does_for_one():
    gradients = [torch.randn(3, 4, 5), torch.randn(3, 7)]
    found = clip_per_member(gradients, 0.5)
    for member in range(3):
        network = [nn.Parameter(torch.zeros_like(gradient[member])) for gradient in gradients]
        for parameter, gradient in zip(network, gradients, strict=True):
            parameter.grad = gradient[member].clone()
        nn.utils.clip_grad_norm_(network, 0.5)
        torch.testing.assert_close([gradient[member] for gradient in found], [value.grad for value in network])
    assert clip_per_member(gradients, None) is gradients


def test_gradients_of_single_numbers_are_clipped_too():
    gradients = [torch.tensor([3.0, 0.3]), torch.tensor([[4.0], [0.4]])]
    scalars, vectors = clip_per_member(gradients, 1.0)
    torch.testing.assert_close(scalars, torch.tensor([0.6, 0.3]))
    torch.testing.assert_close(vectors, torch.tensor([[0.8], [0.4]]))
