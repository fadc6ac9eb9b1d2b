"""Growing and freezing members, on a tiny stand-in for the ensemble in training."""

from __future__ import annotations

import math

import pytest

import ensemblekit as ek
from ensemblekit.core.hooks import RunHooks


class StandIn:
    """Members are (identity, epochs trained, frozen)."""

    def __init__(self, size: int) -> None:
        self.members = [{"id": index, "trained": 0, "frozen": False} for index in range(size)]

    def __len__(self) -> int:
        return len(self.members)

    def grow(self) -> int:
        self.members.append({"id": len(self.members), "trained": 0, "frozen": False})
        return len(self.members) - 1

    def keep_copy(self, member: int) -> int:
        self.members.insert(member, {**self.members[member], "frozen": True})
        return member

    def freeze(self, member: int) -> None:
        self.members[member]["frozen"] = True


def run(method: ek.Method, num_members: int, num_epochs: int) -> StandIn:
    hooks = RunHooks([method]).call
    ensemble = StandIn(hooks.members_at_start(num_members=num_members))
    for epoch in range(1, num_epochs + 1):
        hooks.epoch_started(ensemble=ensemble, epoch=epoch, num_epochs=num_epochs, num_members=num_members, num_steps=1)
        for member in ensemble.members:
            member["trained"] += not member["frozen"]
    return ensemble


def load(name: str) -> type[ek.Method]:
    return ek.methods()[name].load()


def test_snapshot_keeps_the_papers_fifteen_copies_and_the_final_network():
    ensemble = run(load("snapshot")(), 16, 100)
    trained = [member["trained"] for member in ensemble.members]
    assert trained == [1, 2, 3, 4, 9, 14, 19, 24, 29, 39, 49, 59, 69, 79, 89, 100]
    assert [member["frozen"] for member in ensemble.members] == [True] * 15 + [False]


def test_snapshot_cycles_leave_one_member_each():
    snapshot = load("snapshot")(cycles=4)
    assert snapshot.required_members() == 4
    assert [member["trained"] for member in run(snapshot, 4, 10).members] == [2, 5, 7, 10]


def test_snapshot_cycles_follow_the_cosine_of_huang_et_al():
    snapshot = load("snapshot")(cycles=5)
    length = math.ceil(50 / 5)
    for step in range(500):
        epoch = step / 10
        expected = 0.1 / 2 * (math.cos(math.pi * (epoch % length) / length) + 1)
        assert snapshot.learning_rate(0.1, epoch, 50) == pytest.approx(expected)


def test_snapshot_without_cycles_leaves_the_learning_rate_to_the_schedule():
    assert load("snapshot")().learning_rate(0.1, 3.0, 50) is None


def test_fast_geometric_keeps_a_copy_in_the_middle_of_every_cycle_and_ends_in_the_middle_of_the_last():
    method = load("fast_geometric")(cycles=4, cycle=6)
    assert method.required_members() == 4
    ensemble = run(method, 4, 30)
    assert [member["trained"] for member in ensemble.members] == [12, 18, 24, 30]
    assert [member["frozen"] for member in ensemble.members] == [True] * 3 + [False]


def test_fast_geometric_follows_the_triangles_of_garipov_et_al():
    """Their iterations count from 1, and a step's rate is that at its beginning, as in their own code."""
    alpha_1, alpha_2, cycle, steps_per_epoch, start = 0.05, 0.0005, 4, 10, 12
    method = load("fast_geometric")(cycles=3, cycle=cycle, high=0.5, low=0.005)
    c = cycle * steps_per_epoch
    for i in range(10 * steps_per_epoch):
        t = i % c / c
        expected = (
            (1 - 2 * t) * alpha_1 + 2 * t * alpha_2 if t <= 0.5 else (2 - 2 * t) * alpha_2 + (2 * t - 1) * alpha_1
        )
        assert method.learning_rate(0.1, start + i / steps_per_epoch, 22) == pytest.approx(expected)


def test_fast_geometric_is_lowest_whenever_a_copy_is_kept():
    method = load("fast_geometric")(cycles=5, cycle=2, high=1.0, low=0.01)
    for epoch in method.snapshot_epochs(20):
        assert method.learning_rate(0.1, epoch - 1, 20) == pytest.approx(0.001)
    assert method.learning_rate(0.1, 20 - 1e-9, 20) == pytest.approx(0.001)


def test_fast_geometric_leaves_ordinary_training_to_the_schedule():
    method = load("fast_geometric")(cycles=5, cycle=2)
    assert [method.learning_rate(0.1, epoch, 20) is None for epoch in (0, 10.99, 11, 19.5)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(("members", "epochs"), [(4, 8), (3, 10), (5, 5), (1, 3)])
@pytest.mark.parametrize("table", [{"name": "boosting", "schedule": "stagewise"}, {"name": "adaboost"}], ids=str)
def test_stagewise_boosting_gives_each_stage_its_share_of_the_epochs(table, members, epochs):
    ensemble = run(load(table["name"])(**{key: table[key] for key in table.keys() - {"name"}}), members, epochs)
    trained = [member["trained"] for member in ensemble.members]
    assert len(trained) == members
    assert sum(trained) == epochs
    assert max(trained) - min(trained) <= 1
    assert [member["frozen"] for member in ensemble.members] == [True] * (members - 1) + [False]
    assert [member["id"] for member in ensemble.members] == list(range(members))


@pytest.mark.parametrize("name", sorted(set(ek.methods()) - {"adaboost", "snapshot", "fast_geometric"}))
def test_all_other_methods_train_every_member_all_the_time(name):
    ensemble = run(load(name)(), 3, 7)
    assert [(member["trained"], member["frozen"]) for member in ensemble.members] == [(7, False)] * 3
