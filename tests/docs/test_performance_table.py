"""The performance tables are the committed results, and were not typed by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.places import ROOT

SCRIPT = ROOT / "tests" / "benchmarks" / "performance_table.py"
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"
RESULTS = """\
date,machine,command,run,work,against,asked,ratio,low,high,note
2024-05-01,"CPU, 2 cores",python targets.py --only a --run 1,1,"MLP on digits, M=16",naive loop,≥ 1.5×,1.62,1.5,1.7,
2024-05-01,"CPU, 2 cores",python targets.py --only b --run 1,1,recompute,without,≤ 1.4×,1.41,1.3,1.5,
2024-05-03,"CPU, 2 cores",python targets.py --only a --run 2,2,"MLP on digits, M=16",naive loop,≥ 1.5×,1.58,1.5,1.7,
2024-05-03,"CPU, 2 cores",python targets.py --only b --run 2,2,recompute,without,≤ 1.4×,1.3,1.3,1.5,
2024-05-03,"CPU, 2 cores",python targets.py --only c --run 2,2,time to choose,limit,≤ 3 s,4.2,4,5,
"""


def table(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


@pytest.fixture
def files(tmp_path) -> list[str | Path]:
    """Results, and a page and a README that wait for them."""
    (tmp_path / "results.csv").write_text(RESULTS)
    for name in ("page.md", "README.md"):
        (tmp_path / name).write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    results, page, readme = (tmp_path / name for name in ("results.csv", "page.md", "README.md"))
    return ["--results", results, "--page", page, "--readme", readme]


def test_page_and_readme_have_the_tables_of_the_committed_results():
    found = table("--check")
    assert found.returncode == 0, found.stderr


def test_tables_have_the_range_over_the_runs_and_the_page_says_what_was_not_reached(files):
    assert table("--check", *files).returncode == 1
    assert table(*files).returncode == 0
    assert table("--check", *files).returncode == 0
    assert files[3].read_text().splitlines() == [
        "above",
        BEGIN,
        "| work | compared with | target | measured | row |",
        "|---|---|---|---|---|",
        "| MLP on digits, M=16 | naive loop | ≥ 1.5× | **1.58 to 1.62× in 2 runs** | `a` |",
        "| recompute | without | ≤ 1.4× | 1.3 to 1.41× in 2 runs, not always | `b` |",
        "| time to choose | limit | ≤ 3 s | 4.2 s in one run, not reached | `c` |",
        "",
        "Measured 2024-05-01 to 2024-05-03 on CPU, 2 cores, by `python targets.py --only ROW --run RUN`.",
        END,
        "below",
    ]
    assert files[5].read_text().splitlines()[2:5] == [
        "| work | compared with | speed-up |",
        "|---|---|---|",
        "| training 16 MLPs on digits | naive loop | 1.58 to 1.62× |",
    ]


def test_missing_markers_and_missing_results_are_named(files, tmp_path):
    files[-1].write_text("no table here")
    assert f"README.md needs the lines {BEGIN} and {END}" in table("--check", *files).stderr
    assert "no none.csv; measure with" in table("--check", "--results", tmp_path / "none.csv").stderr
