"""The Python interface, the flow on one screen: read this file first.

A spec names plugins; the registry finds them; `load_spec` turns the file into validated instances; the methods among
them define an objective on the members' outputs; a `Trainer` trains the members in a run directory; `open_run` and
`load` read what is there. Nothing here knows any plugin by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ensemblekit.analysis.search import SearchSettings, run_request
from ensemblekit.analysis.search_space import read_space
from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.sweeping import SweepRequest
from ensemblekit.analysis.sweeps import Sweep
from ensemblekit.core import decomposition, metrics
from ensemblekit.core.decomposition import Decomposition
from ensemblekit.core.errors import NumericError
from ensemblekit.core.losses import Loss
from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import Dataset, Method, Model
from ensemblekit.core.registry import PluginInfo, Registry, discover
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.data.loading import Data, load_data
from ensemblekit.display.progress import Progress, choose_progress
from ensemblekit.display.sweep_table import choose_sweep_display
from ensemblekit.inference import loading
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.members.build import build_member
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.run import Run, read_run, read_spec
from ensemblekit.spec import reader
from ensemblekit.spec.reader import build_plugin
from ensemblekit.spec.sections import DEFAULT_LOSS, Spec
from ensemblekit.training.trainer import Trainer

MethodLike = Method | str | Mapping[str, Any]
LossLike = Loss | str | Mapping[str, Any]
ModelLike = Model | str | Mapping[str, Any]


def load_spec(
    source: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    plugins: Iterable[str | Path] = (),
) -> Spec:
    """Read and validate a spec.

    Args:
        source: path of a TOML file, or its content as a mapping.
        overrides: values by dotted path, such as ``{"training.epochs": 3}``.
        plugins: local Python files whose plugin classes the spec may name.

    Returns:
        The spec, with an instance of every plugin and every default filled in.

    Raises:
        SpecError: the spec is invalid; the error lists every problem.
    """
    return reader.load_spec(source, overrides, _registry(plugins))


def train(
    spec: Spec | str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    progress: bool | Progress = True,
    data: tuple[Any, Any] | None = None,
    plugins: Iterable[str | Path] = (),
    name: str = "run",
) -> Run:
    """Train an ensemble and keep everything about it in a run directory.

    Args:
        spec: what to train: a `Spec`, or anything that `load_spec` takes.
        out: the run directory, which must be empty or not exist yet. Default: runs/NAME-NUMBER with a free number.
        progress: False for silence, or a display of your own: an object with ``@hookimpl`` methods and `close`.
        data: training and test data in place of the spec's: map-style torch data sets, or pairs of tensors (inputs,
            targets). Name the data set "given" if the spec has none.
        plugins: local Python files whose plugin classes the spec may name.
        name: see `out`.

    Returns:
        The finished run: its path, metrics, history and trained ensemble.

    Raises:
        SpecError: the spec is invalid.
        DataError: the data cannot be read or does not fit.
        RunError: the run directory cannot be used.
        NumericError: training diverged; the last checkpoint is kept.
        Interrupted: Ctrl-C or SIGTERM; continue with `resume`.
    """
    registry = _registry(plugins)
    if not isinstance(spec, Spec):
        spec = reader.load_spec(spec, None, registry)
    spec, loaded = _with_data(spec, data)
    with _display(progress) as display:
        return run_spec(spec, registry, out, [display], loaded, name)


def resume(
    path: str | Path,
    progress: bool | Progress = True,
    data: tuple[Any, Any] | None = None,
    plugins: Iterable[str | Path] = (),
) -> Run:
    """Continue a run from its last checkpoint; the result is bit-identical to that of an uninterrupted run.

    Args:
        path: the run directory. A run that has finished is returned unchanged.
        progress: as for `train`.
        data: as for `train`, if the run was started with data from Python.
        plugins: as for `train`.

    Raises:
        RunError: there is no run, its spec was changed, no checkpoint is usable, or it is in use.
    """
    with _display(progress) as display:
        return resume_run(path, _registry(plugins), [display], data)


def open_run(path: str | Path, plugins: Iterable[str | Path] = ()) -> Run:
    """Open a run, finished or not, without locking or training it.

    Args:
        path: the run directory.
        plugins: local Python files whose plugin classes the run uses.

    Returns:
        Its spec, status, history, metrics, members, environment and checkpoints; `ensemble` loads the weights.

    Raises:
        RunError: there is no run, or its files are damaged.
        PluginError: a plugin of the run is not installed.
    """
    return _read(RunDirectory.open(path), _registry(plugins))


def load(path: str | Path, plugins: Iterable[str | Path] = ()) -> Ensemble:
    """Load the trained ensemble of a run, an `nn.Module` in evaluation mode; nothing is unpickled.

    Args:
        path: the directory of a finished run.
        plugins: local Python files whose plugin classes the run uses.

    Raises:
        RunError: the run has not finished, or its files are damaged.
    """
    return loading.load_ensemble(Path(path), _registry(plugins))


def evaluate_run(
    path: str | Path, data: str | Mapping[str, Any] | None = None, plugins: Iterable[str | Path] = ()
) -> dict[str, float]:
    """Compute the metrics of a run's ensemble on its test data.

    Args:
        path: the directory of a finished run.
        data: another data set with inputs and outputs of the same shape, by its name or its table.
        plugins: local Python files whose plugin classes the run uses.
    """
    registry = _registry(plugins)
    other = None
    if data is not None:
        seed = read_spec(RunDirectory.open(path), registry).seed
        other = load_data(build_plugin(Dataset, data, registry), seed)
    return loading.evaluate_run(Path(path), other, registry)


def sweep(
    spec: Spec | str | Path | Mapping[str, Any],
    grid: Mapping[str, Any] | None = None,
    seeds: int | None = None,
    variants: Sequence[Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    progress: bool | SweepListener = True,
    overrides: Mapping[str, Any] | None = None,
    plugins: Iterable[str | Path] = (),
    name: str = "sweep",
    retry_failed: bool = False,
    search: Mapping[str, Any] | None = None,
    trials: int = 20,
    minimise: str = "validation_loss",
) -> Sweep:
    """Train a spec with many values: every combination of variants, grid and seeds is a run in one directory.

    Args:
        spec: what to train: a `Spec`, anything that `load_spec` takes, or an existing sweep directory to continue.
        grid: values by dotted path: lists, or ranges such as ``"0:1:0.1"``. They are added to the grid of the spec's
            section [sweep].
        seeds: runs of each combination, with the spec's seed and the following ones. Default: 1.
        variants: named sets of overrides: ``{"name": "bagging", "set": {"method": "bagging"}}``.
        out: the sweep directory; a sweep of the same spec that exists there is continued, and may be extended.
            Default: sweeps/NAME-NUMBER with a free number.
        jobs: runs at once, each in a process with its share of the cores.
        progress: False for silence, or a display of your own.
        overrides: values by dotted path that all runs share.
        plugins: local Python files whose plugin classes the spec may name.
        name: see `out`.
        retry_failed: also try runs again that have failed.
        search: in place of a grid: intervals such as ``"0..1"`` or ``"1e-4..1e-2:log"``, or lists of values, by
            dotted path, from which Optuna chooses.
        trials: number of runs of a search.
        minimise: the metric that a search minimises, on validation data.

    Returns:
        The sweep with all runs; one that has failed is listed with its error.

    Raises:
        SpecError: a combination is invalid; nothing was started.
        RunError: the directory belongs to something else, or is in use.
        Interrupted: Ctrl-C; call it again to continue.
    """
    files = [str(file) for file in plugins]
    registry = _registry(files)
    request = SweepRequest(spec, overrides, grid, seeds, variants, out, name)
    settings = SearchSettings(read_space(search), trials, minimise) if search else None
    listener = progress if isinstance(progress, SweepListener) else choose_sweep_display(quiet=not progress)
    try:
        return run_request(request, registry, RunTraining(registry), listener, jobs, files, retry_failed, settings)
    finally:
        listener.close()


def objective(
    method: MethodLike | Sequence[MethodLike],
    outputs: Tensor,
    target: Tensor,
    loss: LossLike = DEFAULT_LOSS,
    sample_weights: Tensor | None = None,
) -> Tensor:
    """Compute the objective of a method, or of several composed methods.

    Args:
        method: a method, its name or its table, or a list of these.
        outputs: the members' raw outputs (M, B, C).
        target: class indices (B,) or real values (B,) or (B, C).
        loss: the loss that the method builds on, its name or its table.
        sample_weights: weights (B, M) of the samples of this batch. Default: 1, also for methods that sample weights
            in training (see `draw_sample_weights`).

    Returns:
        A scalar that can be differentiated.

    Raises:
        DataError: outputs, targets or weights do not fit.
        NumericError: the objective is not finite.
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
    """Sample the weights (N, M) that a run of these methods with this seed would use; None if all are 1."""
    return _objective(method, DEFAULT_LOSS).hooks.sample_weights(num_samples, num_members, seed)


def decompose(outputs: Tensor, target: Tensor, loss: LossLike = DEFAULT_LOSS) -> Decomposition:
    """Decompose the loss of the mean output into mean member loss, diversity and remainder, for any loss.

    Args:
        outputs: the members' raw outputs (M, B, C).
        target: class indices (B,) or real values (B,) or (B, C).
        loss: the loss, its name or its table.
    """
    chosen = _loss(loss)
    chosen.check_values(outputs, target)
    return decomposition.decompose(outputs, target, chosen)


def evaluate(outputs: Tensor, target: Tensor, loss: LossLike | None = None) -> dict[str, float]:
    """Compute metrics of member outputs: accuracy, calibration, diversity … or, for real targets, MSE, R² …

    Args:
        outputs: the members' raw outputs (M, N, C).
        target: class indices (N,) or real values (N,) or (N, C).
        loss: the loss. Default: cross-entropy for class indices, the squared error for real targets.
    """
    chosen = _loss(loss or ("mse" if target.is_floating_point() else DEFAULT_LOSS))
    chosen.check_values(outputs, target)
    return metrics.evaluate(outputs, target, chosen)


def build_model(spec: ModelLike, input_shape: Sequence[int], num_outputs: int, seed: int = 0) -> nn.Module:
    """Build one member, (B, *input_shape) → (B, num_outputs), on the CPU: the first of an ensemble with this seed.

    Args:
        spec: the model, its name or its table.
        input_shape: shape of one input, without the batch dimension.
        num_outputs: outputs per sample.
        seed: determines the initial weights; torch's global random generator is not used.
    """
    model = spec if isinstance(spec, Model) else build_plugin(Model, spec, _registry())
    return build_member(model, tuple(input_shape), num_outputs, seed, member=0)


def methods() -> Mapping[str, PluginInfo]:
    """Return the installed methods by name; a plugin is imported only by its `load`."""
    return _registry().plugins("method")


def models() -> Mapping[str, PluginInfo]:
    """Return the installed base models by name."""
    return _registry().plugins("model")


def datasets() -> Mapping[str, PluginInfo]:
    """Return the installed data sets by name."""
    return _registry().plugins("dataset")


class RunTraining:
    """Trains the single runs of a sweep."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def train(self, spec: Spec, path: Path, listeners: Iterable[object], data: Data | None) -> Run:
        """Train a spec in a new run directory."""
        return run_spec(spec, self.registry, path, listeners, data)

    def resume(self, path: Path, listeners: Iterable[object]) -> Run:
        """Continue a run."""
        return resume_run(path, self.registry, listeners)


def run_spec(
    spec: Spec,
    registry: Registry,
    out: str | Path | None = None,
    listeners: Iterable[object] = (),
    data: Data | None = None,
    name: str = "run",
) -> Run:
    """Train a spec with the plugins of a registry; see `train`."""
    claim = RunDirectory.claim(out) if out else RunDirectory.claim_next(name)
    with claim as directory:
        Trainer(spec, directory, data, listeners).train(registry)
    return _read(directory, registry)


def resume_run(
    path: str | Path, registry: Registry, listeners: Iterable[object] = (), data: tuple[Any, Any] | None = None
) -> Run:
    """Resume a run with the plugins of a registry; see `resume`."""
    directory = RunDirectory.open(path)
    directory.check_spec_unchanged()
    spec, loaded = _with_data(read_spec(directory, registry), data)
    with directory.lock():
        if directory.read_result() is None:
            Trainer(spec, directory, loaded, listeners).resume()
    return _read(directory, registry)


@contextmanager
def _display(progress: bool | Progress) -> Iterator[Progress]:
    """Yield the display; one that is made here is also closed here."""
    if not isinstance(progress, bool):
        yield progress
        return
    display = choose_progress(quiet=not progress)
    try:
        yield display
    finally:
        display.close()


def _with_data(spec: Spec, data: tuple[Any, Any] | None) -> tuple[Spec, Data | None]:
    """Replace the data set of a spec by data from Python, if there is any."""
    if data is None:
        return spec, None
    dataset = spec.data if isinstance(spec.data, InMemoryData) else InMemoryData()
    return replace(spec, data=dataset), load_data(dataset.of(*data), spec.seed)


def _read(directory: RunDirectory, registry: Registry) -> Run:
    return read_run(directory, registry, partial(loading.load_ensemble, directory.path, registry))


def _registry(files: Iterable[str | Path] = ()) -> Registry:
    """Return the registry of the installed plugins and those of local files; a file is executed once per version."""
    versions = tuple((str(file), Path(file).stat().st_mtime_ns if Path(file).exists() else 0) for file in files)
    return _discovered(tuple(sys.path), versions)


@cache
def _discovered(search_path: tuple[str, ...], versions: tuple[tuple[str, int], ...]) -> Registry:
    return discover(file for file, _ in versions)


def _objective(method: MethodLike | Sequence[MethodLike], loss: LossLike) -> Objective:
    listed = method if isinstance(method, Sequence) and not isinstance(method, str) else [method]
    methods = [entry if isinstance(entry, Method) else build_plugin(Method, entry, _registry()) for entry in listed]
    return Objective(methods, _loss(loss))


def _loss(loss: LossLike) -> Loss:
    return loss if isinstance(loss, Loss) else build_plugin(Loss, loss, _registry())
