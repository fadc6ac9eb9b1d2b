"""Random numbers inside networks: uniform, independent of each other, and a function of key, step and place."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from ensemblekit.members.stochastic import (
    CALLS_PER_STEP,
    Dropout,
    Noise,
    first_call,
    make_reproducible,
    set_training_step,
    stochastic_pass,
    symmetric_numbers,
    uniform_numbers,
)

SIZE = torch.Size([100_000])


def layer(member: int = 0, step: int = 0) -> Noise:
    noise = Noise()
    make_reproducible(noise, seed=0, member=member)
    set_training_step([noise], step)
    return noise


def test_numbers_are_uniform():
    for step in range(3):
        numbers = layer(step=step).uniform(SIZE)
        assert 0 <= numbers.min() < numbers.max() < 1
        assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-3


def test_neighbours_steps_and_members_are_unrelated():
    first = layer().uniform(SIZE).double()
    others = [first.roll(1), layer(step=1).uniform(SIZE), layer(member=1).uniform(SIZE)]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([first, other.double()]))[0, 1].item()) < 0.015


def test_numbers_are_a_function_of_key_step_and_place():
    assert torch.equal(layer(3, 7).uniform(SIZE), layer(3, 7).uniform(SIZE))
    assert torch.equal(layer().uniform(torch.Size([10, 20])).flatten(), layer().uniform(torch.Size([200])))


def hashed(bits: int) -> int:
    """Chris Wellons' hash of 32 bits ("lowbias32", as improved by TheIronBorn), on Python's integers."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        bits = ((bits ^ (bits >> shift)) * factor) % 2**32
    return bits ^ (bits >> 15)


@pytest.mark.parametrize("step", [0, 5, 2**40 + 3, -7 * CALLS_PER_STEP])
@pytest.mark.parametrize("key", [0, 2**31, 2**62 + 2**31 + 12345])
def test_numbers_are_a_hash_of_key_step_and_index(key, step):
    numbers = uniform_numbers(torch.tensor(key), torch.tensor(step), torch.Size([50]))
    mixed = hashed((hashed((step + key) % 2**32) + (key >> 32) + (step >> 32)) % 2**32)
    bits = [hashed((hashed((index + mixed) % 2**32) + key) % 2**32) for index in range(50)]
    assert numbers.tolist() == [(each >> 8) / 2**24 for each in bits]


def test_the_memory_format_does_not_change_the_numbers():
    shape = torch.Size([3, 4, 5, 6])
    numbers = layer().uniform(shape, channels_last=True)
    assert numbers.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(numbers, layer().uniform(shape))


def symmetric_hash(key: int, step: int, place: int, channel: int) -> float:
    """The number of one channel of one place, (place, channel) counted from 0, on Python's integers."""
    mixed = hashed((hashed((step + key) % 2**32) + (key >> 32) + (step >> 32)) % 2**32)
    pair = hashed((hashed((channel // 2 + key) % 2**32) + mixed) % 2**32)
    bits = hashed((hashed((place + mixed) % 2**32) + pair) % 2**32)
    half = (bits >> 16) if channel % 2 else bits % 2**16
    return -(half - 2**16 if half >= 2**15 else half) / 2**15


@pytest.mark.parametrize("channels_last", [False, True])
def test_symmetric_numbers_are_hashes_of_a_place_and_a_pair_of_channels(channels_last):
    key, step = 2**62 + 2**31 + 12345, 5
    numbers = symmetric_numbers(torch.tensor(key), torch.tensor(step), torch.Size([2, 5, 3, 2]), channels_last)
    places = [[symmetric_hash(key, step, place, channel) for channel in range(5)] for place in range(12)]
    assert numbers.permute(0, 2, 3, 1).reshape(12, 5).tolist() == places
    assert numbers.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_symmetric_numbers_are_uniform_between_minus_one_and_one():
    numbers = layer().symmetric(torch.Size([500, 20, 5, 4]))
    assert -1 < numbers.min() < numbers.max() <= 1
    assert stats.kstest(numbers.flatten()[:100_000].numpy(), "uniform", (-1, 2)).pvalue > 1e-3
    assert stats.kstest(layer().symmetric(SIZE).numpy(), "uniform", (-1, 2)).pvalue > 1e-3


def test_symmetric_numbers_of_channels_places_steps_and_members_are_unrelated():
    shape = torch.Size([25_000, 4, 2, 2])
    first = layer().symmetric(shape).transpose(0, 1).flatten(1)
    others = [layer(step=1).symmetric(shape), layer(member=1).symmetric(shape)]
    rows = torch.cat([first, first.roll(1, dims=1), *(other.transpose(0, 1).flatten(1) for other in others)])
    assert torch.corrcoef(rows.double()).fill_diagonal_(0).abs().max() < 0.015
    assert torch.corrcoef(rows.double().abs()).fill_diagonal_(0).abs().max() < 0.015


@pytest.mark.parametrize("channels_last", [False, True])
def test_stacked_members_draw_the_same_symmetric_numbers(channels_last):
    shape, members = torch.Size([2, 3, 4, 5]), [layer(member, 9) for member in range(3)]
    keys, steps = (torch.stack([getattr(member, name) for member in members]) for name in ("noise_key", "noise_step"))
    stacked = vmap(lambda key, step: symmetric_numbers(key, step, shape, channels_last))(keys, steps)
    assert torch.equal(stacked, torch.stack([member.symmetric(shape) for member in members]))


def test_a_pass_samples_the_same_symmetric_numbers_for_all_samples():
    noise = layer()
    with stochastic_pass(noise, 0):
        numbers = noise.symmetric(torch.Size([3, 4, 5, 6]))
    assert torch.equal(numbers, numbers[:1].expand(3, 4, 5, 6))
    assert not torch.equal(numbers[0], layer().symmetric(torch.Size([3, 4, 5, 6]))[0])


def test_dropout_drops_its_share_and_keeps_the_mean():
    dropout = Dropout(0.3)
    make_reproducible(dropout, seed=0, member=0)
    outputs = dropout(torch.ones(SIZE))
    assert abs((outputs == 0).float().mean().item() - 0.3) < 0.01
    assert abs(outputs.mean().item() - 1) < 0.01
    assert torch.equal(dropout.eval()(torch.ones(5)), torch.ones(5))


def test_every_dropout_of_a_network_is_replaced_and_has_a_key_of_its_own():
    network = make_reproducible(nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))), 0, 0)
    layers = [module for module in network.modules() if isinstance(module, Dropout)]
    assert [module.p for module in layers] == [0.5, 0.1]
    assert layers[0].noise_key != layers[1].noise_key
    assert not any(isinstance(module, nn.Dropout) for module in network.modules())
    assert not any("noise" in name for name in network.state_dict())


def test_stacked_members_draw_what_they_draw_by_themselves():
    members = [layer(member) for member in range(3)]
    parameters, buffers = stack_module_state(members)
    stacked = vmap(lambda b: functional_call(_Draw(members[0]), {f"noise.{k}": v for k, v in b.items()}, ()))(buffers)
    assert not parameters
    set_training_step(members, 0)
    assert torch.equal(stacked, torch.stack([member.uniform(torch.Size([50])) for member in members]))


class _Draw(nn.Module):
    def __init__(self, noise: Noise) -> None:
        super().__init__()
        self.noise = noise

    def forward(self) -> torch.Tensor:
        return self.noise.uniform(torch.Size([50]))


def test_a_network_in_a_loop_of_ones_own_draws_new_numbers_at_each_call():
    dropout = make_reproducible(nn.Sequential(nn.Dropout(0.5)), seed=0, member=0)
    first, second = dropout(torch.ones(100)), dropout(torch.ones(100))
    assert not torch.equal(first, second)


def test_a_pass_in_evaluation_draws_the_same_for_all_samples_and_whenever_it_is_made():
    network = make_reproducible(nn.Sequential(nn.Dropout(0.5)), seed=0, member=0).eval()

    def drawn(number: int, batch: int) -> torch.Tensor:
        with stochastic_pass(network, number):
            return network(torch.ones(batch, 50))

    first = drawn(3, 1)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(drawn(3, 7), first.expand(7, 50))
    assert not torch.equal(drawn(4, 1), first)
    assert torch.equal(network(torch.ones(4, 50)), torch.ones(4, 50))


def test_passes_have_numbers_that_training_never_has_and_leave_its_own_as_they_were():
    noise = layer(step=5)
    with stochastic_pass(noise, 0):
        in_pass = noise.uniform(torch.Size([1, *SIZE]))[0]
    assert torch.equal(noise.uniform(SIZE), layer(step=5).uniform(SIZE))
    with stochastic_pass(noise, 1):
        other = noise.uniform(torch.Size([1, *SIZE]))[0]
    drawn = torch.stack([in_pass, other, layer().uniform(SIZE), layer(step=1).uniform(SIZE), layer(1).uniform(SIZE)])
    assert torch.corrcoef(drawn.double()).fill_diagonal_(0).abs().max() < 0.015
    assert stats.kstest(in_pass.numpy(), "uniform").pvalue > 1e-3


def test_a_layer_that_is_called_twice_in_a_pass_draws_anew():
    noise = layer()
    with stochastic_pass(noise, 0):
        first, second = (noise.uniform(torch.Size([2, 50])) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first[0], first[1])


def test_a_pass_that_fails_leaves_no_noise_behind():
    noise = layer().eval()
    with pytest.raises(ZeroDivisionError), stochastic_pass(noise, 0):
        raise ZeroDivisionError
    assert not noise.draws


def test_the_second_pass_of_a_step_has_numbers_of_its_own():
    calls = [first_call(step, second) for step in range(3) for second in (False, True)]
    assert calls == sorted(set(calls))
    assert first_call(1) == CALLS_PER_STEP
