"""Random damage to a file: flipped bits, cuts, other bytes, and edits of its JSON."""

from __future__ import annotations

import json
import random
from typing import Any


def mutated(whole: bytes, generator: random.Random) -> bytes | None:
    """Return the content after one random change, which differs from it; None: the file is deleted."""
    kind = generator.choice(["flip"] * 5 + ["cut", "delete", "insert", "overwrite", "lines"] + ["json"] * 4)
    if kind == "delete" or not whole:
        return None
    place = generator.randrange(len(whole))
    some = generator.randbytes(generator.randrange(1, 20))
    if kind == "flip":
        changed = bytearray(whole)
        changed[place] ^= 1 << generator.randrange(8)
    elif kind == "cut":
        changed = bytearray(whole[:place])
    elif kind == "insert":
        odd = [b"9" * 5000, b"[" * 5000, b'"\\ud800"', b"null", b"NaN", b"1e999", b"\n", b"\0", b"{}", some]
        changed = bytearray(whole[:place] + generator.choice(odd) + whole[place:])
    elif kind == "overwrite":
        changed = bytearray(generator.choice([b"", b"null", b"[]", b"{}", b"\xff\xfe", some, whole + some]))
    elif kind == "lines":
        lines = whole.splitlines(keepends=True)
        generator.choice([generator.shuffle, list.pop, lambda lines: lines.append(generator.choice(lines))])(lines)
        changed = bytearray(b"".join(lines))
    else:
        changed = bytearray(_edited_json(whole, generator))
    return bytes(changed) if changed != whole else whole + b"\0"


def _edited_json(whole: bytes, generator: random.Random) -> bytes:
    """Change, remove or add a value somewhere in the object, or in one of the lines, if it is JSON."""
    lines = whole.splitlines(keepends=True) if whole.count(b"\n{") else [whole]
    number = generator.randrange(len(lines))
    try:
        value = json.loads(lines[number])
    except ValueError:
        return whole[::-1]
    _edit(value, generator)
    indent = None if len(lines) > 1 else 2
    lines[number] = json.dumps(value, indent=indent).encode() + b"\n"
    return b"".join(lines)


def _edit(value: Any, generator: random.Random) -> None:
    """Change one value, however deep."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = generator.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and generator.random() < 0.7:
            value = value[key]
            continue
        other: Any = [None, True, -1, 0, 1.5, 10**30, "", "other", "1", [], {}, [[]], {"a": 1}, float("nan")]
        if generator.random() < 0.2:
            del value[key]
        else:
            value[key] = generator.choice(other)
        return
