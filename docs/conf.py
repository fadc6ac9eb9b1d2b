"""Settings of the documentation site: ``sphinx-build -W -b html docs build/site``."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for the extension mathml

project = "ensemblekit"
author = "the ensemblekit authors"
project_copyright = "2026, the ensemblekit authors"
release = version = installed_version("ensemblekit")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "mathml"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are shown with the outputs that they have stored
exclude_patterns = ["_build"]
html_math_renderer = "mathml"

html_theme = "furo"
html_title = f"ensemblekit {release}"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_show_sourcelink = False
html_copy_source = False

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True


attribute_lines: dict[str, list[str]] = {}


def as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn the Markdown of docstrings, `code` and a plain *, into what autodoc reads."""
    for index, line in enumerate(lines):
        line = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
        parts = re.split(r"(``.*?``)", line)  # every second part is code and stays as it is
        parts[::2] = [re.sub(r"([*|])", r"\\\1", part) for part in parts[::2]]
        lines[index] = "".join(parts)
    if what in ("attribute", "property"):
        attribute_lines[name] = list(lines)


def without_types(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon does to attributes: it takes the words before a colon for a type."""
    if name in attribute_lines:
        lines[:] = attribute_lines[name]


def setup(app: Any) -> None:
    """Register the functions above, one before and one after napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)
    app.connect("autodoc-process-docstring", without_types, priority=600)
