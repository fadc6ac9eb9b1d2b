"""Checksums inside JSON objects: an object carries the sha256 of its own content, so that no change goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

KEY = "sha256"


def checksum(value: Mapping[str, Any], previous: str = "") -> str:
    """Return the sha256 of an object's content without its own checksum; with `previous`, of both: a chain."""
    content = {key: item for key, item in value.items() if key != KEY}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(previous.encode() + text.encode()).hexdigest()


def sealed(value: Mapping[str, Any], previous: str = "") -> dict[str, Any]:
    """Return the object, as JSON represents it, with its checksum as the last key."""
    content = {key: finite(item) for key, item in value.items() if key != KEY}
    return {**content, KEY: checksum(content, previous)}


def is_intact(value: Mapping[str, Any], previous: str = "") -> bool:
    """Whether an object carries the checksum of its content."""
    return value.get(KEY) == checksum(value, previous)


def unsealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object without its checksum."""
    return {key: item for key, item in value.items() if key != KEY}


def encoded(value: Mapping[str, Any], indent: int | None = 2) -> bytes:
    """Encode as standard JSON; nan and infinity become null."""
    return json.dumps(finite(value), allow_nan=False, indent=indent).encode() + b"\n"


def finite(value: Any) -> Any:
    """Return a value with None in place of nan and infinity, for which JSON has no words."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
