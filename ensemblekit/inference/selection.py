"""Searches the members whose combined output has the lowest loss: greedily, or among all sets of members.

Pure: members are numbers 0 … M-1, and a function returns the loss of a choice of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Literal

EXHAUSTIVE_LIMIT = 4096
"""Exhaustive search is used by default for at most so many sets of members: all those of 12, or up to 4 of 17."""
EXHAUSTIVE_OUTPUTS = 10**8
"""And only if their combined outputs, sets × samples × classes, are at most so many: more would take minutes."""
PICKS_PER_MEMBER = 4
"""Picks with replacement for each member that may be chosen, so that weights are multiples of about 1 / (4 K)."""

Search = Literal["auto", "greedy", "exhaustive"]
LossOf = Callable[[Sequence[int]], float]
"""Returns the loss of the combined output of members; one that is listed twice counts twice."""
Affords = Callable[[Collection[int]], bool]
"""Whether members are within the budget."""


@dataclass(frozen=True)
class Choice:
    """Some members and the loss of their combined output."""

    picks: tuple[int, ...]
    """Members in the order in which they were chosen; with replacement, some more than once."""
    loss: float

    @property
    def counts(self) -> dict[int, int]:
        """How often each member was picked, in ascending order of the members."""
        return dict(sorted(Counter(self.picks).items()))

    @property
    def size(self) -> int:
        """The number of different members."""
        return len(set(self.picks))


def number_of_sets(num_members: int, size: int) -> int:
    """Return how many sets of 1 to `size` members there are."""
    return sum(comb(num_members, count) for count in range(1, size + 1))


def greedy(num_members: int, size: int, loss_of: LossOf, affords: Affords) -> list[Choice]:
    """Add one member after the other, each time the one that gives the lowest loss (Caruana et al. 2004).

    Args:
        num_members: how many members there are.
        size: how many to choose at most.
        loss_of: returns the loss of a choice.
        affords: whether a choice is within the budget.

    Returns:
        The choice after each step; each contains the one before it. Equal losses: the member with the lower number.
    """
    path: list[Choice] = []
    picks: tuple[int, ...] = ()
    for _ in range(size):
        candidates = [(*picks, member) for member in range(num_members) if member not in picks]
        best = _best(candidates, loss_of, affords)
        if best is None:
            break
        path.append(best)
        picks = best.picks
    return path


def greedy_with_replacement(num_members: int, size: int, loss_of: LossOf, affords: Affords) -> list[Choice]:
    """Pick members greedily, also those that were picked before, which then count more; arguments as for `greedy`.

    Returns:
        The choice after each of PICKS_PER_MEMBER · size picks. There are never more than `size` different members.
    """
    path: list[Choice] = []
    picks: tuple[int, ...] = ()
    for _ in range(PICKS_PER_MEMBER * size):
        allowed = range(num_members) if len(set(picks)) < size else sorted(set(picks))
        best = _best([(*picks, member) for member in allowed], loss_of, affords)
        if best is None:
            break
        path.append(best)
        picks = best.picks
    return path


def exhaustive(num_members: int, size: int, loss_of: LossOf, affords: Affords) -> list[Choice]:
    """Return the best of all sets of each size from 1 to `size` that has one within the budget; as for `greedy`."""
    found = [_best(combinations(range(num_members), count), loss_of, affords) for count in range(1, size + 1)]
    return [choice for choice in found if choice is not None]


def _best(candidates: Iterable[tuple[int, ...]], loss_of: LossOf, affords: Affords) -> Choice | None:
    # members are combined in ascending order, as they are once they have been chosen
    choices = (Choice(picks, loss_of(sorted(picks))) for picks in candidates if affords(set(picks)))
    return min(choices, key=lambda choice: choice.loss, default=None)
