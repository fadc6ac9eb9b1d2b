"""Small batches, which a stack of all members computes, give the outputs of the members themselves."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import ensemblekit as ek
from ensemblekit.core.threads import threads
from ensemblekit.inference import member_copies
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.member_copies import StackedMembers, stack_of
from ensemblekit.members.build import build_members


def ensemble_of(model: dict[str, object], members: int = 3) -> Ensemble:
    spec = ek.load_spec({"data": "digits", "model": model, "ensemble": {"members": members}})
    networks = build_members(spec.member_models, (1, 8, 8), 10, 0)
    for network in networks:  # so that batch norms are not those of an untrained network
        network.train()
        network(torch.randn(16, 1, 8, 8))
    return Ensemble(networks, spec, spec.data.info).eval()


@pytest.mark.parametrize("model", [{"name": "mlp"}, {"name": "resnet", "width": 4, "blocks": 2}], ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_a_small_batch_gives_the_outputs_of_the_members_bit_identical_from_call_to_call(model, batch):
    ensemble = ensemble_of(model)
    inputs = torch.randn(batch, 1, 8, 8)
    outputs = ensemble.member_outputs(inputs)
    assert ensemble._copies is not None
    assert ensemble._copies._stack is not None
    expected = torch.stack([member(inputs) for member in ensemble.members]).detach()
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(ensemble.member_outputs(inputs), outputs)
    outputs.requires_grad_()  # not a tensor of torch's inference mode


def test_a_single_sample_notices_changes_of_weights_layers_hooks_and_modes():
    ensemble = ensemble_of({"name": "mlp"})
    inputs = torch.randn(1, 1, 8, 8)
    seen = [ensemble.member_outputs(inputs)]
    last = ensemble.members[1][-1]
    with torch.no_grad():
        last.weight.mul_(2)
        seen.append(ensemble.member_outputs(inputs))
        last.bias.data = last.bias + 1
        seen.append(ensemble.member_outputs(inputs))
        ensemble.members[1][-1] = nn.Linear(64, 10)
        seen.append(ensemble.member_outputs(inputs))
        ensemble.members[1][-1].register_forward_hook(lambda layer, _, outputs: outputs + 1)
        seen.append(ensemble.member_outputs(inputs))
        expected = torch.stack([member(inputs) for member in ensemble.members])
    assert not any(torch.equal(one, other) for one, other in pairwise(seen))
    torch.testing.assert_close(seen[-1], expected, rtol=1e-5, atol=1e-5)


def test_only_a_call_with_enough_work_is_split_over_threads(monkeypatch):
    ensemble, inputs, used = ensemble_of({"name": "resnet", "width": 4, "blocks": 2}), torch.randn(1, 1, 8, 8), []
    compute = StackedMembers.__call__

    def recorded(stack: StackedMembers, inputs: Tensor) -> Tensor:
        used.append(torch.get_num_threads())
        return compute(stack, inputs)

    ensemble.member_outputs(inputs)
    monkeypatch.setattr(StackedMembers, "__call__", recorded)
    with threads(2):
        small = ensemble.member_outputs(inputs)
        monkeypatch.setattr(member_copies, "SPLIT_FLOPS", 1)
        split = ensemble.member_outputs(inputs)
    assert used == [1, 2]
    torch.testing.assert_close(split, small, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("difference", "number"), [(0.0, 1), (1e-3, 2)])
def test_one_thread_computes_such_a_call_only_if_it_changes_no_bit(monkeypatch, difference, number):
    ensemble, inputs, used = ensemble_of({"name": "resnet", "width": 4, "blocks": 2}), torch.randn(1, 1, 8, 8), []
    compute = StackedMembers.__call__

    def recorded(stack: StackedMembers, inputs: Tensor) -> Tensor:
        used.append(torch.get_num_threads())
        return compute(stack, inputs) + difference * torch.get_num_threads()

    ensemble.member_outputs(inputs)
    assert ensemble._copies is not None
    monkeypatch.setattr(member_copies, "SPLIT_FLOPS", 1)
    monkeypatch.setattr(StackedMembers, "__call__", recorded)
    ensemble._copies._adaptive_threads.uses_one = True
    with threads(2):
        ensemble.member_outputs(inputs)
    assert used[-1] == number


class Constant(nn.Module):
    """A layer with a number that is neither a parameter nor a buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = torch.tensor(value)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.value


def test_members_that_differ_in_more_than_their_tensors_are_not_stacked():
    alike = [nn.Sequential(nn.Linear(4, 2), Constant(2.0)) for _ in range(2)]
    others = [nn.Sequential(nn.Linear(4, 2), Constant(value)) for value in (2.0, 3.0)]
    inputs = torch.randn(3, 4)
    with torch.no_grad():
        assert stack_of(alike, inputs) is not None
        assert stack_of(others, inputs) is None
        assert stack_of([nn.Linear(4, 2), nn.Linear(4, 3)], inputs) is None
