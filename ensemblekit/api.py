"""The Python interface, on one screen: read this file first.

A spec names plugins; the registry finds them; `load_spec` turns the file into validated instances; the methods
among them define an objective on the members' outputs. Nothing here knows any plugin by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ensemblekit.core import decomposition, metrics
from ensemblekit.core.decomposition import Decomposition
from ensemblekit.core.errors import NumericError
from ensemblekit.core.losses import Loss
from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import Dataset, Method, Model
from ensemblekit.core.registry import PluginInfo, Registry, discover
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.data.loading import load_data
from ensemblekit.display.progress import Progress, choose_progress
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.members.build import build_member
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec import reader as spec_reader
from ensemblekit.spec.reader import build_plugin
from ensemblekit.spec.sections import DEFAULT_LOSS, Spec
from ensemblekit.training import runs
from ensemblekit.training.runs import Run, free_directory, load_ensemble, resume_run, run_spec, train_run

MethodLike = Method | str | Mapping[str, Any]
LossLike = Loss | str | Mapping[str, Any]
ModelLike = Model | str | Mapping[str, Any]


def load_spec(
    source: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    plugins: Iterable[str | Path] = (),
) -> Spec:
    """Read and validate a spec from a TOML file or a dict.

    `overrides` maps dotted paths to values (``{"training.epochs": 3}``); `plugins` are local Python files
    whose plugin classes the spec may name. Raises a `SpecError` that lists everything that is wrong.
    """
    return spec_reader.load_spec(source, overrides, _registry(plugins))


def train(
    spec: Spec | str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    progress: bool | Progress = True,
    data: tuple[Any, Any] | None = None,
    plugins: Iterable[str | Path] = (),
) -> Run:
    """Train an ensemble and leave everything about it in the directory `out` (default: the next free runs/run-N).

    `spec` is what `load_spec` returned, or what it takes. `data` are your own training and test data: map-style
    torch data sets, or pairs of tensors, in place of the spec's; name the data set "given" if the spec has none.
    `progress` is False for silence.
    """
    registry = _registry(plugins)
    if not isinstance(spec, Spec):
        spec = spec_reader.load_spec(spec, None, registry)
    given = None
    if data is not None:
        dataset = spec.data if isinstance(spec.data, InMemoryData) else InMemoryData()
        spec = replace(spec, data=dataset)
        given = load_data(dataset.of(*data), spec.seed)
    with closing(_progress(progress)) as shown:
        return train_run(spec, Path(out) if out else free_directory("run"), given, shown, registry)


def resume(
    path: str | Path,
    progress: bool | Progress = True,
    data: tuple[Any, Any] | None = None,
    plugins: Iterable[str | Path] = (),
) -> Run:
    """Take a run up from its last checkpoint; the result is bit for bit that of a run that was never stopped."""
    given = None
    registry = _registry(plugins)
    if data is not None:
        spec = run_spec(RunDirectory.open(Path(path)), registry)
        dataset = spec.data if isinstance(spec.data, InMemoryData) else InMemoryData()
        given = load_data(dataset.of(*data), spec.seed)
    with closing(_progress(progress)) as shown:
        return resume_run(Path(path), given, shown, registry)


def load(path: str | Path, plugins: Iterable[str | Path] = ()) -> Ensemble:
    """The trained ensemble of a run, an nn.Module in evaluation mode; weights only, nothing is unpickled."""
    return load_ensemble(Path(path), _registry(plugins))


def evaluate_run(
    path: str | Path, data: str | Mapping[str, Any] | None = None, plugins: Iterable[str | Path] = ()
) -> dict[str, float]:
    """The metrics of a run's ensemble on its test data, or on that of another data set of the same form."""
    registry = _registry(plugins)
    other = None
    if data is not None:
        other = load_data(build_plugin(Dataset, data, registry), run_spec(RunDirectory.open(Path(path)), registry).seed)
    return runs.evaluate_run(Path(path), other, registry)


def objective(
    method: MethodLike | Sequence[MethodLike],
    outputs: Tensor,
    target: Tensor,
    loss: LossLike = DEFAULT_LOSS,
    sample_weights: Tensor | None = None,
) -> Tensor:
    """What a method, or several together, minimises: a scalar that can be differentiated.

    `outputs` are the members' raw outputs (M, B, C), `target` class indices (B,) or real values.
    `sample_weights` (B, M) are the rows of the run's weights that belong to this batch; without them every
    sample counts the same, also for methods that draw weights when training (see `draw_sample_weights`).
    """
    run_objective = _objective(method, loss)
    if not outputs.is_meta:
        run_objective.loss.check_values(outputs, target)
    value = run_objective(outputs, target, sample_weights)
    if not outputs.is_meta and not bool(value.isfinite()):
        run_objective.check_finite(outputs, target)
        raise NumericError("the objective is not finite", fix="scale the outputs down, or use float64")
    return value


def draw_sample_weights(
    method: MethodLike | Sequence[MethodLike], num_samples: int, num_members: int, seed: int = 0
) -> Tensor | None:
    """The weights (N, M) that a run of these methods with this seed would use; None if they draw none."""
    return _objective(method, DEFAULT_LOSS).sample_weights(num_samples, num_members, seed)


def decompose(outputs: Tensor, target: Tensor, loss: LossLike = DEFAULT_LOSS) -> Decomposition:
    """The bias-variance decomposition of the ensemble's loss on member outputs (M, B, C), for any loss."""
    chosen = _loss(loss)
    chosen.check_values(outputs, target)
    return decomposition.decompose(outputs, target, chosen)


def evaluate(outputs: Tensor, target: Tensor, loss: LossLike | None = None) -> dict[str, float]:
    """Metrics of member outputs (M, N, C): accuracy, calibration, diversity … or, for real targets, MSE, R² …

    Without a loss it is cross-entropy for class indices and the squared error for real targets.
    """
    chosen = _loss(loss or ("mse" if target.is_floating_point() else DEFAULT_LOSS))
    chosen.check_values(outputs, target)
    return metrics.evaluate(outputs, target, chosen)


def build_model(spec: ModelLike, input_shape: Sequence[int], num_outputs: int, seed: int = 0) -> nn.Module:
    """One member, (B, *input_shape) → (B, num_outputs), on the CPU: the first of an ensemble with this seed.

    `spec` is the model's table, its name or an instance; torch's own random number generators are left as they were.
    """
    model = spec if isinstance(spec, Model) else build_plugin(Model, spec, _installed(tuple(sys.path)))
    return build_member(model, tuple(input_shape), num_outputs, seed, member=0)


def methods() -> Mapping[str, PluginInfo]:
    """The installed methods by name; nothing is imported until you ask one to `load`."""
    return _installed(tuple(sys.path)).plugins("method")


def models() -> Mapping[str, PluginInfo]:
    """The installed base models by name."""
    return _installed(tuple(sys.path)).plugins("model")


def datasets() -> Mapping[str, PluginInfo]:
    """The installed data sets by name."""
    return _installed(tuple(sys.path)).plugins("dataset")


def _progress(progress: bool | Progress) -> Progress:
    if isinstance(progress, Progress):
        return progress
    return choose_progress(quiet=not progress)


def _registry(files: Iterable[str | Path]) -> Registry:
    files = tuple(files)
    return discover(files) if files else _installed(tuple(sys.path))


@cache
def _installed(search_path: tuple[str, ...]) -> Registry:
    return discover()


def _objective(method: MethodLike | Sequence[MethodLike], loss: LossLike) -> Objective:
    listed = method if isinstance(method, Sequence) and not isinstance(method, str) else [method]
    methods = [
        entry if isinstance(entry, Method) else build_plugin(Method, entry, _installed(tuple(sys.path)))
        for entry in listed
    ]
    return Objective(methods, _loss(loss))


def _loss(loss: LossLike) -> Loss:
    return loss if isinstance(loss, Loss) else build_plugin(Loss, loss, _installed(tuple(sys.path)))
