"""A run as its directory shows it: finished or not, opened without locking or training it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ensemblekit.core.errors import PluginError, RunError, SpecError
from ensemblekit.core.html_tables import html_table
from ensemblekit.core.metrics import translate_names
from ensemblekit.core.registry import Registry
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.json_files import as_written
from ensemblekit.runs.model_folder import ModelFolder
from ensemblekit.runs.own_files import CONFIG
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.sections import TRAINING_KINDS, Spec

if TYPE_CHECKING:
    from torch import Tensor

    from ensemblekit.inference.combining import Combiner
    from ensemblekit.inference.ensemble import Ensemble
    from ensemblekit.runs.outputs import KeptOutputs


class Loader(Protocol):
    """Loads what is large or takes a network."""

    def ensemble(self) -> Ensemble:
        """Load the trained ensemble."""

    def outputs(self, split: str, data: Any) -> KeptOutputs:
        """Return the members' outputs on a split."""

    def combiner(self) -> Combiner:
        """Return how the members' outputs are combined."""


@dataclass(frozen=True)
class Run:
    """A run directory, opened for reading."""

    path: Path
    spec: Spec
    """The resolved spec: it names the engine and the device that the run uses."""
    status: str
    """"finished", "running", "interrupted" or "failed"."""
    metrics: dict[str, Any]
    """The final metrics on the test data, such as `test_accuracy`, and of a run with folds those of its out-of-fold
    predictions, such as `out_of_fold_accuracy`; empty unless the run has finished."""
    members: list[dict[str, Any]]
    """The final metrics of each member; empty unless the run has finished."""
    history: list[dict[str, Any]]
    """The metrics of each epoch: the lines of metrics.jsonl."""
    environment: dict[str, Any]
    """Versions, plugins, device, engine and times."""
    checkpoints: list[int]
    """The epochs that have a checkpoint."""
    validation: dict[str, Any] = field(default_factory=dict)
    """The final metrics on the validation data; empty without validation data or unless the run has finished."""
    best_epoch: int | None = None
    """The epoch with the least validation loss; None without validation data or unless the run has finished."""
    stopped_early: bool = False
    """Whether early stopping ended the training."""
    error: str | None = None
    """Why the run failed."""
    notices: list[str] = field(default_factory=list)
    """What a user should know about the run although it is no error, such as a damaged checkpoint."""
    milliseconds_per_1000: float | None = None
    """How long 1,000 predictions took in the final evaluation; None unless the run has finished and has measured it."""
    loader: Loader | None = field(default=None, repr=False, compare=False)
    """Reads the weights and the kept outputs when they are asked for."""

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent on `start`, `training`, `evaluation` and `checkpoints`, also before it was resumed."""
        seconds: dict[str, float] = self.environment.get("seconds", {})
        return seconds

    @cached_property
    def ensemble(self) -> Ensemble:
        """The trained ensemble; a `RunError` if the run has not finished."""
        assert self.loader is not None
        return self.loader.ensemble()

    def outputs(self, split: str = "test", data: Any = None) -> KeptOutputs:
        """Return what every member answered on data of the run: outputs (M, N, C), targets and sample index.

        Outputs are those of `Ensemble.member_outputs`, in the original units in regression. The run has kept them, so
        that no network is computed. A run that has not, such as one of an older version, is evaluated once and keeps
        them if its directory can be written to.

        Args:
            split: "test", "validation", or "out_of_fold" of a run with `data.folds`: what members answered on the
                training samples that they have not seen, (R, N, C), with the index of the member that gave each.
            data: the same data as for `train`, if the run was started with data from Python and has kept no outputs.

        Raises:
            RunError: the run has not finished, or the file is damaged.
            UsageError: the run has no validation data, or no folds.
            DataError: the outputs have to be computed, and the data is not there or not the same any more.
        """
        assert self.loader is not None
        return self.loader.outputs(split, data)

    def out_of_fold_predictions(self, data: Any = None) -> Tensor:
        """Return the prediction for each training sample by the members that were not trained on it.

        Args:
            data: as for `outputs`.

        Returns:
            Probabilities (N, classes), or real values (N, C) in the original units. Sample n is the one with the number
            ``run.outputs("out_of_fold").index[n]`` in its data set.

        Raises:
            UsageError: the run has no folds.
        """
        return self.combiner().predictions(self.outputs("out_of_fold", data))

    def combiner(self) -> Combiner:
        """Return how the members' outputs are combined, without building a network.

        Raises:
            RunError: the run has not finished, or its model is damaged.
        """
        assert self.loader is not None
        return self.loader.combiner()

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        return run_html(self)

    def __repr__(self) -> str:
        epochs = f"{len(self.history)} epoch{'s' * (len(self.history) != 1)}"
        return f"Run({str(self.path)!r}, {self.status}, {epochs})"


def run_html(run: Run) -> str:
    """Return a small table of a run in HTML: what it is, how far it is, and its result."""
    spec, measures = run.spec, ("test_accuracy", "test_mse", "test_loss", "test_diversity")
    rows = [
        ("status", run.status if run.error is None else f"{run.status}: {run.error}"),
        ("method", " + ".join(method.name for method in spec.methods)),
        ("model", ", ".join(dict.fromkeys(model.name for model in spec.member_models))),
        ("members", spec.ensemble.members),
        ("data", spec.data.name),
        ("epochs", len(run.history)),
        *((name, f"{run.metrics[name]:.6g}") for name in measures if run.metrics.get(name) is not None),
        *([("time", f"{sum(run.seconds.values()):.1f} s")] if run.seconds else []),
    ]
    return html_table(rows, caption=f"run {run.path}")


def read_run(directory: RunDirectory, registry: Registry, loader: Loader) -> Run:
    """Read everything about a run except its weights and the outputs of its members."""
    result = directory.read_result() or {}
    with as_written(directory.path / "result.json"):
        metrics, validation = translate_names(result.get("metrics", {})), dict(result.get("validation_metrics") or {})
        members = list(result.get("members", []))
        notices = list(dict.fromkeys([*result.get("notices", []), *directory.notices]))
    return Run(
        path=directory.path,
        spec=read_spec(directory, registry),
        status=directory.status,
        metrics=metrics,
        members=members,
        history=[translate_names(row) for row in directory.read_metrics()],
        environment=directory.environment,
        checkpoints=directory.checkpoint_epochs,
        validation=validation,
        best_epoch=result.get("best_epoch"),
        stopped_early=bool(result.get("stopped_early", False)),
        error=directory.error,
        notices=notices,
        milliseconds_per_1000=result.get("milliseconds_per_1000"),
        loader=loader,
    )


def read_spec(directory: RunDirectory, registry: Registry, for_training: bool = False) -> Spec:
    """Read the spec of a run, which must be as it was written.

    A missing plugin is named with the package that provided it. Plugins that only training needs, such as a logger,
    may be missing unless the run is going to be trained.
    """
    directory.check_spec_unchanged()
    with as_written(directory.path / "environment.json"):
        used = [(entry["kind"], entry["name"], entry["package"]) for entry in directory.environment.get("plugins", [])]
        _check_installed(used, registry, for_training)
    return _checked_spec(directory.path / "spec.toml", registry, directory.path, directory.format_version, for_training)


def read_folder_spec(folder: ModelFolder, registry: Registry) -> Spec:
    """Read the spec of a model folder; plugins are looked up as for `read_spec`."""
    with as_written(folder.path / CONFIG):
        _check_installed(folder.plugins, registry)
        tables = tomllib.loads(folder.spec)
    return _checked_spec(tables, registry, folder.path, folder.run_format)


def _check_installed(used: Iterable[tuple[str, str, str]], registry: Registry, for_training: bool = False) -> None:
    """Raise a `PluginError` that names the package of the first plugin, by kind, name and package, that is missing."""
    for kind, name, package in used:
        if for_training or kind not in TRAINING_KINDS:
            registry.get(kind, name, package=package)


def _checked_spec(
    source: Path | Mapping[str, Any], registry: Registry, path: Path, format_version: int, for_training: bool = False
) -> Spec:
    """Read a spec, from a file or as tables, of the run or model folder `path`."""
    try:
        spec = load_spec(source, None, registry, ask_plugins=False, for_training=for_training)
        return replace(spec, data=spec.data.in_format(format_version))
    except SpecError as error:
        for problem in error.problems:
            if problem.code == "unknown_plugin":
                raise PluginError(problem.what, f"{problem.path} of {path}", problem.fix) from error
        details = [str(problem) for problem in error.problems] if len(error.problems) > 1 else []
        raise RunError(error.what, error.where, error.fix, path=str(path), details=details) from error
