"""The page: one HTML file without anything external, rendered by Jinja2 with every text escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from ensemblekit.analysis.report.charts import Chart
from ensemblekit.analysis.report.drawing import inline_svg
from ensemblekit.analysis.report.samples import SampleGroup
from ensemblekit.core.streams import printable

Rows = Sequence[tuple[str, str]]
_TEMPLATES = ("page.html", "chart.html", "samples.html", "style.css", "page.js")


@dataclass(frozen=True)
class Section:
    """A part of the page under one heading."""

    name: str
    title: str
    charts: Sequence[Chart]
    note: str = ""
    groups: Sequence[SampleGroup] = ()


@dataclass(frozen=True)
class Link:
    """A run of a sweep: where it is, relative to the page, and how it ended."""

    name: str
    address: str
    """Empty if there is nothing to open."""
    status: str
    result: str = ""


@dataclass(frozen=True)
class Page:
    """Everything that a report says."""

    title: str
    kind: str
    """"run" or "sweep"."""
    sentence: str
    figures: Rows = ()
    sections: Sequence[Section] = ()
    overview: Rows = ()
    metrics: Rows = ()
    notices: Sequence[str] = ()
    advice: Sequence[Any] = ()
    times: Rows = ()
    environment: Rows = ()
    command: str = ""
    spec: str = ""
    num_members: int = 0
    tables: Sequence[Mapping[str, Any]] = ()
    """Tables of a sweep: title, columns and rows."""
    links: Sequence[Link] = field(default_factory=tuple)

    @property
    def charts(self) -> list[Chart]:
        """All charts of all sections."""
        return [chart for section in self.sections for chart in section.charts]


def render(page: Page) -> str:
    """Render a page as HTML."""
    environment = _environment()
    script = _template("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        page=page,
        style=Markup(_template("style.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        svg=_svg,
    )


def _svg(chart: Chart) -> Markup:
    # matplotlib has escaped the texts in the figure, and inline_svg the title and the description
    return Markup(inline_svg(chart.figure, chart.name, printable(chart.title), printable(chart.description)))


@cache
def _template(name: str) -> str:
    return files("ensemblekit.analysis.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    return Environment(
        loader=DictLoader({name: _template(name) for name in _TEMPLATES}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )


def _visible(value: Any) -> Any:
    """Make control characters visible, and lone surrogates encodable; text that is HTML already stays as it is."""
    return printable(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value
