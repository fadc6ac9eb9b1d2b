"""The front matter of a model card: what model hubs read, in the words that they know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ensemblekit.core.dataset import Dataset
from ensemblekit.core.plugin import Task
from ensemblekit.runs.run import Run

LIBRARY = "ensemblekit"
NOT_PUBLISHED = "not published"
HUB_METRICS = ("accuracy", "nll", "brier", "ece", "mse", "rmse", "r2", "coverage")
"""Metrics of the front matter, if a run has them; the card has all."""
HUB_LICENCES = """
    afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bsd-2-clause bsd-3-clause bsl-1.0 cc cc-by-2.0 cc-by-3.0 cc-by-4.0
    cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-4.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0
    cc0-1.0 ecl-2.0 epl-1.0 epl-2.0 eupl-1.1 eupl-1.2 gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 mit mpl-2.0
    ms-pl odbl odc-by openrail osl-3.0 pddl postgresql unlicense wtfpl zlib
"""
"""Identifiers that model hubs know, in lower case; another licence is "other", with its name."""
_TAGS: Mapping[tuple[Task, bool], str] = {
    ("classification", True): "image-classification",
    ("multilabel", True): "image-classification",
    ("classification", False): "tabular-classification",
    ("multilabel", False): "tabular-classification",
    ("regression", False): "tabular-regression",
}


def front_matter(
    name: str, run: Run, model: Mapping[str, Any], metrics: Mapping[str, float], licence: str | None
) -> dict[str, Any]:
    """Return the front matter of the card of a run.

    Args:
        name: that of the model.
        run: the run.
        model: its model metadata.
        metrics: the test metrics by names without the prefix of a split.
        licence: the licence of the model, if there is one.
    """
    spec, tag = run.spec, pipeline_tag(model)
    chosen = {metric: metrics[metric] for metric in HUB_METRICS if metric in metrics}
    published = is_published(spec.data)
    dataset = (
        {"type": spec.data.name, "name": spec.data.name} if published else {"type": "other", "name": NOT_PUBLISHED}
    )
    result = {
        "task": {"type": tag or "other", "name": model["task"]},
        "dataset": {**dataset, "split": "test"},
        "metrics": [{"type": metric, "value": value, "name": f"test {metric}"} for metric, value in chosen.items()],
    }
    names = [*(method.name for method in spec.methods), *(member.name for member in spec.member_models)]
    return {
        "library_name": LIBRARY,
        **({} if tag is None else {"pipeline_tag": tag}),
        **licence_fields(licence),
        "tags": list(dict.fromkeys([LIBRARY, "ensemble", "uncertainty", "pytorch", *names])),
        **({"datasets": [spec.data.name]} if published else {}),
        "metrics": list(chosen),
        "model-index": [{"name": name, "results": [result] if chosen else []}],
    }


def pipeline_tag(model: Mapping[str, Any]) -> str | None:
    """Return what model hubs call the task; None if they have no word for it."""
    is_image = model["transform"] is not None
    if not is_image and len(model["input_shape"]) != 1:
        return None
    return _TAGS.get((model["task"], is_image))


def licence_fields(licence: str | None) -> dict[str, str]:
    """Return the fields that state a licence."""
    if licence is None:
        return {}
    identifier = re.sub(r"\s+", "-", licence.strip().lower())
    if identifier in HUB_LICENCES.split():
        return {"license": identifier}
    return {"license": "other", "license_name": identifier}


def is_published(dataset: Dataset) -> bool:
    """Whether a data set is one that others know by its name, not a reader of a user's own files."""
    return bool(dataset.licence)
