"""The README's quick start, run as a reader would."""

from __future__ import annotations

import re

from helpers.documents import words
from helpers.readme_output import quick_start_output, readme_block


def shape(text: str) -> list[str]:
    """The words of an output without its numbers, and without which engine this machine was fastest with."""
    return [line for line in words(text, numbers=False) if not line.startswith("engine ")]


def percentage(text: str, label: str) -> float:
    return float(re.search(rf"^{label}\s+([\d.]+) %", text, flags=re.MULTILINE).group(1))


def test_the_readme_shows_what_the_quick_start_prints_and_the_ensemble_is_ahead():
    output = quick_start_output()
    shown = readme_block()
    masked, expected = shape(output), shape(shown)
    alike = [re.sub(r"(ahead of|behind)", "ahead of", line).replace("- remainder", "+ remainder") for line in masked]
    assert alike == [line.replace("- remainder", "+ remainder") for line in expected]
    best = max(percentage(output, f"member {index}") for index in range(8))
    assert percentage(output, "ensemble") >= 98
    assert percentage(output, "ensemble") > best
    assert abs(percentage(output, "ensemble") - percentage(shown, "ensemble")) < 1
