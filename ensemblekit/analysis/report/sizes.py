"""Ensemble size: quality against the number of members, and the expected gain of twice as many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ensemblekit.analysis.report import drawing
from ensemblekit.analysis.report.charts import Chart, DataTable, number, percent

Combine = Callable[[Tensor], Tensor]
Score = Callable[[Tensor], dict[str, float]]
MOST_SIZES, LEAST_ORDERS, MOST_ORDERS = 16, 8, 20


@dataclass(frozen=True)
class SizeCurve:
    """A measure of ensembles of 1, 2, … M of the members, the mean and the spread over orders of the members."""

    sizes: tuple[int, ...]
    mean: tuple[float, ...]
    spread: tuple[float, ...]
    """Standard deviation over the orders; 0 for all members."""
    asymptote: float
    """a of the fitted curve a + b/m: the value of infinitely many members."""
    slope: float
    """b of the fitted curve."""

    @property
    def doubling(self) -> float:
        """The expected change if there were twice as many members, from the fitted curve."""
        return -self.slope / (2 * self.sizes[-1])


def size_curves(outputs: Tensor, combine: Combine, score: Score, seed: int = 0) -> dict[str, SizeCurve]:
    """Measure ensembles of the first m members in several orders.

    Orders are rotations of random ones, so that every member is first, second … equally often: ensembles of one are
    exactly the mean member.

    Args:
        outputs: the members' outputs (M, N, C).
        combine: combines outputs (m, N, C) to (N, C).
        score: computes measures by name from a combined output.
        seed: of the random orders.
    """
    num_members = len(outputs)
    sizes = chosen_sizes(num_members)
    averaged = _is_mean(combine, outputs)
    orders = member_orders(num_members, seed)
    measured: dict[tuple[int, ...], dict[str, float]] = {}  # the same set of members is measured once
    found: dict[str, list[list[float]]] = {}
    for order in orders:
        total, position = torch.zeros_like(outputs[0]), 0
        for index, size in enumerate(sizes):
            chosen = tuple(sorted(order[:size]))
            if averaged:
                total = total + outputs[list(order[position:size])].sum(dim=0)
                position = size
            if chosen not in measured:
                combined = total / size if averaged else combine(outputs[list(chosen)])
                measured[chosen] = score(combined)
            for name, value in measured[chosen].items():
                found.setdefault(name, [[] for _ in sizes])[index].append(value)
    return {name: _fitted(sizes, values) for name, values in found.items()}


def chosen_sizes(num_members: int) -> tuple[int, ...]:
    """Return every size up to M, or about 16 evenly spaced ones with 1, 2 and M if there are more."""
    if num_members <= MOST_SIZES:
        return tuple(range(1, num_members + 1))
    spaced = torch.linspace(2, num_members, MOST_SIZES - 1).round().long().tolist()
    return tuple(dict.fromkeys([1, *spaced]))


def member_orders(num_members: int, seed: int) -> list[list[int]]:
    """Return orders of the members: rotations of random permutations."""
    generator = torch.Generator().manual_seed(seed)
    orders: list[list[int]] = []
    while len(orders) < LEAST_ORDERS:
        first = torch.randperm(num_members, generator=generator).tolist()
        orders += [first[start:] + first[:start] for start in range(num_members)]
    return orders[:MOST_ORDERS] if num_members > MOST_ORDERS else orders


def _is_mean(combine: Combine, outputs: Tensor) -> bool:
    """Whether members are combined by the mean of their outputs, which sums in turn compute much faster."""
    few = outputs[:, :64]
    subsets = (few, few[: max(1, len(few) // 2)])
    return all(torch.allclose(combine(part), part.mean(dim=0), rtol=1e-4, atol=1e-5) for part in subsets)


def _fitted(sizes: Sequence[int], values: Sequence[Sequence[float]]) -> SizeCurve:
    """Fit a + b/m by least squares to the means of the larger half of the sizes.

    The squared error of a mean of m members, over random subsets, is exactly of this form; other measures are nearly.
    """
    means = [sum(column) / len(column) for column in values]
    spreads = [
        (sum((value - mean) ** 2 for value in column) / len(column)) ** 0.5
        for column, mean in zip(values, means, strict=True)
    ]
    used = [index for index, size in enumerate(sizes) if 4 * size >= sizes[-1]] if len(sizes) > 4 else range(len(sizes))
    x = torch.tensor([1 / sizes[index] for index in used], dtype=torch.float64)
    y = torch.tensor([means[index] for index in used], dtype=torch.float64)
    centred = x - x.mean()
    slope = float((centred * y).sum() / centred.square().sum()) if len(x) > 1 else 0.0
    return SizeCurve(tuple(sizes), tuple(means), tuple(spreads), float(y.mean()) - slope * float(x.mean()), slope)


LABELS = {"accuracy": "accuracy", "loss": "loss", "mse": "mean squared error"}


def size_charts(curves: Mapping[str, SizeCurve]) -> list[Chart]:
    """Draw each measure against the number of members, with the fitted curve up to twice as many."""
    return [_size_chart(name, curve) for name, curve in curves.items()]


def _size_chart(name: str, curve: SizeCurve) -> Chart:
    label, last = LABELS.get(name, name), curve.sizes[-1]
    figure, (axes,) = drawing.new_figure()
    low = [mean - spread for mean, spread in zip(curve.mean, curve.spread, strict=True)]
    high = [mean + spread for mean, spread in zip(curve.mean, curve.spread, strict=True)]
    axes.fill_between(curve.sizes, low, high, color=drawing.SERIES[0], alpha=0.15, linewidth=0)
    drawing.series(axes, curve.sizes, curve.mean, "mean over orders of the members", 0, 1)
    fitted = [curve.sizes[0] + (2 * last - curve.sizes[0]) * step / 60 for step in range(61)]
    fitted = [size for size in fitted if 4 * size >= last or len(curve.sizes) <= 4]
    values = [curve.asymptote + curve.slope / size for size in fitted]
    axes.plot(
        fitted, values, color=drawing.SERIES[1], linestyle=drawing.DASHES[1], linewidth=1.2, label="fitted a + b/m"
    )
    axes.set_xlabel("members", color=drawing.FOREGROUND)
    axes.set_ylabel(label, color=drawing.FOREGROUND)
    drawing.limit_ticks(axes, integers=True)
    drawing.legend(axes)
    gain = gain_text(name, curve)
    return Chart(
        name=f"size-{name}",
        title=f"{label.capitalize()} against the number of members",
        caption=f"Mean and standard deviation over orders of the members. {gain}",
        description=f"{_value(name, curve.mean[0])} with one member, {_value(name, curve.mean[-1])} with all. {gain}",
        figure=figure,
        table=DataTable.of(
            ("members", label, "standard deviation", "fitted"),
            [
                (size, mean, spread, curve.asymptote + curve.slope / size)
                for size, mean, spread in zip(curve.sizes, curve.mean, curve.spread, strict=True)
            ],
        ),
    )


def gain_text(name: str, curve: SizeCurve) -> str:
    """Say what twice as many members would change."""
    last = curve.sizes[-1]
    change = f"{100 * curve.doubling:+.2f} percentage points" if name == "accuracy" else f"{curve.doubling:+.3g}"
    return f"Expected change from {last} to {2 * last} members, by the fitted curve: {change}."


def _value(name: str, value: float) -> str:
    return percent(value) if name == "accuracy" else number(value)
