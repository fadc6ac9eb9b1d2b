"""A search: Optuna chooses the values of a spec by validation data, and stops hopeless runs at the end of an epoch.

Its own storage is in the sweep directory, so that a search continues where it was stopped. Every trial is an ordinary
run of the sweep, named by its number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemblekit.analysis.grids import PlannedRun
from ensemblekit.analysis.plans import SweepPlan, Tables, read_section, validated_specs
from ensemblekit.analysis.ray_cluster import RayShare
from ensemblekit.analysis.search_space import Interval, Space, first_seed, read_space, resolved_space
from ensemblekit.analysis.sweep_events import SweepListener
from ensemblekit.analysis.sweep_runner import Pruned, SweepRunner, Training
from ensemblekit.analysis.sweeping import SweepRequest, check_jobs, run_sweep
from ensemblekit.analysis.sweeps import Sweep, SweepDirectory, is_sweep
from ensemblekit.core.errors import Interrupted, RunError, UsageError, choices
from ensemblekit.core.hookspecs import hookimpl
from ensemblekit.core.metrics import METRIC_GROUPS
from ensemblekit.core.registry import Registry
from ensemblekit.core.seeds import derive_seed
from ensemblekit.spec.sections import Spec
from ensemblekit.spec.sweep import SweepSection

if TYPE_CHECKING:
    import optuna

STORAGE_FILE = "search.db"
STUDY = "search"
PREFIX = "validation_"


@dataclass(frozen=True)
class SearchSettings:
    """What a search varies, how long, and what it looks at."""

    space: Space
    trials: int = 20
    metric: str = "validation_loss"
    maximise: bool = False

    def table(self) -> dict[str, Any]:
        """Return the settings for sweep.toml."""
        space = {key: str(part) if isinstance(part, Interval) else part.ends for key, part in self.space.items()}
        return {"trials": self.trials, "metric": self.metric, "maximise": self.maximise, "space": space}


def settings_of(directory: SweepDirectory) -> SearchSettings | None:
    """Return the settings of a search that was begun; None if the sweep is none."""
    table = directory.record.get("search")
    if not table:
        return None
    return SearchSettings(read_space(table["space"]), table["trials"], table["metric"], table["maximise"])


def check_settings(settings: SearchSettings) -> None:
    """Raise a `UsageError` for a search that cannot be: without keys or trials, or by another metric."""
    metric = settings.metric
    if not settings.space:
        raise UsageError("a search needs something to vary", "--search", "write --search method.lambda=0..1")
    if settings.trials < 1:
        raise UsageError(f"{settings.trials} trials", "--trials", "give an integer of at least 1")
    if not metric.startswith(PREFIX):
        what = f'"{metric}" cannot decide: a search looks at validation data only, never at test data'
        raise UsageError(what, "--minimise", f"for example: {PREFIX}loss")
    known = [f"{PREFIX}{name}" for names in METRIC_GROUPS.values() for name in names]
    if metric not in known:
        raise UsageError(f'there is no metric "{metric}"', "--minimise", choices(metric, known))


def run_request(
    request: SweepRequest,
    registry: Registry,
    training: Training,
    listener: SweepListener,
    jobs: int | None = None,
    plugins: Sequence[str] = (),
    retry_failed: bool = False,
    search: SearchSettings | None = None,
    share: RayShare | None = None,
    together: bool = False,
) -> Sweep:
    """Run a sweep, or a search if one is asked for or was begun in the directory; see `ensemblekit.sweep`."""
    check_jobs(jobs)
    if together and (share is not None or jobs not in (None, 1)):
        what = "runs that are trained together are trained in one process"
        raise UsageError(what, "--together", "leave out --jobs and --on ray, or --together")
    if search is None and request.directory is not None and is_sweep(request.directory):
        search = settings_of(SweepDirectory.open(request.directory))
    if search is None:
        return run_sweep(request, registry, training, listener, jobs, plugins, retry_failed, share, together)
    if share is not None or jobs not in (None, 1):
        what = "a search runs one trial at a time: each learns from those before it"
        option = "--jobs" if share is None else "--on ray"
        raise UsageError(what, option, f"leave {option} out")
    if together:
        what = "the trials of a search cannot be trained together: each depends on those before it"
        raise UsageError(what, "--together", "leave --together out")
    return run_search(request, search, registry, training, listener)


def run_search(
    request: SweepRequest, settings: SearchSettings, registry: Registry, training: Training, listener: SweepListener
) -> Sweep:
    """Run a search, or what is left of it.

    Raises:
        UsageError: the search cannot be, Optuna is not installed, or there is no validation data.
        Interrupted: the run in work is saved.
    """
    check_settings(settings)
    _import_optuna()
    tables = request.tables()
    if read_section(tables, registry, request.label)[0] != SweepSection():
        what = "a search chooses the values by itself and takes no grid, seeds or variants"
        raise UsageError(what, "--search", "leave them out; --set 'sweep={}' empties the section of a spec")
    space = resolved_space(tables, settings.space, registry, request.label)
    settings = replace(settings, space=space)
    with SweepDirectory.claim(request.directory, request.name) as directory:
        search = Search(directory, settings, tables, registry, training, listener)
        return search.run(request.label)


class Search:
    """One search in its locked directory."""

    def __init__(
        self,
        directory: SweepDirectory,
        settings: SearchSettings,
        tables: Tables,
        registry: Registry,
        training: Training,
        listener: SweepListener,
    ) -> None:
        self.directory, self.settings, self.registry = directory, settings, registry
        self.base = {key: value for key, value in tables.items() if key != "sweep"}
        self.seed = first_seed(tables)
        self.training, self.listener = training, listener

    def run(self, label: str) -> Sweep:
        """Run trials until there are as many as asked for."""
        runs = self.directory.runs
        specs = validated_specs(self.base, runs, self.registry, label)
        plan = SweepPlan(self.base, SweepSection(), tuple(runs), specs)
        self.directory.write_plan(plan, self.settings.table())
        runner = SweepRunner(self.directory, plan, self.training, self.listener)
        epochs = {name: spec.training.epochs for name, spec in plan.specs.items()}
        with storage_errors(self.directory.path):
            study = open_study(self.directory.path / STORAGE_FILE, self.seed, self.settings.maximise)
            self.listener.sweep_started(self.directory.path, list(runner.current.values()), epochs)
            try:
                while (trial := self._next_trial(study)) is not None:
                    self._run_trial(study, trial, runner)
            except (Interrupted, KeyboardInterrupt) as error:
                raise runner.interrupted(error) from error
        return runner.sweep

    def _next_trial(self, study: optuna.Study) -> optuna.Trial | None:
        """Return the trial that was stopped, or else a new one; None if there are enough."""
        optuna = _import_optuna()
        for frozen in study.get_trials(deepcopy=False):
            if frozen.state == optuna.trial.TrialState.RUNNING:
                return optuna.trial.Trial(study, frozen._trial_id)
        return study.ask() if len(study.get_trials(deepcopy=False)) < self.settings.trials else None

    def _run_trial(self, study: optuna.Study, trial: optuna.Trial, runner: SweepRunner) -> None:
        states = _import_optuna().trial.TrialState
        values = {key: part.suggest(trial, key) for key, part in self.settings.space.items()}
        run = PlannedRun("", values, self.seed, tuple(values), f"trial={trial.number}")
        if run.name not in runner.runs:
            spec = validated_specs(self.base, [run], self.registry, f"trial {trial.number}")[run.name]
            self._check_validation_data(spec, runner)
            runner.add(run, spec)
            self.directory.write_plan(runner.plan, self.settings.table())
        pruning = TrialListener(trial, self.settings.metric)
        outcome = runner.run_here(run, [pruning])
        runner.finish(run, outcome)
        if pruning.missing:
            raise UsageError(f'there is no metric "{self.settings.metric}"', "--minimise", pruning.missing)
        value = runner.current[run.name].metrics.get(self.settings.metric)
        if outcome.status == "pruned":
            study.tell(trial, state=states.PRUNED)
        elif outcome.status == "finished" and value is not None and math.isfinite(value):
            study.tell(trial, value)
        else:
            study.tell(trial, state=states.FAIL)

    def _check_validation_data(self, spec: Spec, runner: SweepRunner) -> None:
        if runner.data.load(spec).validation is None:
            fix = "set data.validation_fraction to more than 0"
            raise UsageError("a search needs validation data, and there is none", "--search", fix)


class TrialListener:
    """Tells Optuna the metric of each epoch, and stops a run that is hopeless."""

    is_essential = True
    """Whether a run ends if this raises."""

    def __init__(self, trial: optuna.Trial, metric: str) -> None:
        self.trial, self.metric = trial, metric
        self.missing = ""
        """What there is instead, if a run does not have the metric."""

    @hookimpl
    def epoch_finished(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        value = metrics.get(self.metric)
        names = [name for name in metrics if name.startswith(PREFIX)]
        if value is None and names and self.metric not in metrics:
            self.missing = choices(self.metric, names)
            raise UsageError(f'there is no metric "{self.metric}"', "--minimise", self.missing)
        if value is None or not math.isfinite(value):
            return
        so_far = self.trial.study.get_trials(deepcopy=False)[self.trial.number]
        if epoch not in so_far.intermediate_values:  # an epoch may be trained again after a resume
            self.trial.report(value, epoch)
        if self.trial.should_prune():
            raise Pruned(f"at epoch {epoch}: worse than the median of the earlier trials")


def open_study(file: Path, seed: int, maximise: bool) -> optuna.Study:
    """Open or make the study of a search; a search that continues samples other values than at its start."""
    optuna = _import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(f"sqlite:///{file.absolute()}")
    options = {"storage": storage, "study_name": STUDY, "load_if_exists": True}
    study = optuna.create_study(direction="maximize" if maximise else "minimize", **options)
    begun = len(study.get_trials(deepcopy=False))
    study.sampler = optuna.samplers.TPESampler(seed=derive_seed(seed, "search", begun) % 2**32)
    study.pruner = optuna.pruners.MedianPruner()
    return study


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a damaged storage into a `RunError`."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, _import_optuna().exceptions.StorageInternalError) as error:
        file = str(path / STORAGE_FILE)
        raise RunError(f"Optuna's storage cannot be used: {error}", file, "restore the file") from error


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        fix = "pip install 'ensemblekit[search]'"
        raise UsageError("a search needs Optuna, which is not installed", "--search", fix) from error
    return optuna
