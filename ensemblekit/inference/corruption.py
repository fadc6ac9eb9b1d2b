"""Evaluates a trained ensemble on corrupted test images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ensemblekit.core.errors import DataError, UsageError, choices
from ensemblekit.core.seeds import generator
from ensemblekit.data.corruptions import CORRUPTIONS, SEVERITIES
from ensemblekit.data.loading import Data, Split
from ensemblekit.data.transforms import ImageTransform
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.evaluation import evaluate_on

CHUNK = 256
"""Images that are corrupted at once: the random numbers of an image depend on its index alone."""
SHOWN = {"classification": ("accuracy", "nll", "ece"), "regression": ("rmse", "mae")}
"""The metrics of each corruption and severity, by task."""


def check_corruptions(corrupt: bool | str | Sequence[str], severities: Sequence[int]) -> tuple[list[str], list[int]]:
    """Return the names of corruptions and the severities, each once.

    Args:
        corrupt: one or several names; True for all.
        severities: from 1 to 5; none: all.

    Raises:
        UsageError: a name or a severity does not exist.
    """
    names = list(CORRUPTIONS) if corrupt is True else [corrupt] if isinstance(corrupt, str) else list(corrupt or ())
    for name in names:
        if name not in CORRUPTIONS:
            raise UsageError(f'"{name}" is not a corruption', "corrupt", choices(name, list(CORRUPTIONS)))
    for severity in severities:
        if severity not in SEVERITIES:
            raise UsageError(f"{severity} is not a severity", "severities", "use 1, 2, 3, 4 or 5")
    return list(dict.fromkeys(names)), sorted(set(severities)) or list(SEVERITIES)


def evaluate_corrupted(
    ensemble: Ensemble,
    data: Data,
    corrupt: bool | str | Sequence[str] = True,
    severities: Sequence[int] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Compute the metrics of an ensemble on corrupted test images.

    Args:
        ensemble: the trained ensemble.
        data: with images like the ensemble's.
        corrupt: as for `check_corruptions`.
        severities: as for `check_corruptions`.
        progress: called with the number of evaluations that are done and the number of all.

    Returns:
        `corrupt_METRIC_NAME_SEVERITY` for each corruption and severity; their means `corrupt_METRIC_NAME` over the
        severities, `corrupt_METRIC_severity_SEVERITY` over the corruptions, and `corrupt_METRIC` over both. The metrics
        are accuracy, nll and ece; in regression rmse and mae.

    Raises:
        UsageError: the inputs are not images, or a name or a severity does not exist.
        DataError: the values of the images are not in [0, 1].
    """
    names, chosen = check_corruptions(corrupt, severities)
    transform = data.test.transform
    if transform is None or ensemble.transform is None:
        form = "×".join(map(str, ensemble.info.input_shape))
        what = f"the inputs of the run are not images, but {form} features"
        raise UsageError(what, "corrupt", "corrupt images only; for other inputs use --ood with data of your own")
    found: dict[tuple[str, int], dict[str, float]] = {}
    for name in names:
        for severity in chosen:
            progress(len(found), len(names) * len(chosen))
            inputs = corrupted_inputs(data.test, transform, name, severity, ensemble.spec.seed)
            metrics = evaluate_on(ensemble, data, inputs=inputs)
            found[name, severity] = {key: metrics[f"test_{key}"] for key in SHOWN[ensemble.info.task]}
    progress(len(found), len(found))
    return _with_means(found)


def corrupted_inputs(split: Split, transform: ImageTransform, name: str, severity: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of network inputs of corrupted images, a function of (seed, name); normalised after corruption."""
    transform = transform.to("cpu")
    for number, stored in enumerate(_stored(split)):
        images = stored.cpu()
        images = images.float() / 255 if images.dtype == torch.uint8 else images
        _check_range(images)
        # the same noise for all severities, so that these differ by their strength alone
        random = generator(seed, "corruption", name, number)
        yield transform.plain(CORRUPTIONS[name](images, severity, random))


def _stored(split: Split) -> Iterator[Tensor]:
    if isinstance(split.inputs, Tensor):
        return iter(split.inputs.split(CHUNK))
    return split.inputs.stream(torch.arange(len(split)).split(CHUNK))


def _check_range(images: Tensor) -> None:
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        what = f"expected images with values from 0 to 1, got {low:.4g} to {high:.4g}"
        fix = "give images as uint8, or scaled to [0, 1] and not normalised; set data.normalise = true instead"
        raise DataError(what, "test images", fix)


def _with_means(found: dict[tuple[str, int], dict[str, float]]) -> dict[str, float]:
    """Flatten the metrics and add their means over severities, over corruptions and over both."""
    groups: dict[str, list[dict[str, float]]] = {"": list(found.values())}
    for (name, severity), metrics in found.items():
        groups.setdefault(f"_severity_{severity}", []).append(metrics)
        groups.setdefault(f"_{name}", []).append(metrics)
    groups |= {f"_{name}_{severity}": [metrics] for (name, severity), metrics in found.items()}
    return {
        f"corrupt_{key}{group}": sum(metrics[key] for metrics in members) / len(members)
        for group, members in groups.items()
        for key in members[0]
    }
