"""The README's quick start, run as a reader would."""

from __future__ import annotations

import re

from helpers.documents import shows, words
from helpers.readme_output import quick_start_output, readme_block


def percentage(text: str, label: str) -> float:
    return float(re.search(rf"^{label}\s+([\d.]+) %", text, flags=re.MULTILINE).group(1))


def shape(text: str) -> list[str]:
    """The words of an output without numbers, and without the signs that depend on them."""
    plain = re.sub(r"ahead of|behind", "ahead of", text).replace("- remainder", "+ remainder")
    return [line for line in words(plain, numbers=False) if line]


def test_the_readme_shows_what_the_quick_start_prints_and_the_ensemble_is_ahead():
    output, shown = quick_start_output(), readme_block()
    assert shows(shape(shown), shape(output)), output
    best = max(percentage(output, f"member {index}") for index in range(8))
    assert percentage(output, "ensemble") >= 98
    assert percentage(output, "ensemble") > best
    assert abs(percentage(output, "ensemble") - percentage(shown, "ensemble")) < 1


def test_the_readme_shows_about_ten_lines_of_it():
    assert len(readme_block().splitlines()) <= 14
