"""The command cache: shows and clears decoded copies, unpacked archives and downloads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ensemblekit.cli.options import json_option

if TYPE_CHECKING:
    from ensemblekit.data.cache import CacheEntry, Kind

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def cache(ctx: click.Context, as_json: bool) -> None:
    """Show what is in the cache directory, or clear it.

    \b
    It is $ENSEMBLEKIT_DATA, else ~/.cache/ensemblekit, and has
      decoded     copies of your images that are ready to be read
      unpacked    archives of images whose files are streamed
      unfinished  what a process that was killed has left behind
      download    files of data sets

    Without a command it shows them. Images that were skipped are listed by --json.
    """
    if ctx.invoked_subcommand is not None:
        return
    from ensemblekit.data.cache import cache_directory
    from ensemblekit.display.console import Printer

    directory, entries, printer = cache_directory(), _entries(), Printer()
    if as_json:
        printer.json({"directory": str(directory), "entries": [_facts(entry) for entry in entries]})
        return
    printer.table(("kind", "source", "size", "last use", "path"), [_row(entry, directory) for entry in entries])
    printer.verbatim(f"{size(sum(entry.num_bytes for entry in entries))} in {directory}")


@cache.command()
@click.option("--decoded", is_flag=True, help="Clear decoded copies of images.")
@click.option("--unpacked", is_flag=True, help="Clear unpacked archives. A run that streams from one would fail.")
@click.option("--downloads", is_flag=True, help="Clear downloads; they are downloaded again when they are needed.")
@click.option("--all", "everything", is_flag=True, help="Clear all of these.")
@json_option
def clear(decoded: bool, unpacked: bool, downloads: bool, everything: bool, as_json: bool) -> None:
    """Clear the cache: by default all but the downloads.

    Nothing is asked: decoded copies and unpacked archives are made again from your own files. Only files that
    ensemblekit has written or downloaded are removed, and links are never followed.
    """
    from ensemblekit.data.cache import cache_directory, clear_entries
    from ensemblekit.display.console import Printer

    flags: dict[Kind, bool] = {"decoded": decoded, "unpacked": unpacked, "download": downloads}
    kinds: list[Kind] = [kind for kind, chosen in flags.items() if chosen or everything]
    cleared = list(clear_entries(_entries(), ["unfinished", *(kinds or ("decoded", "unpacked"))]))
    num_bytes, printer = sum(entry.num_bytes for entry in cleared), Printer()
    if as_json:
        printer.json({"freed_bytes": num_bytes, "cleared": [_facts(entry) for entry in cleared]})
        return
    for entry in cleared:
        printer.verbatim(f"removed {entry.path} ({size(entry.num_bytes)})")
    printer.verbatim(f"freed {size(num_bytes)} in {cache_directory()}")


def _entries() -> Sequence[CacheEntry]:
    from ensemblekit.core.registry import discover
    from ensemblekit.data.cache import cache_directory, cache_entries

    downloads: dict[Path, str] = {}
    for info in discover().plugins("dataset").values():
        try:
            dataset: Any = info.load()()
            downloads |= dict.fromkeys(dataset.places(), info.name)
        except Exception:  # a broken plugin may raise anything; one with required parameters downloads nothing
            continue
    return cache_entries(cache_directory(), downloads)


def _facts(entry: CacheEntry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "path": str(entry.path),
        "bytes": entry.num_bytes,
        "last_used": datetime.fromtimestamp(entry.last_used, UTC).isoformat(timespec="seconds"),
        "source": entry.source,
        "skipped": dict(entry.skipped),
    }


def _row(entry: CacheEntry, directory: Path) -> tuple[str, ...]:
    used = datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
    path = str(entry.path.relative_to(directory))
    return entry.kind, entry.source or "unknown", size(entry.num_bytes), used, path


def size(num_bytes: int) -> str:
    """Write a number of bytes with a unit: 1.5 GiB."""
    value, unit = float(num_bytes), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{num_bytes} bytes"


COMMANDS = {"Data": (cache,)}
