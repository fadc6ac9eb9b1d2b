"""Which rank trains which network: as evenly as their costs allow, neighbours together."""

from __future__ import annotations

from collections.abc import Sequence


def assign(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return the rank of each network.

    Networks of equal cost are dealt out in blocks, so that a rank has neighbours, which suits stacks. Others go, the
    most expensive first, to the rank that has least to do.

    Args:
        costs: of one step of each network, in any unit.
        num_ranks: the number of ranks; some have no network if there are fewer networks.
    """
    if len(set(costs)) <= 1:
        return [index * num_ranks // len(costs) if len(costs) > num_ranks else index for index in range(len(costs))]
    loads = [0.0] * num_ranks
    ranks = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        ranks[index] = least_loaded(loads)
        loads[ranks[index]] += costs[index]
    return ranks


def least_loaded(loads: Sequence[float]) -> int:
    """Return the rank that has least to do, the first of several."""
    return min(range(len(loads)), key=loads.__getitem__)
