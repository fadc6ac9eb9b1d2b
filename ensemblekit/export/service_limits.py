"""The limits of the service, and how a request that it does not take is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from ensemblekit.core.errors import EnsemblekitError

MAX_TEXT = 1000
"""Longest part of an error in characters: it may quote what the client sent."""


@dataclass(frozen=True)
class Limits:
    """How much a client may send, and how requests are joined."""

    max_batch: int = 256
    """Most samples that are predicted at once; more are predicted in several steps."""
    max_wait_seconds: float = 0.005
    """Seconds that a request waits for others that are being read, to be predicted with them."""
    max_body_bytes: int = 10_000_000
    """Most bytes of a request's body."""
    max_rows: int = 1_000
    """Most rows or images of a request."""
    max_pixels: int = 40_000_000
    """Most pixels of all images of a request together."""
    max_queue: int = 128
    """Most requests that are read or wait for their answer at one time."""
    body_seconds: float = 30.0
    """Time in which a body has to arrive."""


@dataclass(eq=False)
class Refused(Exception):
    """A request that gets an error as its answer; two of them are never the same, as for any exception."""

    status: int
    error: str
    fix: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def by(cls, error: EnsemblekitError, status: int = 422) -> Self:
        """Refuse a request because of an error of its data."""
        return cls(status, error.problem, error.fix)

    def to_json(self) -> dict[str, str]:
        """Return the body of the answer."""
        return {"error": _shortened(self.error), "fix": _shortened(self.fix)}


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
