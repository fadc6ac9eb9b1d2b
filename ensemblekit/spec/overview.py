"""A spec in a few lines: what it will run."""

from __future__ import annotations

from ensemblekit.spec.sections import ENTRIES, Spec


def spec_overview(spec: Spec) -> list[tuple[str, str]]:
    """Describe what a spec will run, as pairs of a label and a text; settings left at their defaults are omitted."""
    rows = [row for name, entry in ENTRIES.items() for row in entry.rows(getattr(spec, name))]
    # members of groups have models of their own, so that [model] only has the common settings
    rows = [row for row in rows if not (spec.has_groups and row[0] == "model")]
    if spec.data.folds is not None:
        place = 1 + next(index for index, (label, _) in enumerate(rows) if label == "data")
        rows.insert(place, ("  folds", _folds_text(spec.data.folds, spec.ensemble.members)))
    return rows + [("note", note) for note in spec_notes(spec)]


def _folds_text(folds: int, members: int) -> str:
    fewest, most = members // folds, -(-members // folds)
    count = f"{fewest}" if fewest == most else f"{fewest} or {most}"
    text = f"member i is trained without fold i mod {folds}; {count} of {members} members"
    return f"{text} predict{'s' * (most == 1)} each training sample out of fold"


def spec_notes(spec: Spec) -> list[str]:
    """Return what the plugins of a spec say about it that is no error."""
    return [note for _, plugin in spec.plugins(inner=False) for note in plugin.notes(spec)]
