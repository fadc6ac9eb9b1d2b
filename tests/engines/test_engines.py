"""All engines give the same numbers, for every method, with batch norm, dropout, growth, freezing and clipping."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from helpers.engine_training import (
    MLP,
    RESNET,
    VARIANTS,
    B,
    C,
    M,
    assert_same_training,
    batches,
    frozen_by,
    member_states,
    method,
    model,
    settings,
    train,
)

from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Objective
from ensemblekit.engines.selection import engine_class
from ensemblekit.spec.sections import ENGINES


@pytest.mark.parametrize("base", [MLP, RESNET], ids=["mlp", "resnet"])
@pytest.mark.parametrize("engine", ["threaded", "stacked"])
def test_every_engine_agrees_with_the_sequential_one_in_float32(engine, base):
    objective = Objective([method({"name": "gncl"})], CrossEntropy())
    weights = torch.rand(B, M, generator=torch.Generator().manual_seed(1))
    expected = train("sequential", member_states([base] * M), objective, settings(), weights)
    assert_same_training(train(engine, member_states([base] * M), objective, settings(), weights), expected)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_the_same_engine_gives_the_same_bits_twice(engine):
    objective = Objective([method({"name": "gncl"})], CrossEntropy())
    first = train(engine, member_states([MLP] * M), objective, settings())
    second = train(engine, member_states([MLP] * M), objective, settings())
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nadam", "asgd", "rprop"])
def test_optimizers_with_counters_of_their_own_work_on_every_engine(engine, optimizer):
    # without batch norm: a bias before it has a gradient of zero but for rounding, which these optimizers magnify
    plain = model("mlp", hidden=(8,), batch_norm=False, dropout=0.3)
    objective = Objective([method({"name": "gncl"})], CrossEntropy())
    expected = train("sequential", member_states([plain] * M), objective, settings(optimizer))
    assert_same_training(train(engine, member_states([plain] * M), objective, settings(optimizer)), expected)


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("name", ["gncl", "independent"])
def test_recomputing_changes_no_number(engine, name):
    objective = Objective([method({"name": name})], CrossEntropy())
    for base in (MLP, RESNET):
        expected = train(engine, member_states([base] * M), objective, settings())
        assert_same_training(
            train(engine, member_states([base] * M), objective, settings(recompute=True)), expected, 1e-6
        )


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_each_members_gradient_is_clipped_by_itself(engine):
    objective = Objective([method({"name": "independent"})], CrossEntropy())
    expected = train("sequential", member_states([MLP] * M), objective, settings("sgd", clip_norm=0.01))
    assert_same_training(train(engine, member_states([MLP] * M), objective, settings("sgd", clip_norm=0.01)), expected)
    free = train(engine, member_states([MLP] * M), objective, settings("sgd"))
    assert not torch.allclose(free[1], expected[1], atol=1e-5)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_frozen_members_stay_as_they_are_and_are_not_run_where_nobody_needs_them(engine):
    members = member_states([RESNET] * M, frozen=(0, 2))
    before = [deepcopy(slot.network.state_dict()) for slot in members]
    train(engine, members, Objective([method({"name": "boosting"})], CrossEntropy()), settings())
    for place in (0, 2):
        for name, value in members[place].network.state_dict().items():
            assert torch.equal(value, before[place][name])
    snapshot = Objective([method({"name": "snapshot"})], CrossEntropy())
    members = member_states([RESNET] * M, frozen=(0, 1, 2))
    running = engine_class(engine)(members, snapshot, settings())

    def forbidden(*_):
        raise AssertionError("a kept copy was run in training")

    for slot in members[:3]:
        slot.network.forward = forbidden
    outputs = running.forward(batches(1)[0], 0)
    running.close()
    assert outputs.shape == (1, B, C)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_members_of_different_architectures_train_together(engine):
    models = [MLP, RESNET, MLP, model("mlp", hidden=(5, 5))]
    objective = Objective([method({"name": "gncl"})], CrossEntropy())
    expected = train("sequential", member_states(models), objective, settings())
    assert_same_training(train(engine, member_states(models), objective, settings()), expected)


@pytest.mark.parametrize("first", sorted(ENGINES))
@pytest.mark.parametrize("second", sorted(ENGINES))
def test_training_can_go_on_with_another_engine_and_a_new_member(first, second):
    objective = Objective([method({"name": "gncl"})], CrossEntropy())

    def grown(one: str, other: str):
        members = member_states([MLP] * M)[: M - 1]
        train(one, members, objective, settings())
        return train(other, [*members, member_states([MLP] * M)[-1]], objective, settings())

    assert_same_training(grown(first, second), grown("sequential", "sequential"))


@pytest.mark.parametrize(
    ("table", "base"),
    [
        *((table, MLP) for table in VARIANTS),
        # one of each kind for convolutions: coupled, weighted and separable, growing, with frozen copies, two passes
        *(
            (table, RESNET)
            for table in VARIANTS
            if table["name"] in ("gncl", "bagging", "boosting", "snapshot", "adversarial")
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value.name,
)
@pytest.mark.parametrize("engine", ["threaded", "stacked"])
def test_every_engine_agrees_with_the_sequential_one_in_float64_to_twelve_digits(engine, table, base):
    objective = Objective([method(table)], CrossEntropy())
    frozen = frozen_by(objective)
    weights = torch.rand(B, M, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    active = [index for index in range(M) if objective.needs_frozen_members or index not in frozen]
    weights = weights[:, active]

    def trained(name: str):
        members = member_states([base] * M, frozen, torch.float64)
        return train(name, members, objective, settings("sgd"), weights, dtype=torch.float64)

    assert_same_training(trained(engine), trained("sequential"), tolerance=1e-12)


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_bf16_trains_close_to_float32(engine):
    objective = Objective([method({"name": "gncl"})], CrossEntropy())
    exact = train(engine, member_states([RESNET] * M), objective, settings("sgd"))
    rough = train(engine, member_states([RESNET] * M), objective, settings("sgd", bf16=True))
    torch.testing.assert_close(rough[0], exact[0], rtol=0.05, atol=0.05)
    assert rough[1].dtype == torch.float32
    assert not torch.equal(rough[0], exact[0])


@pytest.mark.parametrize(("name", "passes"), [("bagging", 1), ("adversarial", 2)])
def test_independent_members_are_trained_without_keeping_all_graphs(name, passes):
    """While one member trains, no other member's graph is alive."""
    members = member_states([MLP] * M)
    engine = engine_class("sequential")(members, Objective([method({"name": name})], CrossEntropy()), settings())
    alive: list[int] = []
    for part in engine.parts:
        original = part.backward

        def watched(gradient, original=original):
            alive.append(sum(other.outputs is not None for other in engine.parts))
            original(gradient)

        part.backward = watched
    engine.train_step(batches(1)[0], torch.ones(B, M), 0.01, 0)
    assert alive == [1] * M * passes


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_independent_members_that_are_frozen_are_run_and_stay_as_they_are(engine):
    objective = Objective([method({"name": "independent"})], CrossEntropy())
    expected = train("sequential", member_states([MLP] * M, frozen=(0, 2)), objective, settings())
    assert_same_training(train(engine, member_states([MLP] * M, frozen=(0, 2)), objective, settings()), expected)
