"""The search for the best members, against searches that are written in another way."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from ensemblekit.inference.selection import (
    PICKS_PER_MEMBER,
    exhaustive,
    greedy,
    greedy_with_replacement,
    number_of_sets,
)

NUM_MEMBERS, SIZE = 7, 4


def always(members):
    return True


@pytest.fixture(params=range(5))
def problem(request):
    """Members (M, N) that predict targets (N,) with errors of their own; the loss is that of their mean."""
    random = np.random.default_rng(request.param)
    targets = random.normal(size=50)
    outputs = targets + random.normal(size=(NUM_MEMBERS, 50)) * random.uniform(0.3, 2, size=(NUM_MEMBERS, 1))

    def loss_of(members):
        return float(np.square(outputs[list(members)].mean(axis=0) - targets).mean())

    return outputs, targets, loss_of


def caruana(outputs, targets, rounds, replace, size):
    """Caruana et al. 2004 by a running sum, as their paper describes it."""
    total, picks, losses = np.zeros_like(targets), [], []
    for count in range(1, rounds + 1):
        best = None
        for member in range(len(outputs)):
            if not replace and member in picks:
                continue
            if replace and len(set(picks) | {member}) > size:
                continue
            loss = np.mean(((total + outputs[member]) / count - targets) ** 2)
            if best is None or loss < best[0] - 1e-15:
                best = (loss, member)
        total = total + outputs[best[1]]
        picks.append(best[1])
        losses.append(best[0])
    return picks, losses


def test_greedy_selection_is_that_of_a_running_sum(problem):
    outputs, targets, loss_of = problem
    path = greedy(NUM_MEMBERS, SIZE, loss_of, always)
    picks, losses = caruana(outputs, targets, SIZE, replace=False, size=SIZE)
    assert path[-1].picks == tuple(picks)
    assert [choice.loss for choice in path] == pytest.approx(losses)


def test_greedy_selection_with_replacement_is_that_of_a_running_sum(problem):
    outputs, targets, loss_of = problem
    path = greedy_with_replacement(NUM_MEMBERS, SIZE, loss_of, always)
    picks, losses = caruana(outputs, targets, PICKS_PER_MEMBER * SIZE, replace=True, size=SIZE)
    assert path[-1].picks == tuple(picks)
    assert [choice.loss for choice in path] == pytest.approx(losses)
    assert max(choice.size for choice in path) <= SIZE
    assert sum(path[-1].counts.values()) == PICKS_PER_MEMBER * SIZE


def test_exhaustive_search_finds_the_best_set_of_each_size_and_is_never_worse_than_greedy(problem):
    outputs, targets, loss_of = problem
    found = exhaustive(NUM_MEMBERS, SIZE, loss_of, always)
    for size, choice in enumerate(found, start=1):
        sets = [list(chosen) for chosen in combinations(range(NUM_MEMBERS), size)]
        errors = [np.mean((outputs[chosen].mean(axis=0) - targets) ** 2) for chosen in sets]
        assert list(choice.picks) == sets[int(np.argmin(errors))]
    for best, nested in zip(found, greedy(NUM_MEMBERS, SIZE, loss_of, always), strict=True):
        assert best.loss <= nested.loss + 1e-12


@pytest.mark.parametrize("search", [greedy, greedy_with_replacement, exhaustive])
def test_no_choice_exceeds_a_budget(problem, search):
    _, _, loss_of = problem
    costs = [5, 1, 1, 5, 1, 2, 9]
    path = search(NUM_MEMBERS, SIZE, loss_of, lambda members: sum(costs[member] for member in members) <= 4)
    assert path
    assert all(sum(costs[member] for member in choice.counts) <= 4 for choice in path)


def test_sets_are_counted():
    assert number_of_sets(12, 12) == 4095
    assert number_of_sets(5, 2) == 15
