"""Dates and times in tables: recognised, so that nobody learns one input per day by mistake."""

from __future__ import annotations

import re
from collections.abc import Sequence

NEARLY_ALL = 0.9
"""Share of values that have to be dates, for a column of text to be one of dates."""
ADVICE = "derive numbers from dates, such as year, month, weekday or days since a start"
_TIME = r"([T ]\d{1,2}:\d{2}(:\d{2})?.{0,13})?"
_DATE = re.compile(
    rf"\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}{_TIME}|\d{{1,2}}[-/.]\d{{1,2}}[-/.](\d{{4}}|\d{{2}}){_TIME}|\d{{1,2}}:\d{{2}}(:\d{{2}})?"
)


def are_dates(values: Sequence[str]) -> bool:
    """Return whether nearly all of the texts are dates or times."""
    return bool(values) and sum(bool(_DATE.fullmatch(value)) for value in values) > NEARLY_ALL * len(values)
