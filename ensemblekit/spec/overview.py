"""A spec in a few lines: what it will run."""

from __future__ import annotations

from ensemblekit.spec.sections import ENTRIES, Spec


def spec_overview(spec: Spec) -> list[tuple[str, str]]:
    """Describe what a spec will run, as pairs of a label and a text; settings left at their defaults are omitted."""
    rows = [row for name, entry in ENTRIES.items() for row in entry.rows(getattr(spec, name))]
    # members of groups have models of their own, so that [model] only has the common settings
    rows = [row for row in rows if not (spec.has_groups and row[0] == "model")]
    return rows + [("note", note) for note in spec_notes(spec)]


def spec_notes(spec: Spec) -> list[str]:
    """Return what the plugins of a spec say about it that is no error."""
    return [note for _, plugin in spec.plugins(inner=False) for note in plugin.notes(spec)]
