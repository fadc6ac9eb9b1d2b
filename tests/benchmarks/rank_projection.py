"""Fits a latency–bandwidth model to the measured exchanges, and writes the projection to 1,000 ranks in docs/ranks.md.

``python tests/benchmarks/rank_projection.py`` writes the tables and the figure from results/ranks.csv, which
rank_exchanges.py has measured; ``--check`` only says whether the tables are up to date.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results" / "ranks.csv"
PAGE, FIGURE = ROOT / "docs" / "ranks.md", ROOT / "docs" / "figures" / "ranks.svg"
BLOCK = 128 * 100 * 4
"""Bytes of one member's outputs: 128 samples, 100 classes, float32."""
RANKS = (2, 8, 32, 100, 300, 1000)
NAMESPACE_RATE, BURST = 200e6 / 8, 65_536
ROUND_TRIPS_OF_JITTER = 0.5
"""Mean of the exponential jitter of a link in the simulation, in latencies."""
ETHERNET_LATENCY, ETHERNET_BANDWIDTH = 50e-6, 10e9 / 8
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Model:
    """A ring all-gather takes (n − 1) · (latency + bytes / bandwidth), and n / cores times as long on too few cores."""

    latency: float
    bandwidth: float
    cores: int

    def ring(self, ranks: int, size: float = BLOCK, oversubscribed: bool = False) -> float:
        return (ranks - 1) * (self.latency + size / self.bandwidth) * (self.share(ranks) if oversubscribed else 1)

    def tree(self, ranks: int, size: float = BLOCK) -> float:
        """Recursive doubling: the same bytes in log2(n) rounds."""
        return ceil(log2(ranks)) * self.latency + (ranks - 1) * size / self.bandwidth

    def share(self, ranks: int) -> float:
        return max(1.0, ranks / self.cores)


def of_kind(rows: Rows, kind: str) -> list[tuple[int, int, float]]:
    """(ranks, bytes, seconds) of the measurements of a kind."""
    return [(int(row["ranks"]), int(row["bytes"]), float(row["seconds"])) for row in rows if row["kind"] == kind]


def fitted(rows: Rows) -> Model:
    """The latency and the bandwidth with the least squares of relative errors."""
    cores = int(re.search(r"(\d+) cores", rows[0]["machine"]).group(1))
    measured = of_kind(rows, "loopback")
    rounds = np.array([(ranks - 1) * max(1.0, ranks / cores) for ranks, _, _ in measured])
    sizes = np.array([size for _, size, _ in measured])
    seconds = np.array([value for _, _, value in measured])
    factors = np.stack([rounds, rounds * sizes], axis=1) / seconds[:, None]
    latency, per_byte = np.linalg.lstsq(factors, np.ones(len(seconds)), rcond=None)[0]
    return Model(float(latency), 1 / float(per_byte), cores)


def jittered_ring(ranks: int, jitter: float) -> float:
    """Rounds' worth of time of a ring whose links have a random delay on top of a latency of 1, by a virtual clock."""
    random, clocks = np.random.default_rng(0), np.zeros(ranks)
    for _ in range(ranks - 1):
        sent = clocks + 1 + random.exponential(jitter, ranks)
        clocks = np.maximum(sent, np.roll(sent, 1))
    return float(clocks.max())


def per_member(rows: Rows) -> tuple[float, float]:
    """Seconds of the objective per member, from the largest one measured, and of a member's step."""
    members, _, seconds = max(of_kind(rows, "objective"))
    return seconds / members, of_kind(rows, "member step")[0][2]


def fit_lines(rows: Rows, model: Model) -> list[str]:
    ratios = [seconds / model.ring(ranks, size, True) for ranks, size, seconds in of_kind(rows, "loopback")]
    middle = statistics.quantiles(ratios, n=4)
    lines = [
        "| simulated or real ranks | model | measured / model |",
        "|---|---|---|",
        f"| 2 to 8 processes on the loopback device of {model.cores} cores, 256 B to 1.6 MB | latency "
        f"{1e6 * model.latency:.0f} µs and bandwidth {model.bandwidth / 1e9:.1f} GB/s, fitted | "
        f"half of them {middle[0]:.2f} to {middle[2]:.2f} |",
    ]
    slow = [
        seconds / ((ranks - 1) * size / NAMESPACE_RATE)
        for ranks, size, seconds in of_kind(rows, "namespaces")
        if size > BURST
    ]
    if slow:
        lines.append(
            "| 2 to 8 network namespaces, links of 200 Mbit/s by `tc`, 0.4 and 1.6 MB | bandwidth 25 MB/s, known | "
            f"{min(slow):.2f} to {max(slow):.2f} |"
        )
    threads = [seconds / ((ranks - 1) * 0.005) for ranks, _, seconds in of_kind(rows, "threads")]
    lines.append(
        f"| 2 to 64 threads in a ring, links with a delay of 5 ms | latency 5 ms, known | "
        f"{min(threads):.2f} to {max(threads):.2f} |"
    )
    jitter = jittered_ring(RANKS[-1], ROUND_TRIPS_OF_JITTER) / (RANKS[-1] - 1)
    lines.append(
        "| 1,000 ranks with a virtual clock, delays of one latency and a random part that is exponential with a mean "
        f"of half a latency | latency without the random part | {jitter:.2f} |"
    )
    return lines


def projection_lines(rows: Rows, model: Model) -> list[str]:
    objective, step = per_member(rows)
    lines = [
        "| ranks | received per step | one gather (ring) | gather by a tree | objective | member's step | efficiency |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks in RANKS:
        ring, value = model.ring(ranks), ranks * objective
        cells = [
            f"{ranks:,}",
            f"{(ranks - 1) * BLOCK / 1e6:,.2f} MB",
            *map(_ms, (ring, model.tree(ranks), value, step)),
        ]
        lines.append(f"| {' | '.join(cells)} | {100 * (step + objective) / (step + ring + value):.0f} % |")
    half = next(n for n in range(2, 100_000) if model.ring(n) + n * objective >= step)
    parameters = f"{1e6 * model.latency:.0f} µs and {model.bandwidth / 1e9:.1f} GB/s"
    ethernet = Model(model.latency + ETHERNET_LATENCY, min(model.bandwidth, ETHERNET_BANDWIDTH), model.cores)
    far = f"{RANKS[-1]:,} ranks would gather in {_ms(ethernet.ring(RANKS[-1]))}"
    return [
        *lines,
        "",
        f"Latency and bandwidth are those of the fit, {parameters}. The gather and the objective together take as long",
        f"as the member's own step at about {round(half, -1 if half > 100 else 0):,} ranks. With 50 µs more for each",
        f"message and links of 10 Gbit/s, {far}, and by a tree in {_ms(ethernet.tree(RANKS[-1]))}.",
    ]


def checkpoint_lines(rows: Rows) -> list[str]:
    notes = [row for row in rows if row["kind"] == "checkpoint"]
    lines = ["| ranks | gathered to rank 0, one file | each rank writes a file of its own |", "|---|---|---|"]
    for ranks in dict.fromkeys(row["ranks"] for row in notes):
        seconds = [_ms(float(row["seconds"])) for row in notes if row["ranks"] == ranks]
        lines.append(f"| {ranks} | {' | '.join(seconds)} |")
    return lines


def _ms(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.2g} ms"


def page_with(text: str, rows: Rows) -> str:
    """The page with new tables between their markers."""
    model = fitted(rows)
    about = f"Measured {rows[0]['date']} on {rows[0]['machine']}, by `python tests/benchmarks/rank_exchanges.py`."
    parts = {
        "fit": fit_lines(rows, model),
        "projection": [*projection_lines(rows, model), about],
        "checkpoints": checkpoint_lines(rows),
    }
    for name, lines in parts.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            sys.exit(f"{PAGE.name} needs the lines {begin.strip()} and {end}")
        text = before + begin + "\n".join(lines) + "\n" + end + after
    return text


def draw(rows: Rows, path: Path) -> None:
    """Measured and projected times over the number of ranks."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "ranks", "svg.fonttype": "none", "font.size": 10})
    model, (objective, step) = fitted(rows), per_member(rows)
    numbers = np.unique(np.geomspace(2, 1000, 60).round().astype(int))
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(numbers, [1000 * model.ring(n) for n in numbers], color="#0969da", label="one gather (ring)")
    axes.plot(numbers, [1000 * model.tree(n) for n in numbers], color="#0969da", ls="--", label="gather by a tree")
    axes.plot(numbers, [1000 * n * objective for n in numbers], color="#bf8700", label="objective of all members")
    axes.axhline(1000 * step, color="#424a53", lw=1, label="step of one member (ResNet, width 32)")
    own = [(n, seconds / model.share(n)) for n, size, seconds in of_kind(rows, "loopback") if size == BLOCK]
    axes.plot([n for n, _ in own], [1000 * s for _, s in own], "o", color="#0969da", label="measured, per core")
    largest = [(members, seconds) for members, _, seconds in of_kind(rows, "objective")]
    axes.plot([m for m, _ in largest], [1000 * s for _, s in largest], "s", color="#bf8700", label="measured")
    axes.set(xscale="log", yscale="log", xlabel="ranks, one member each", ylabel="ms per step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None, "Title": "Time per step over the number of ranks"})


def main() -> None:
    """Write the tables and the figure, or check the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args()
    with RESULTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    before = PAGE.read_text(encoding="utf-8")
    after = page_with(before, rows)
    if options.check:
        sys.exit(None if after == before else f"{PAGE.name} is out of date: run python {Path(__file__).name}")
    PAGE.write_text(after, encoding="utf-8")
    draw(rows, FIGURE)


if __name__ == "__main__":
    main()
