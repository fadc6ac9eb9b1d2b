"""Reads the files that wandb writes offline: a log of records in LevelDB's format, each a message of wandb's own."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER = 2**15, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    assert content[:4] == b":W&B"
    offset, parts = HEADER, b""
    while offset + HEADER <= len(content):
        if BLOCK - offset % BLOCK < HEADER:  # the rest of a block that is too short for a header
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[offset : offset + HEADER])
        part = content[offset + HEADER : offset + HEADER + length]
        offset += HEADER + length
        parts = part if kind in (FULL, FIRST) else parts + part
        if kind in (FULL, LAST):
            yield Record.FromString(parts)


def history(file: Path) -> list[dict[str, Any]]:
    """What was logged, a dictionary for each step."""
    rows = [record.history.item for record in records(file) if record.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items} for items in rows]


def config(file: Path) -> dict[str, Any]:
    """The configuration of the run, as it was set last."""
    values: dict[str, Any] = {}
    for record in records(file):
        updates = [*record.config.update, *(record.run.config.update if record.HasField("run") else ())]
        values |= {item.key: json.loads(item.value_json) for item in updates}
    return values


def summary(file: Path) -> dict[str, Any]:
    """The summary of the run, as it was set last."""
    values: dict[str, Any] = {}
    for record in records(file):
        for item in record.summary.update:
            values[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return values


def exit_code(file: Path) -> int:
    """The exit code of the run."""
    [code] = [record.exit.exit_code for record in records(file) if record.HasField("exit")]
    return code


def artifact_files(file: Path) -> dict[str, Path]:
    """The files of all artifacts by their names, where wandb has copied them."""
    artifacts = [
        record.request.log_artifact.artifact if record.request.HasField("log_artifact") else record.artifact
        for record in records(file)
        if record.HasField("artifact") or record.request.HasField("log_artifact")
    ]
    return {entry.path: Path(entry.local_path) for artifact in artifacts for entry in artifact.manifest.contents}
