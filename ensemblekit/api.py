"""The Python interface, the flow on one screen: read this file first.

A spec names plugins; the registry finds them; `load_spec` turns the file into validated instances; the methods among
them define an objective on the members' outputs; a `Trainer` trains the members in a run directory; `open_run` and
`load` read what is there. Nothing here knows any plugin by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ensemblekit.analysis import comparing
from ensemblekit.analysis.comparison import Comparison
from ensemblekit.analysis.ray_cluster import share_of
from ensemblekit.analysis.report import writing
from ensemblekit.analysis.report.writing import WrittenReport
from ensemblekit.analysis.search import SearchSettings, run_request
from ensemblekit.analysis.search_space import read_space
from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.sweeping import SweepRequest
from ensemblekit.analysis.sweeps import Sweep
from ensemblekit.core.errors import UsageError
from ensemblekit.core.registry import PluginInfo, Registry
from ensemblekit.data.loading import Data
from ensemblekit.display.progress import Progress, choose_progress
from ensemblekit.display.sweep_table import choose_sweep_display
from ensemblekit.inference import (
    corruption,
    evaluation,
    loading,
    out_of_distribution,
)
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.inference.recombining import other_combiner
from ensemblekit.members.python_model import NetworkLike
from ensemblekit.members.python_specs import PluginLike, registry_of, spec_of, with_data
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.run import Run, read_run
from ensemblekit.spec.sections import Spec
from ensemblekit.training.sessions import train_new, train_on
from ensemblekit.training.together import RunToTrain, train_together


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
    return spec_of(source, overrides, registry_of(plugins, model), model, in_memory)


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
            (`data.test_fraction`); or (train, test) or (train, validation, test) of such pairs or data sets. If the
            spec's data set is "table", or if it has no name but a `target`: a pandas or polars frame with the target,
            or (train, test) or (train, validation, test) of such frames.
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
    registry = registry_of(plugins, model)
    spec, loaded = with_data(spec_of(spec, None, registry, model, data is not None, data), data)
    with open_display(progress) as display:
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
    with open_display(progress) as display:
        return resume_run(
            path, registry_of(plugins, model), [display], data=data, engine=engine, device=device, epochs=epochs
        )


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
    return read(RunDirectory.open(path), registry_of(plugins, model))


def load(
    path: str | Path,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
    device: str | torch.device = "cpu",
) -> Ensemble:
    """Load a trained ensemble, an `nn.Module` in evaluation mode; nothing is unpickled.

    Args:
        path: the directory of a finished run, or a model folder that `export` with the format hub wrote.
        plugins: plugin classes that the run uses, or local Python files with such classes.
        model: the same model as for `train`, if the run was started with a model from Python.
        device: where to put it: "cpu", "cuda", "cuda:1", "mps", or "auto" for the best available.

    Raises:
        RunError: the run has not finished, or files are damaged or symbolic links.
        PluginError: a plugin of the run is not installed.
    """
    return loading.load_ensemble(Path(path), registry_of(plugins, model), device)


def evaluate_run(
    path: str | Path,
    data: Any = None,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
    device: str | torch.device = "cpu",
    per_class: bool = False,
    ood: Any = None,
    corrupt: bool | str | Sequence[str] = False,
    severities: Sequence[int] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
    combiner: str | Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Compute the metrics of a run's ensemble on its test data.

    Args:
        path: the directory of a finished run.
        data: other data with inputs and outputs of the same shape: the name or the table of a data set, whose test
            split is used; for a run on a table, the path of a file with the same columns and the targets, which is
            prepared as the run's was; or Python data as for `train`, where a single pair (X, y), data set or frame
            is used as a whole.
        plugins: plugin classes that the run uses, or local Python files with such classes.
        model: the same model as for `train`, if the run was started with a model from Python.
        device: where to compute, as for `load`.
        per_class: whether to add `classes`, a list with name, count, recall, precision and most frequent confusion of
            each class, and `confusion`, the numbers of samples by true class (row) and predicted class (column). For
            a run with prediction sets the classes also have their `coverage`, and `set_sizes` lists that by size.
        combiner: name or table of another combiner: what would the metrics be with it? They are computed from the
            run's kept outputs, unless there is other data, and without a calibration of the run's own combination.
        ood: out-of-distribution data with inputs of the same shape, to add how well the ensemble's uncertainty tells
            it from the run's own test data (`ood_auroc_entropy` …): the name or the table of a data set, whose test
            split is used; the path of a folder of images or of a file that `predict` takes; or Python data: inputs,
            a pair (X, y) or a data set. Targets are not used.
        corrupt: add metrics under standard corruptions of the test images (`corrupt_accuracy` …): True for all, or
            the names of some.
        severities: of the corruptions, from 1 to 5. Default: all.
        progress: called with the number of corruptions that were evaluated and the number of all.

    Returns:
        The metrics by name; `combiner` and `calibration` of the dictionary name what they are for. On the run's own
        data also those of its out-of-fold predictions, if it has folds; they are never calibrated.

    Raises:
        DataError: the data cannot be read or does not fit.
        NumericError: outputs of the ensemble are not finite.
        UsageError: `data` and `ood` are both given; the inputs are not images, but are to be corrupted.
    """
    if corrupt:
        corruption.check_corruptions(corrupt, severities)  # before anything slow
    registry = registry_of(plugins, model)
    loader = RunLoader(RunDirectory.open(path), registry)
    other = None if combiner is None else other_combiner(loader, combiner)
    if other is not None and data is None:
        return evaluation.evaluate_kept(loader, other, per_class)
    ensemble = loading.load_ensemble(Path(path), registry, device)
    found: dict[str, Any] = {}
    if ood is not None:
        if data is not None:
            what = "other data is always compared with the run's own test data"
            raise UsageError(what, "data and ood", "give only one of them")
        loader = RunLoader(RunDirectory.open(path), registry)
        found = out_of_distribution.evaluate_ood(ensemble, loader, ood, per_class)
        if not corrupt:
            return found
    loaded = evaluation.evaluation_data(ensemble, Path(path), data, registry)
    evaluated = evaluation.evaluate_on(ensemble, loaded, per_class, other)
    if data is None:
        evaluated |= evaluation.recorded_out_of_fold(RunDirectory.open(path))
    if corrupt:
        evaluated |= corruption.evaluate_corrupted(ensemble, loaded, corrupt, severities, progress)
    evaluated |= {name: value for name, value in found.items() if name not in evaluated}
    return evaluated


def sweep(
    spec: Spec | str | Path | Mapping[str, Any],
    grid: Mapping[str, Any] | None = None,
    seeds: int | None = None,
    variants: Sequence[Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    progress: bool | SweepListener = True,
    overrides: Mapping[str, Any] | None = None,
    plugins: Iterable[str | Path] = (),
    name: str = "sweep",
    retry_failed: bool = False,
    search: Mapping[str, Any] | None = None,
    trials: int = 20,
    minimise: str = "validation_loss",
    on: str | None = None,
    cpus_per_run: int | None = None,
    gpus_per_run: float | None = None,
    together: bool = False,
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
        jobs: runs at once, each in a process with its share of the cores. Default: 1; on Ray, as many as there is
            room for.
        progress: False for silence, or a display of your own.
        overrides: values by dotted path that all runs share.
        plugins: local Python files whose plugin classes the spec may name.
        name: see `out`.
        retry_failed: also try runs again that have failed.
        search: in place of a grid: intervals such as ``"0..1"`` or ``"1e-4..1e-2:log"``, or lists of values, by
            dotted path, from which Optuna chooses.
        trials: number of runs of a search.
        minimise: the metric that a search minimises, on validation data.
        on: "ray" to train the runs as tasks of Ray: of the Ray that this process uses, of the cluster of RAY_ADDRESS,
            or else of a local one. All nodes must share the sweep directory.
        cpus_per_run: cores that each run gets on Ray. Default: 1.
        gpus_per_run: GPUs that each run gets on Ray, also a part of one. Default: 1 if there are any, 0 for specs
            with the device "cpu".
        together: train runs that differ only in the parameters of methods or in the seed at once, as one stack of
            networks; the results are those of separate runs with the engine "stacked", within rounding. Runs that
            cannot be trained so are trained one after the other, as notices of the sweep say.

    Returns:
        The sweep with all runs; one that has failed is listed with its error.

    Raises:
        SpecError: a combination is invalid; nothing was started.
        RunError: the directory belongs to something else, is in use, or is not shared by all nodes.
        ResourceError: Ray does not start, or there is no cluster.
        Interrupted: Ctrl-C; call it again to continue.
    """
    files = [str(file) for file in plugins]
    registry = registry_of(files)
    request = SweepRequest(spec, overrides, grid, seeds, variants, out, name)
    share = share_of(on, cpus_per_run, gpus_per_run)
    settings = SearchSettings(read_space(search), trials, minimise) if search else None
    listener = progress if isinstance(progress, SweepListener) else choose_sweep_display(quiet=not progress)
    try:
        training = RunTraining(registry)
        return run_request(request, registry, training, listener, jobs, files, retry_failed, settings, share, together)
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
    registry = registry_of(plugins, model)
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    keys = [by] if isinstance(by, str) else list(by)
    return comparing.compare(listed, lambda path: read(RunDirectory.open(path), registry), keys, progress)


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
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> WrittenReport:
    """Write a report, and return what is in it; arguments as for `report`, `progress` as for `compare`."""
    target = None if output is None else Path(output)
    return writing.write_report(Path(path), target, registry_of(plugins, model), data, progress)


def methods() -> Mapping[str, PluginInfo]:
    """Return the installed methods by name; a plugin is imported only by its `load`."""
    return registry_of().plugins("method")


def models() -> Mapping[str, PluginInfo]:
    """Return the installed base models by name."""
    return registry_of().plugins("model")


def datasets() -> Mapping[str, PluginInfo]:
    """Return the installed data sets by name."""
    return registry_of().plugins("dataset")


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

    def train_together(
        self, runs: Sequence[RunToTrain], data: Data, ended: Callable[[RunToTrain, BaseException | None], None]
    ) -> None:
        """Train or continue runs in one stack; `ended` is called for each run, with its error if it has failed."""
        train_together(runs, data, self.registry, ended)


def run_spec(
    spec: Spec,
    registry: Registry,
    out: str | Path | None = None,
    listeners: Iterable[object] = (),
    data: Data | None = None,
    name: str = "run",
) -> Run:
    """Train a spec with the plugins of a registry; see `train`."""
    return read(train_new(spec, registry, out, listeners, data, name), registry)


def resume_run(path: str | Path, registry: Registry, listeners: Iterable[object] = (), **options: Any) -> Run:
    """Resume a run with the plugins of a registry; options as for `resume`."""
    return read(train_on(path, registry, listeners, **options), registry)


@contextmanager
def open_display(progress: bool | Progress) -> Iterator[Progress]:
    """Yield the display; one that is made here is also closed here."""
    if not isinstance(progress, bool):
        yield progress
        return
    display = choose_progress(quiet=not progress)
    try:
        yield display
    finally:
        display.close()


def read(directory: RunDirectory, registry: Registry) -> Run:
    return read_run(directory, registry, RunLoader(directory, registry))
