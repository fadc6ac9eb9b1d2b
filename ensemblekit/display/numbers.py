"""Numbers as people read them."""

from __future__ import annotations

from datetime import timedelta


def number(value: float | None) -> str:
    """Format with three decimals; small numbers with four digits, large ones without decimals."""
    if value is None:
        return ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if value == 0 or abs(value) >= 0.01 else f"{value:.4g}"


def quality_text(value: float | None, quality: str) -> str:
    """Format an accuracy as a percentage, any other measure as a number."""
    if quality != "accuracy":
        return number(value)
    return "" if value is None else f"{100 * value:.2f} %"


def duration(seconds: float | None) -> str:
    """Format seconds: `8.3 s`, or `0:02:15` from a minute on."""
    if seconds is None:
        return ""
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
