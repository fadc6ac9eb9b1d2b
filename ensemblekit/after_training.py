"""The Python interface after training: calibrated probabilities, guarantees, fewer members, one network for all.

Everything is decided by validation data; test data only serves to report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ensemblekit.api import open_display, read, run_spec
from ensemblekit.core.plugin import Combination
from ensemblekit.display.progress import Progress
from ensemblekit.inference import calibrating, conforming, distillation
from ensemblekit.inference.budget import Budget
from ensemblekit.inference.calibrating import CalibrationResult
from ensemblekit.inference.conforming import ConformalResult
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.inference.pooling import check_distinct, read_pool
from ensemblekit.inference.selecting import Selection, SelectionRequest, select_members, write_selection
from ensemblekit.inference.selection import Search
from ensemblekit.inference.students import DistilledRun, distilled
from ensemblekit.members.python_model import NetworkLike, is_network, model_table
from ensemblekit.members.python_specs import PluginLike, registry_of
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.spec.reader import build_plugin


def calibrate(
    path: str | Path,
    method: str = "temperature",
    members: bool = False,
    data: Any = None,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
) -> CalibrationResult:
    """Calibrate the class probabilities of a run, fitted to its kept validation outputs.

    The calibration is kept in the run directory; everything that reads the run uses it from then on. Prediction sets of
    `conform` are fitted again.

    Args:
        path: the directory of a finished run.
        method: "temperature", "vector", "isotonic" or "beta".
        members: whether to fit a temperature to each member instead of one to the ensemble.
        data: the same data as for `train`, if the run was started with data from Python and has kept no outputs.
        plugins: plugin classes that the run uses, or local Python files with such classes.
        model: the same model as for `train`, if the run was started with a model from Python.

    Returns:
        NLL, ECE, Brier score and a reliability table before and after, the latter by cross-fitting; `to_dict()`.

    Raises:
        UsageError: the run has no validation data, or is a regression.
        DataError: there are too few validation samples, or samples of one class only.
        NumericError: an output is not finite.
        RunError: the run has not finished, is in use, or is damaged.
    """
    loader = RunLoader(RunDirectory.open(path), registry_of(plugins, model))
    return calibrating.calibrate_run(loader, method, members, data)


def undo_calibrate(
    path: str | Path, plugins: Iterable[PluginLike] = (), model: NetworkLike | None = None, data: Any = None
) -> bool:
    """Remove the calibration of a run; returns whether there was one. Arguments as for `calibrate`."""
    return calibrating.undo_calibration(RunLoader(RunDirectory.open(path), registry_of(plugins, model)), data)


def conform(
    path: str | Path,
    error: float = 0.1,
    score: str | None = None,
    data: Any = None,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
) -> ConformalResult:
    """Give a run prediction sets, or intervals in regression, that hold the truth with probability 1 - error.

    They are fitted to the kept validation outputs (split conformal prediction), after the calibration if there is one,
    and kept in the run directory: `predict`, `Ensemble.predict_sets` and `Ensemble.predict_interval` then give them.

    Args:
        path: the directory of a finished run.
        error: the probability of a miss, at most.
        score: for classes "lac" (the smallest sets; default), "aps" or "raps" (sets that adapt to the sample); for
            values "absolute" (intervals of one width; default) or "normalised" (wider where members disagree).
        data: the same data as for `train`, if the run was started with data from Python and has kept no outputs.
        plugins: plugin classes that the run uses, or local Python files with such classes.
        model: the same model as for `train`, if the run was started with a model from Python.

    Returns:
        The threshold, the expected coverage on new data and its deviation, and the mean size; `to_dict()`.

    Raises:
        UsageError: the run has no validation data, or too little for this error.
        DataError: there are validation samples of one class only.
        NumericError: an output is not finite.
        RunError: the run has not finished, is in use, or is damaged.
    """
    loader = RunLoader(RunDirectory.open(path), registry_of(plugins, model))
    return conforming.conform_run(loader, error, score, data)


def undo_conform(path: str | Path, plugins: Iterable[PluginLike] = (), model: NetworkLike | None = None) -> bool:
    """Remove the prediction sets or intervals of a run; returns whether there were any. Arguments as for `conform`."""
    return conforming.undo_conform(RunLoader(RunDirectory.open(path), registry_of(plugins, model)))


def select(
    paths: str | Path | Iterable[str | Path],
    members: int | None = None,
    out: str | Path | None = None,
    replace: bool = False,
    budget: str | None = None,
    search: Search = "auto",
    combiner: str | Mapping[str, Any] | None = None,
    plugins: Iterable[PluginLike] = (),
    model: NetworkLike | None = None,
) -> Selection:
    """Choose the best members of one run or of several, by their outputs on validation data, as a new run.

    Args:
        paths: directories of finished runs on the same data; their members are pooled. Methods and models may differ.
        members: how many to choose; with a budget or with `replace`, at most so many. Default: as many as have the
            lowest validation loss.
        out: the directory of the new run, which must be empty or not exist yet. Default: runs/selected-NUMBER with a
            free number.
        replace: pick members also more than once; the number of picks becomes the weight of a member. Only for the
            mean of outputs.
        budget: the most that the members may cost together: "50000parameters", or "5ms" of time for 1,000 predictions,
            measured here on the CPU.
        search: "greedy", "exhaustive", or "auto": exhaustive if there are at most 4,096 sets of members to
            try, and sets × validation samples × outputs are at most 10⁸.
        combiner: name or table of the combiner that members are chosen for. Default: as the runs combine theirs.
        plugins: plugin classes that the runs use, or local Python files with such classes.
        model: the same model as for `train`, if the runs were started with a model from Python.

    Returns:
        The selection: `run`, the `chosen` members, and `curve`, the validation loss for each number of members.

    Raises:
        RunError: there is no run, it has not finished, its files are damaged, or `out` cannot be used.
        UsageError: a run has no validation data, runs do not fit together, or their members cannot be chosen from.
        DataError: all validation samples are of one class.
        NumericError: outputs of a run are not finite.
    """
    registry = registry_of(plugins, model)
    listed = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    check_distinct(listed)
    chosen = None if combiner is None else build_plugin(Combination, combiner, registry)
    limit = None if budget is None else Budget.parse(budget)
    pool = read_pool([read(RunDirectory.open(path), registry) for path in listed], chosen)
    selected = select_members(pool, SelectionRequest(members, replace, limit, search), registry)
    directory = write_selection(selected, None if out is None else Path(out), registry)
    return selected.selection(read(directory, registry))


def distil(
    path: str | Path,
    model: NetworkLike,
    out: str | Path | None = None,
    temperature: float | None = None,
    labels_share: float | None = None,
    epochs: int | None = None,
    uncertainty: bool = False,
    baseline: bool = False,
    overrides: Mapping[str, Any] | None = None,
    data: Any = None,
    plugins: Iterable[PluginLike] = (),
    progress: bool | Progress = True,
    teacher_model: NetworkLike | None = None,
) -> DistilledRun:
    """Train one network to predict what the ensemble of a run predicts, as an ordinary run.

    Its spec is that of the run, with the method "distillation" and this model.

    Args:
        path: the directory of a finished run. The new run needs it until it has finished.
        model: the network, as for `train`.
        out: the directory of the new run. Default: runs/NAME-student-NUMBER, from the name of the run.
        temperature: temperature of both distributions. Default: 2.
        labels_share: weight of the true labels beside the ensemble's distribution. Default: 0.1.
        epochs: epochs of training. Default: those of the run.
        uncertainty: whether to learn also how the members disagree: the network gets one output layer for each of them,
            unless the model is a family, and is an ensemble of so many members.
        baseline: whether to train also the same network on the labels alone, in the directory `out`-baseline.
        overrides: values of the new spec by dotted path, such as ``{"training.batch_size": 32}``.
        data: the same data as for `train`, if the run was started with data from Python.
        plugins: as for `train`. Plugins of the run itself must be installed.
        progress: as for `train`.
        teacher_model: the model of the run, if it was started with a model from Python. The new run can then not be
            resumed if it is interrupted: distil again.

    Returns:
        The new run; `teacher` is the run of the ensemble, and `comparison` has the figures of both.

    Raises:
        RunError: the run has not finished, or its files are damaged.
        UsageError: the ensemble is not the mean of its members, or has no disagreement to learn.
        SpecError: the model is unknown or cannot take the inputs, or an override is invalid.
        DataError: the data is missing, or not what the run was trained on.
        PluginError: a plugin of the run is not installed.
    """
    registry = registry_of(plugins, model)
    # not with the student's network: it would be taken for that of the run, which has the same name in specs
    own_model = model if teacher_model is None and not is_network(model) else teacher_model
    with distillation.needs_teacher_model(path):
        teacher = read(RunDirectory.open(path), registry_of(plugins, own_model))
    distillation.check_teacher(teacher)
    if teacher_model is not None:
        registry = distillation.with_teacher_model(registry, teacher_model)
    changes = dict(overrides or {}) | ({} if epochs is None else {"training.epochs": epochs})
    given = {"temperature": temperature, "share": None if labels_share is None else 1 - labels_share}
    method = {key: value for key, value in given.items() if value is not None}
    table = model_table(model, registry)
    spec = distillation.student_spec(teacher, table, registry, method, uncertainty, changes)
    changes_data = any(key.partition(".")[0] == "data" for key in changes)
    spec, loaded = distillation.same_data(teacher, spec, data, only_train=changes_data)
    with open_display(progress) as display:
        student = run_spec(spec, registry, out, [display], loaded, f"{teacher.path.absolute().name}-student")
        other = None
        if baseline:
            beside = student.path.with_name(f"{student.path.name}-baseline")
            other = run_spec(distillation.labels_spec(spec, registry), registry, beside, [display], loaded)
    return distilled(student, teacher, other, loaded)
