"""The benchmark says which workload is measured and how long the rest takes, on standard error alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from helpers import commands
from rich.console import Console

from ensemblekit.bench import measurement, progress, workloads
from ensemblekit.bench.measurement import Entry, Result
from ensemblekit.bench.progress import Clock, PlainProgress, RichProgress, RoundClock, duration, time_left
from ensemblekit.bench.timing import Timing
from ensemblekit.bench.workloads import Workload, all_workloads


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """A clock that stands still until its only value is changed."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def three(monkeypatch) -> list[Workload]:
    """Three workloads that are expected to take 10, 20 and 30 seconds; measuring them takes no time."""
    names = ("tiny-16", "small-weighted", "data-pipeline")
    chosen = {name: replace(all_workloads()[name], seconds=10.0 * number) for number, name in enumerate(names, 1)}
    monkeypatch.setattr(workloads, "all_workloads", lambda quick=False: chosen)

    def measure(workload, device, with_memory, report):
        report("round 1 of 3", None)
        return Result(workload, (Entry("naive", Timing((1.0,)), 1.0),), None, 1e9, {})

    monkeypatch.setattr(measurement, "measure", measure)
    return list(chosen.values())


def test_the_estimate_is_scaled_by_the_workloads_so_far(clock):
    estimate = Clock([10, 20, 30])
    assert estimate.seconds_left() == 60
    clock[0] += 20  # twice as long as expected
    estimate.next()
    assert estimate.seconds_left() == pytest.approx(2 * 50)
    clock[0] += 30
    assert estimate.seconds_left() == pytest.approx(2 * 50 - 30)
    estimate.next()
    assert estimate.seconds_left() == pytest.approx((20 + 30) / 30 * 30)
    clock[0] += 1000  # far beyond what was expected
    assert estimate.seconds_left() == 0
    estimate.next()
    assert estimate.seconds_left() == 0


def test_the_estimate_is_renewed_by_what_a_workload_says_about_itself(clock):
    estimate = Clock([10, 30])
    clock[0] += 5
    estimate.tell(15)  # 20 seconds instead of 10
    assert estimate.seconds_left() == pytest.approx(15 + 2 * 30)
    clock[0] += 3
    estimate.tell(None)
    assert estimate.seconds_left() == pytest.approx(12 + 2 * 30)


def test_the_rest_of_a_workload_is_that_of_its_rounds_and_what_follows(clock):
    told: list[tuple[str, float | None]] = []
    rounds = RoundClock(3, lambda text, left: told.append((text, left)), after=lambda seconds: 10 * seconds)
    clock[0] += 4  # two seconds to warm up and two for the first round
    rounds.round_finished()
    clock[0] += 5
    rounds.round_finished()
    clock[0] += 3
    rounds.round_finished()
    assert told == [
        ("round 1 of 3", None),
        ("round 2 of 3", 2 * 2 + 20),
        ("round 3 of 3", 3 + 30),
        ("round 3 of 3", 30),
    ]


def test_remaining_times_are_no_more_exact_than_known():
    shown = [time_left(seconds) for seconds in (0, 9.9, 14, 44, 94, 95, 420, 3600)]
    assert shown == [
        *["a few seconds left"] * 2,
        *("about 10 seconds left", "about 40 seconds left", "about 90 seconds left", "about 2 minutes left"),
        *("about 7 minutes left", "about 60 minutes left"),
    ]
    assert [duration(41.6), duration(552)] == ["42 s", "9 min 12 s"]


@pytest.mark.parametrize("option", ["--json", "--quick"])
def test_elsewhere_than_on_a_terminal_each_workload_is_a_line_on_standard_error(three, clock, option):
    result = commands.run("bench", option)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines() == [
        "workload 1 of 3: tiny-16; about 60 seconds left",
        "workload 2 of 3: small-weighted; a few seconds left",
        "workload 3 of 3: data-pipeline; a few seconds left",
        "3 workloads in 0 s",
    ]
    assert "workload 1 of" not in result.stdout
    if option == "--json":
        assert [one["name"] for one in json.loads(result.stdout)["workloads"]] == [one.name for one in three]


def test_a_long_workload_shows_that_it_is_alive(three, clock, capsys):
    shown = PlainProgress(three)
    shown.workload_started()
    for seconds in (10, 19, 2, 5):
        clock[0] += seconds
        shown.step("round 2 of 9", 100 - clock[0] + 70)
    assert capsys.readouterr().err.splitlines() == [
        "workload 1 of 3: tiny-16; about 60 seconds left",
        "workload 1 of 3: tiny-16, round 2 of 9; about 6 minutes left",
    ]


def test_an_interrupted_benchmark_does_not_say_that_it_is_complete(three, capsys):
    shown = PlainProgress(three)
    shown.workload_started()
    shown.workload_finished()
    shown.close()
    assert "workloads in" not in capsys.readouterr().err


def test_on_a_terminal_one_line_is_renewed_and_removed_before_results(three, clock):
    terminal = io.StringIO()
    shown = RichProgress(three, Console(file=terminal, force_terminal=True, width=120, color_system=None))
    shown.workload_started()
    clock[0] += 5
    shown.step("round 2 of 9", 5)
    assert "workload 1 of 3: tiny-16" in terminal.getvalue()
    assert "round 2 of 9, about 60 seconds left" in terminal.getvalue()
    shown.workload_finished()
    assert terminal.getvalue().endswith("\x1b[2K")  # the line is erased
