"""Networks are spread over the ranks as evenly as their costs allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemblekit.ranks.assignment import assign, least_loaded


def loads(costs: list[float], ranks: list[int], num_ranks: int) -> list[float]:
    return [sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == own) for own in range(num_ranks)]


@pytest.mark.parametrize(
    ("networks", "num_ranks", "expected"),
    [(4, 2, [0, 0, 1, 1]), (5, 2, [0, 0, 0, 1, 1]), (7, 3, [0, 0, 0, 1, 1, 2, 2]), (3, 3, [0, 1, 2]), (6, 1, [0] * 6)],
)
def test_equal_networks_are_dealt_out_in_blocks(networks, num_ranks, expected):
    assert assign([2.5] * networks, num_ranks) == expected


def test_with_fewer_networks_than_ranks_each_has_a_rank_of_its_own():
    assert assign([1.0, 1.0], 4) == [0, 1]
    assert sorted(assign([1.0, 3.0], 4)) == [0, 1]


def test_an_expensive_network_has_a_rank_to_itself():
    assert assign([1, 1, 6, 1, 1, 1], 2) == [1, 1, 0, 1, 1, 1]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.integers(1, 5))
def test_no_rank_has_more_than_its_share_and_one_network(costs, num_ranks):
    ranks = assign(costs, num_ranks)
    assert set(ranks) <= set(range(num_ranks))
    assert max(loads(costs, ranks, num_ranks)) <= sum(costs) / num_ranks + max(costs) + 1e-9


def test_the_least_loaded_rank_is_the_first_of_several():
    assert least_loaded([2, 1, 1]) == 1
