"""Text in Markdown and in YAML, escaped so that names of classes, columns and files are shown as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ensemblekit.core.streams import printable

_SPECIAL = re.compile(
    r"[\\`*\[\]|#~$@]"
    r"|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"  # not inside a word
    r"|:(?=//|\w+:)|(?<=www)\."  # addresses, which become links, and :names: of pictures
)
"""What Markdown gives a meaning inside a line or a cell of a table."""
_NOT_YAML = re.compile("[\ufeff\ufffe\uffff]")
"""Characters beside control characters that YAML does not take."""


def inline(value: Any) -> Any:
    """Return any text as Markdown that shows it; text that is Markdown already stays as it is."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    plain = _SPECIAL.sub(lambda found: f"\\{found[0]}", printable(value))
    return Markup(plain.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def code_block(text: str, language: str = "") -> Markup:
    """Return a block of code whose fence is longer than any in the text."""
    longest = max((len(found) for found in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Markup(f"{fence}{language}\n{printable(text, keep=chr(10) + chr(9)).rstrip()}\n{fence}")


def yaml(value: Any, indent: int = 0) -> str:
    """Return mappings with plain keys, lists, numbers and texts as YAML; every text is in double quotes, as in JSON."""
    pad = "  " * indent
    if isinstance(value, Mapping):
        return "".join(f"{pad}{key}:{_nested(item, indent)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        # the dash takes the place of the first two spaces of an indented mapping
        return "".join(f"{pad}-{_item(item, indent)}" for item in value)
    return f"{pad}{_scalar(value)}\n"


def _nested(value: Any, indent: int) -> str:
    return f"\n{yaml(value, indent + 1)}" if _is_nested(value) else f" {_scalar(value)}\n"


def _item(value: Any, indent: int) -> str:
    return f" {yaml(value, indent + 1).lstrip()}" if _is_nested(value) else f" {_scalar(value)}\n"


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str)


def _scalar(value: str | float | bool | None) -> str:
    if isinstance(value, str):
        return _NOT_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(printable(value), ensure_ascii=False))
    text = json.dumps(value, allow_nan=False)
    # YAML 1.1 takes 1e-05 for a text: its numbers have a point
    return text.replace("e", ".0e") if "e" in text and isinstance(value, float) and "." not in text else text
