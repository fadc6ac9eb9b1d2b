"""A spec in a few lines: what it will run."""

from __future__ import annotations

from ensemblekit.spec.sections import ENTRIES, Spec


def spec_overview(spec: Spec) -> list[tuple[str, str]]:
    """Describe what a spec will run, as pairs of a label and a text; settings left at their defaults are omitted."""
    rows = [row for name, entry in ENTRIES.items() for row in entry.rows(getattr(spec, name))]
    # members of groups have models of their own, so that [model] only has the common settings
    return [row for row in rows if not (spec.groups and row[0] == "model")]
