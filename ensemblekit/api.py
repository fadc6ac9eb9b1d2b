"""The Python interface, the flow on one screen: read this file first.

A spec names plugins; the registry finds them; `load_spec` turns the file into validated instances; the methods among
them define an objective on the members' outputs; a `Trainer` trains the members in a run directory; `open_run` and
`load` read what is there. Nothing here knows any plugin by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ensemblekit.analysis import comparing
from ensemblekit.analysis.comparison import Comparison
from ensemblekit.analysis.report import writing
from ensemblekit.analysis.report.writing import WrittenReport
from ensemblekit.analysis.search import SearchSettings, run_request
from ensemblekit.analysis.search_space import read_space
from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.sweeping import SweepRequest
from ensemblekit.analysis.sweeps import Sweep
from ensemblekit.core import decomposition, metrics
from ensemblekit.core.decomposition import Decomposition
from ensemblekit.core.errors import NumericError, UsageError
from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.losses import Loss
from ensemblekit.core.objective import Objective
from ensemblekit.core.plugin import Dataset, Method, Model, Plugin
from ensemblekit.core.registry import PluginInfo, Registry, discover
from ensemblekit.data.fingerprint import check_same_data
from ensemblekit.data.in_memory import InMemoryData
from ensemblekit.data.loading import Data, load_data
from ensemblekit.data.python_data import split_parts
from ensemblekit.display.progress import Progress, choose_progress
from ensemblekit.display.sweep_table import choose_sweep_display
from ensemblekit.inference import evaluation, loading
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.inference.tables import data_of_file
from ensemblekit.members.build import build_member
from ensemblekit.members.python_model import ModelLike, NetworkLike, model_table, with_model
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.manifests import Position
from ensemblekit.runs.run import Run, read_run, read_spec
from ensemblekit.spec import reader
from ensemblekit.spec.reader import build_plugin
from ensemblekit.spec.sections import DEFAULT_LOSS, Spec
from ensemblekit.training.environment import environment
from ensemblekit.training.interruption import stop_requests
from ensemblekit.training.only_run import only_run_of_process
from ensemblekit.training.resuming import check_can_go_on, finished_text
from ensemblekit.training.trainer import Trainer

MethodLike = Method | str | Mapping[str, Any]
LossLike = Loss | str | Mapping[str, Any]
PluginLike = str | Path | type[Plugin]
"""A local Python file, or a plugin class."""


def load_spec(
    source: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
    in_memory: bool = False,
) -> Spec:
    """Read and validate a spec.

    Args:
        source: path of a TOML file, or its content as a mapping.
        overrides: values by dotted path, such as ``{"training.epochs": 3}``.
        plugins: plugin classes that the spec may name besides the installed ones, or local Python files with such
            classes. Class `SoftMin` is named soft_min.
        model: the model in place of the spec's, as for `train`.
        in_memory: whether the data will be passed to `train`; the spec then needs no [data].

    Returns:
        The spec, with an instance of every plugin and every default filled in.

    Raises:
        SpecError: the spec is invalid; the error lists every problem.
    """
    return _spec(source, overrides, _registry(plugins, model), model, in_memory)


def train(
    spec: Spec | str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    progress: bool | Progress = True,
    data: Any = None,
    plugins: Iterable[PluginLike] = (),
    name: str = "run",
    model: NetworkLike | None = None,
) -> Run:
    """Train an ensemble and keep everything about it in a run directory.

    Args:
        spec: what to train: a `Spec`, or anything that `load_spec` takes.
        out: the run directory, which must be empty or not exist yet, or hold a run that was killed before it saved
            anything. Default: runs/NAME-NUMBER with a free number.
        progress: False for silence, or a display of your own: an object with ``@hookimpl`` methods and `close`.
        data: data in place of the spec's, which then needs no [data]. A pair (X, y) of tensors, arrays, frames or
            lists, or a map-style data set of pairs (input, target), of which the seed holds out 20 % for testing
            (`data.test_fraction`); or (train, test) or (train, validation, test) of such pairs or data sets.
        plugins: plugin classes that the spec may name besides the installed ones, or local Python files with such
            classes. Class `SoftMin` is named soft_min.
        name: see `out`.
        model: the model in place of the spec's, which then needs no [model]. A subclass of `nn.Module`, or a function
            that builds a network; both get `input_shape` and `num_outputs` if they have parameters of these names. Or
            a model plugin, its class, its name or its table. A run keeps only the name of a class or function: pass it
            again to `load`, `resume`, `open_run` and `evaluate_run`.

    Returns:
        The finished run: its path, metrics, history and trained ensemble.

    Raises:
        SpecError: the spec is invalid.
        DataError: the data cannot be read or does not fit.
        RunError: the run directory cannot be used.
        NumericError: training diverged; the last checkpoint is kept.
        UsageError: another run is being trained in this process.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; continue with `resume`.
    """
    registry = _registry(plugins, model)
    spec, loaded = _with_data(_spec(spec, None, registry, model, in_memory=data is not None), data)
    with _display(progress) as display:
        return run_spec(spec, registry, out, [display], loaded, name)


def resume(
    path: str | Path,
    progress: bool | Progress = True,
    data: Any = None,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
    engine: str | None = None,
    device: str | None = None,
    epochs: int | None = None,
) -> Run:
    """Continue a run from its last checkpoint; the result is bit-identical to that of an uninterrupted run.

    Args:
        path: the run directory. A run that has finished is returned unchanged, unless `epochs` is given.
        progress: as for `train`.
        data: the same data as for `train`, if the run was started with data from Python.
        plugins: as for `train`.
        model: the same model as for `train`, if the run was started with a model from Python.
        engine: go on with another engine; the last bits will differ.
        device: go on with another device; the last bits will differ.
        epochs: train a run, finished or not, to so many epochs in all. From the continuation on, the learning rate
            is that of a run with so many epochs: constant, step and multistep schedules simply go on; cosine and
            cyclic ones take the value that they have there. `patience` counts anew.

    Raises:
        RunError: there is no run, its spec was changed, no checkpoint is usable, or it is in use.
        UsageError: the run cannot be trained to so many epochs, or is trained in this process already.
        Interrupted: as for `train`.
    """
    with _display(progress) as display:
        return resume_run(path, _registry(plugins, model), [display], data, engine, device, epochs)


def open_run(path: str | Path, plugins: Iterable[PluginLike] = (), model: NetworkLike | None = None) -> Run:
    """Open a run, finished or not, without locking or training it.

    Args:
        path: the run directory.
        plugins: plugin classes that the run uses, or local Python files with such classes.
        model: the same model as for `train`, if the run was started with a model from Python.

    Returns:
        Its spec, status, history, metrics, members, environment and checkpoints; `ensemble` loads the weights.

    Raises:
        RunError: there is no run, or its files are damaged.
        PluginError: a plugin of the run is not installed.
    """
    return _read(RunDirectory.open(path), _registry(plugins, model))


def load(
    path: str | Path,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
    device: str | torch.device = "cpu",
) -> Ensemble:
    """Load the trained ensemble of a run, an `nn.Module` in evaluation mode; nothing is unpickled.

    Args:
        path: the directory of a finished run.
        plugins: plugin classes that the run uses, or local Python files with such classes.
        model: the same model as for `train`, if the run was started with a model from Python.
        device: where to put it: "cpu", "cuda", "cuda:1", "mps", or "auto" for the best available.

    Raises:
        RunError: the run has not finished, or its files are damaged.
        PluginError: a plugin of the run is not installed.
    """
    return loading.load_ensemble(Path(path), _registry(plugins, model), device)


def evaluate_run(
    path: str | Path,
    data: Any = None,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
    device: str | torch.device = "cpu",
    per_class: bool = False,
) -> dict[str, Any]:
    """Compute the metrics of a run's ensemble on its test data.

    Args:
        path: the directory of a finished run.
        data: other data with inputs and outputs of the same shape: the name or the table of a data set, whose test
            split is used; for a run on a table, the path of a file with the same columns and the targets, which is
            prepared as the run's was; or Python data as for `train`, where a single pair (X, y) or data set is used
            as a whole.
        plugins: plugin classes that the run uses, or local Python files with such classes.
        model: the same model as for `train`, if the run was started with a model from Python.
        device: where to compute, as for `load`.
        per_class: whether to add `classes`, a list with name, count, recall, precision and most frequent confusion of
            each class, and `confusion`, the numbers of samples by true class (row) and predicted class (column).

    Returns:
        The metrics by name.

    Raises:
        DataError: the data cannot be read or does not fit.
        NumericError: outputs of the ensemble are not finite.
    """
    registry = _registry(plugins, model)
    ensemble = loading.load_ensemble(Path(path), registry, device)
    return evaluation.evaluate_on(ensemble, _evaluation_data(ensemble, Path(path), data, registry), per_class)


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


def compare(
    paths: str | Path | Iterable[str | Path],
    by: str | Sequence[str] = (),
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Compare runs, and the runs of sweeps, on the test data that they share, from their kept outputs.

    Args:
        paths: run directories and sweep directories. Runs that are damaged or have not finished are left out, as
            `notes` then says.
        by: the keys of specs that tell groups of runs apart, such as "method.lambda"; others are averaged over.
            Default: every key that differs, except the seed and where a run was computed.
        plugins: plugin classes that the runs use, or local Python files with such classes.
        model: the same model as for `train`, if the runs were started with a model from Python.
        progress: called with the number of runs that were read and the number of all.

    Returns:
        The comparison: `table()` has a row for each group, with intervals of its differences from the best; `plot`
        draws the figure; `advice` says what the numbers mean.

    Raises:
        RunError: a path is neither a run nor a sweep, or no run is left.
        UsageError: runs were tested on different data, or no run has one of the keys.
    """
    registry = _registry(plugins, model)
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    keys = [by] if isinstance(by, str) else list(by)
    return comparing.compare(listed, lambda path: _read(RunDirectory.open(path), registry), keys, progress)


def report(
    path: str | Path,
    output: str | Path | None = None,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
    data: Any = None,
) -> Path:
    """Write a report of a run or a sweep: one HTML page with figures, their data and the samples worth a look.

    Everything is computed from what the run has recorded and from its kept outputs. The page needs nothing but itself.

    Args:
        path: the directory of a run, finished or not, or of a sweep.
        output: the file to write, which appears once it is complete. Default: report.html in the directory.
        plugins: plugin classes that the run uses, or local Python files with such classes.
        model: the same model as for `train`, if the run was started with a model from Python.
        data: the same data as for `train`, if the run was started with data from Python and has kept no outputs.

    Returns:
        The path of the page.

    Raises:
        RunError: there is no run or sweep, its files are damaged, or the page cannot be written.
        ResourceError: the disk is full; an older page stays as it was.
    """
    return write_report(path, output, plugins, model, data).path


def write_report(
    path: str | Path,
    output: str | Path | None = None,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
    data: Any = None,
) -> WrittenReport:
    """Write a report, and return what is in it; see `report`."""
    return writing.write_report(Path(path), None if output is None else Path(output), _registry(plugins, model), data)


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
    method: MethodLike | Sequence[MethodLike],
    num_samples: int,
    num_members: int,
    seed: int = 0,
    targets: Tensor | None = None,
) -> Tensor | None:
    """Sample the weights (N, M) that a run of these methods with this seed would use; None if all are 1.

    Args:
        method: a method, its name or its table, or a list of these.
        num_samples: number of training samples, N.
        num_members: number of members, M.
        seed: seed of the run.
        targets: the training targets, class indices (N,) or real values (N, C), for methods that use them.
    """
    return _objective(method, DEFAULT_LOSS).hooks.sample_weights(num_samples, num_members, seed, targets)


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

    Returns:
        The metrics by name, as the documentation defines them, without the prefix of a split.

    Raises:
        NumericError: an output is not finite.
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
    with only_run_of_process(), stop_requests() as stop:
        claim = RunDirectory.claim(out) if out else RunDirectory.claim_next(name)
        with claim as directory:
            Trainer(spec, directory, data, listeners, stop=stop).train(registry)
    return _read(directory, registry)


def resume_run(
    path: str | Path,
    registry: Registry,
    listeners: Iterable[object] = (),
    data: Any = None,
    engine: str | None = None,
    device: str | None = None,
    epochs: int | None = None,
) -> Run:
    """Resume a run with the plugins of a registry; see `resume`."""
    directory = RunDirectory.open(path)
    listeners = list(listeners)
    with only_run_of_process(), stop_requests() as stop, directory.lock():
        stop.outcome = ("nothing was changed", str(path), f"continue with: ensemblekit resume {path}")
        directory.restore_spec()
        if not directory.has_environment:
            recorded = reader.load_spec(directory.path / "spec.toml", None, registry)
            directory.restore_environment(environment(recorded, registry))
        spec = read_spec(directory, registry)
        if epochs is not None:
            spec = _lengthened(directory, spec, epochs, registry)
        if directory.needs_training():
            elsewhere = {"engine.name": engine, "engine.device": device}
            spec = _changed(directory, {key: value for key, value in elsewhere.items() if value}, spec, registry)
            spec, loaded = _with_data(spec, data)
            Trainer(spec, directory, loaded, listeners, stop=stop).resume()
        else:
            _tell_finished(directory, listeners)
    return _read(directory, registry)


def _tell_finished(directory: RunDirectory, listeners: Sequence[object]) -> None:
    """Say that a run has finished, and what of it was found damaged or lost, which is recorded too."""
    if directory.damage:
        directory.write_status("finished", notices=[*directory.notices, *directory.damage])
    for text in (*directory.damage, finished_text(directory.path, len(directory.read_metrics()))):
        RunHooks([], listeners).call.notice(text=text)


def _lengthened(directory: RunDirectory, spec: Spec, epochs: int, registry: Registry) -> Spec:
    """Change a run to another number of epochs, if its methods can; returns its new spec."""
    longer = _changed(directory, {"training.epochs": epochs}, spec, registry)
    position = directory.newest_position or Position(0)
    check_can_go_on(spec, longer, position)
    if longer.training.epochs != spec.training.epochs:
        directory.lengthen(longer.to_toml(), position.epoch)
    return longer


def _changed(directory: RunDirectory, overrides: Mapping[str, Any], spec: Spec, registry: Registry) -> Spec:
    return reader.load_spec(directory.path / "spec.toml", overrides, registry) if overrides else spec


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


def _spec(
    source: Spec | str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    registry: Registry,
    model: NetworkLike | None,
    in_memory: bool,
) -> Spec:
    """Read a spec, with a model from Python in place of its own, if there is one."""
    table = None if model is None else model_table(model, registry)
    if not isinstance(source, Spec):
        changes = {} if table is None else {"model": table}
        default_names = {"data": InMemoryData().name} if in_memory else {}
        return reader.load_spec(source, {**changes, **(overrides or {})}, registry, default_names=default_names)
    if table is None:
        return source
    if source.groups:
        raise UsageError("the groups of the spec have models of their own", "model", "leave out ensemble.groups")
    return replace(source, model=build_plugin(Model, table, registry))


def _with_data(spec: Spec, data: Any) -> tuple[Spec, Data | None]:
    """Replace the data set of a spec by data from Python, if there is any."""
    if data is None:
        return spec, None
    dataset = InMemoryData.in_place_of(spec.data)
    return replace(spec, data=dataset), load_data(dataset.of(*split_parts(data)), spec.seed)


def _evaluation_data(ensemble: Ensemble, path: Path, data: Any, registry: Registry) -> Data:
    """Load the data that the ensemble of a run is evaluated on."""
    if isinstance(data, Path) or (isinstance(data, str) and _is_file(data, registry)):
        return data_of_file(ensemble, Path(data))
    if data is not None and not isinstance(data, str | Mapping):
        return evaluation.python_data(ensemble, split_parts(data)[-1])
    dataset = ensemble.spec.data if data is None else build_plugin(Dataset, data, registry)
    loaded = load_data(dataset, ensemble.spec.seed)
    if data is None:
        check_same_data(RunDirectory.open(path).environment.get("data"), loaded.fingerprint, dataset.name)
    evaluation.check_form(ensemble, loaded)
    return loaded


def _read(directory: RunDirectory, registry: Registry) -> Run:
    return read_run(directory, registry, RunLoader(directory, registry))


def _registry(plugins: Iterable[PluginLike] = (), model: NetworkLike | None = None) -> Registry:
    """Return the registry of the installed plugins, those of local files and those passed in Python."""
    plugins = [plugins] if isinstance(plugins, str | Path | type) else list(plugins)
    files = [plugin for plugin in plugins if isinstance(plugin, str | Path)]
    classes = [plugin for plugin in plugins if not isinstance(plugin, str | Path)]
    registry = _registry_of_files(files).with_classes(classes)
    return registry if model is None else with_model(registry, model)


def _registry_of_files(files: Iterable[str | Path]) -> Registry:
    """Return the registry of the installed plugins and those of local files; a file is executed once per version."""
    versions = tuple((str(file), Path(file).stat().st_mtime_ns if Path(file).exists() else 0) for file in files)
    return _discovered(tuple(sys.path), versions)


@cache
def _discovered(search_path: tuple[str, ...], versions: tuple[tuple[str, int], ...]) -> Registry:
    return discover(file for file, _ in versions)


def _is_file(data: str, registry: Registry) -> bool:
    """Whether a text is the path of a file rather than the name of a data set."""
    return data not in registry.plugins("dataset") and ("." in data or "/" in data or Path(data).exists())


def _objective(method: MethodLike | Sequence[MethodLike], loss: LossLike) -> Objective:
    listed = method if isinstance(method, Sequence) and not isinstance(method, str) else [method]
    methods = [entry if isinstance(entry, Method) else build_plugin(Method, entry, _registry()) for entry in listed]
    return Objective(methods, _loss(loss))


def _loss(loss: LossLike) -> Loss:
    return loss if isinstance(loss, Loss) else build_plugin(Loss, loss, _registry())
