"""All engines give the same numbers, for every method, with batch norm, dropout, growth, freezing and clipping."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

import ensemblekit as ek
from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines import ENGINES, Settings, Slot
from ensemblekit.members.build import build_members

M, B, SHAPE, C = 4, 12, (1, 8, 8), 3
CPU = torch.device("cpu")
VARIANTS = [
    *({"name": name} for name in sorted(ek.methods())),
    {"name": "gncl", "lambda": 0},
    {"name": "gncl", "mode": "exact"},
    {"name": "boosting", "schedule": "stagewise"},
]


def model(name: str, **parameters) -> ek.Model:
    return ek.models()[name].load()(**parameters)


MLP = model("mlp", hidden=(8,), dropout=0.3)
RESNET = model("resnet", width=4, blocks=2)


def method(table: dict) -> ek.Method:
    from ensemblekit.core.registry import discover
    from ensemblekit.spec.reader import build_plugin

    return build_plugin(ek.Method, table, discover())


def batches(count: int = 3, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        Batch(
            torch.randn(B, *SHAPE, generator=generator).to(dtype),
            torch.randint(C, (B,), generator=generator),
            torch.arange(B),
        )
        for _ in range(count)
    ]


def slots(models: list[ek.Model], frozen: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> list[Slot]:
    networks = build_members(models, SHAPE, C, seed=0)
    return [
        Slot(network.to(dtype), of, member, frozen=member in frozen)
        for member, (network, of) in enumerate(zip(networks, models, strict=True))
    ]


def settings(optimizer: str = "adabelief", **options) -> Settings:
    from ensemblekit.spec.optimizers import optimizer_section

    build = optimizer_section(optimizer).from_table({"name": optimizer, "lr": 0.01}).build
    return Settings(CPU, build, **options)


def train(
    name: str,
    members: list[Slot],
    objective: Objective,
    options: Settings,
    weights: Tensor | None = None,
    dtype=torch.float32,
):
    """The objectives of three steps, and all that they changed."""
    engine = ENGINES[name](members, objective, options)
    values = [engine.train_step(batch, weights, 0.01, step)[0] for step, batch in enumerate(batches(dtype=dtype))]
    engine.store_optimizer_state()
    outputs = engine.predict(batches(1, dtype)[0].inputs)
    engine.close()
    return torch.stack(values), outputs, members


def assert_alike(found, expected, tolerance=1e-5) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance)
    for left, right in zip(found[2], expected[2], strict=True):
        assert (left.frozen, left.steps) == (right.frozen, right.steps)
        state, other = left.network.state_dict(), right.network.state_dict()
        assert state.keys() == other.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)
        assert left.optimizer_state.keys() == right.optimizer_state.keys()
        for name, entry in left.optimizer_state.items():
            for key, value in entry.items():
                torch.testing.assert_close(
                    torch.as_tensor(value), torch.as_tensor(right.optimizer_state[name][key]), rtol=1e-3, atol=1e-5
                )


@pytest.mark.parametrize("base", [MLP, RESNET], ids=["mlp", "resnet"])
@pytest.mark.parametrize("table", VARIANTS, ids=lambda table: "-".join(map(str, table.values())))
@pytest.mark.parametrize("engine", ["threaded", "stacked"])
def test_every_engine_gives_the_numbers_of_the_sequential_one(engine, table, base):
    objective = Objective([method(table)], _loss())
    weights = torch.rand(B, M, generator=torch.Generator().manual_seed(1))
    frozen = frozen_by(objective)
    columns = weights if objective.needs_frozen_members else weights[:, M - 1 :]
    expected = train("sequential", slots([base] * M, frozen), objective, settings(), columns)
    assert_alike(train(engine, slots([base] * M, frozen), objective, settings(), columns), expected)


def frozen_by(objective: Objective) -> tuple[int, ...]:
    """The members that no longer learn at the end of a run whose members come one after the other."""
    return tuple(range(M - 1)) if objective.hooks.hook.members_at_start(num_members=M) < M else ()


def _loss() -> ek.Loss:
    from ensemblekit.core.losses import CrossEntropy

    return CrossEntropy()


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_the_same_engine_gives_the_same_bits_twice(engine):
    objective = Objective([method({"name": "gncl"})], _loss())
    first = train(engine, slots([MLP] * M), objective, settings())
    second = train(engine, slots([MLP] * M), objective, settings())
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nadam", "asgd", "rprop"])
def test_optimizers_with_counters_of_their_own_work_on_every_engine(engine, optimizer):
    # without batch norm: a bias before it has a gradient of zero but for rounding, which these optimizers magnify
    plain = model("mlp", hidden=(8,), batch_norm=False, dropout=0.3)
    objective = Objective([method({"name": "gncl"})], _loss())
    expected = train("sequential", slots([plain] * M), objective, settings(optimizer))
    assert_alike(train(engine, slots([plain] * M), objective, settings(optimizer)), expected)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("name", ["gncl", "independent"])
def test_recomputing_changes_no_number(engine, name):
    objective = Objective([method({"name": name})], _loss())
    for base in (MLP, RESNET):
        expected = train(engine, slots([base] * M), objective, settings())
        assert_alike(train(engine, slots([base] * M), objective, settings(recompute=True)), expected, 1e-6)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_each_members_gradient_is_clipped_by_itself(engine):
    objective = Objective([method({"name": "independent"})], _loss())
    expected = train("sequential", slots([MLP] * M), objective, settings("sgd", clip_norm=0.01))
    assert_alike(train(engine, slots([MLP] * M), objective, settings("sgd", clip_norm=0.01)), expected)
    free = train(engine, slots([MLP] * M), objective, settings("sgd"))
    assert not torch.allclose(free[1], expected[1], atol=1e-5)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_frozen_members_stay_as_they_are_and_are_not_run_where_nobody_needs_them(engine):
    members = slots([RESNET] * M, frozen=(0, 2))
    before = [deepcopy(slot.network.state_dict()) for slot in members]
    train(engine, members, Objective([method({"name": "boosting"})], _loss()), settings())
    for place in (0, 2):
        for name, value in members[place].network.state_dict().items():
            assert torch.equal(value, before[place][name])
    snapshot = Objective([method({"name": "snapshot"})], _loss())
    members = slots([RESNET] * M, frozen=(0, 1, 2))
    running = ENGINES[engine](members, snapshot, settings())

    def forbidden(*_):
        raise AssertionError("a kept copy was run in training")

    for slot in members[:3]:
        slot.network.forward = forbidden
    outputs = running.forward(batches(1)[0].inputs, 0)
    running.close()
    assert outputs.shape == (1, B, C)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_members_of_different_architectures_train_together(engine):
    models = [MLP, RESNET, MLP, model("mlp", hidden=(5, 5))]
    objective = Objective([method({"name": "gncl"})], _loss())
    expected = train("sequential", slots(models), objective, settings())
    assert_alike(train(engine, slots(models), objective, settings()), expected)


@pytest.mark.parametrize("first", sorted(ENGINES))
@pytest.mark.parametrize("second", sorted(ENGINES))
def test_training_can_go_on_with_another_engine_and_a_new_member(first, second):
    objective = Objective([method({"name": "gncl"})], _loss())

    def grown(one: str, other: str):
        members = slots([MLP] * M)[: M - 1]
        train(one, members, objective, settings())
        return train(other, [*members, slots([MLP] * M)[-1]], objective, settings())

    assert_alike(grown(first, second), grown("sequential", "sequential"))


@pytest.mark.parametrize("table", VARIANTS, ids=lambda table: "-".join(map(str, table.values())))
@pytest.mark.parametrize("engine", ["threaded", "stacked"])
def test_float64_agrees_to_twelve_digits(engine, table):
    objective = Objective([method(table)], _loss())
    frozen = frozen_by(objective)
    found, expected = (
        train(name, slots([MLP] * M, frozen, torch.float64), objective, settings("sgd"), dtype=torch.float64)
        for name in (engine, "sequential")
    )
    assert_alike(found, expected, tolerance=1e-12)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_bf16_trains_close_to_float32(engine):
    objective = Objective([method({"name": "gncl"})], _loss())
    exact = train(engine, slots([RESNET] * M), objective, settings("sgd"))
    rough = train(engine, slots([RESNET] * M), objective, settings("sgd", bf16=True))
    torch.testing.assert_close(rough[0], exact[0], rtol=0.05, atol=0.05)
    assert rough[1].dtype == torch.float32
    assert not torch.equal(rough[0], exact[0])


@pytest.mark.parametrize(("name", "passes"), [("bagging", 1), ("adversarial", 2)])
def test_independent_members_are_trained_without_keeping_all_graphs(name, passes):
    """While one member trains, no other member's graph is alive."""
    members = slots([MLP] * M)
    engine = ENGINES["sequential"](members, Objective([method({"name": name})], _loss()), settings())
    alive: list[int] = []
    for runner in engine.runners.values():
        original = runner.backward

        def watched(gradient, original=original):
            alive.append(sum(other.outputs is not None for other in engine.runners.values()))
            original(gradient)

        runner.backward = watched
    engine.train_step(batches(1)[0], torch.ones(B, M), 0.01, 0)
    assert alive == [1] * M * passes


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_independent_members_that_are_frozen_are_run_and_stay_as_they_are(engine):
    objective = Objective([method({"name": "independent"})], _loss())
    expected = train("sequential", slots([MLP] * M, frozen=(0, 2)), objective, settings())
    assert_alike(train(engine, slots([MLP] * M, frozen=(0, 2)), objective, settings()), expected)
