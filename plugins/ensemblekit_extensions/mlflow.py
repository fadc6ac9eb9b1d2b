"""Runs in MLflow, in a local database or on a tracking server."""

from __future__ import annotations

import fcntl
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import Field, PrivateAttr

from ensemblekit_extensions.tracker import (
    FINAL,
    Row,
    TrackedRun,
    Tracker,
    error_text,
    flattened,
    missing_package,
    numbers,
)

STATUSES = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
MAX_PARAMETERS = 100
"""MLflow takes at most so many parameters or tags at once."""
MAX_LENGTH = 500
"""Longer values of parameters are cut: older servers refuse them. spec.toml among the artifacts has them all."""
SQLITE = "sqlite:///"
ERROR = "error"
"""The tag that says why a run was interrupted or failed."""


class MLflow(Tracker):
    """Logs runs to MLflow: spec, environment, metrics of every epoch, result and report.

    Without `tracking_uri`, MLflow's own settings such as MLFLOW_TRACKING_URI decide, and without these a database
    mlflow.db in the current directory. A resumed run continues the same MLflow run, whose id is kept in mlflow.json in
    the run directory. MLflow's usage statistics are not sent, unless you set MLFLOW_DISABLE_TELEMETRY=false.
    """

    experiment: str = Field("ensemblekit", min_length=1, description="experiment of the runs, created if it is missing")
    tracking_uri: str | None = Field(
        None, min_length=1, description='server or database, such as "sqlite:///mlflow.db"; default: MLflow\'s own'
    )
    run_name: str | None = Field(None, min_length=1, description="name of the run; default: that of the run directory")
    tags: dict[str, str] = Field({}, description="tags of the run by their names")
    report: bool = Field(True, description="keep the report page of a finished run as an artifact")

    _client: Any = PrivateAttr(None)
    _run_id: str = PrivateAttr("")
    _logged: dict[str, set[int]] = PrivateAttr(default_factory=dict)
    """By the name of a metric, the epochs that MLflow has."""
    _last_epoch: int = PrivateAttr(0)

    def check(self, is_resumed: bool) -> None:
        self._client, self._run_id = None, ""
        # it would connect to a server that nobody has named
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            import mlflow  # noqa: F401 - a missing package is found here, before anything is trained
        except ImportError as error:
            raise missing_package("mlflow", "mlflow", self.name) from error

    def open(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow import MlflowClient

        state = run.read_state("mlflow")
        uri = state.get("tracking_uri") or _absolute(self.tracking_uri or mlflow.get_tracking_uri())
        with _alone(uri):
            self._client = MlflowClient(uri)
        self._logged, self._last_epoch = defaultdict(set), 0
        before = self._continued(state.get("run_id"))
        if before is None:
            self._run_id = self._create(run)
            where = {"tracking_uri": uri} if _is_local(uri) else {}  # another address may contain a password
            run.write_state("mlflow", {"run_id": self._run_id, **where})
        self._log_parameters(run, {} if before is None else before.data.params)
        for name in ("spec.toml", "environment.json"):
            self._client.log_artifact(self._run_id, str(run.path / name))

    def _continued(self, run_id: str | None) -> Any:
        """Continue the MLflow run that was started before the run was interrupted; None if there is none."""
        from mlflow.exceptions import MlflowException

        if run_id is None:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # deleted since
                return None
            raise
        self._run_id = run_id
        self._client.update_run(run_id, status="RUNNING")
        if ERROR in run.data.tags:
            self._client.delete_tag(run_id, ERROR)
        for name in run.data.metrics:
            self._logged[name] = {metric.step for metric in self._client.get_metric_history(run_id, name)}
        return run

    def _create(self, run: TrackedRun) -> str:
        tags = {**self.tags, "ensemblekit.directory": str(run.path.absolute())}
        if run.sweep is not None:
            tags["ensemblekit.sweep"] = run.sweep
        created = self._client.create_run(
            self._experiment_id(), tags=tags, run_name=self.run_name or run.path.absolute().name
        )
        return str(created.info.run_id)

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self.experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self.experiment))
            except MlflowException:  # another run of the same sweep may have been faster
                found = self._client.get_experiment_by_name(self.experiment)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _log_parameters(self, run: TrackedRun, before: Mapping[str, str]) -> None:
        """Log the spec as parameters and the environment as tags.

        MLflow never changes a parameter: one that has changed since, because the run is trained further, is a tag.
        """
        from mlflow.entities import Param, RunTag

        spec = {key: _text(value) for key, value in flattened(run.spec).items()}
        parameters = [Param(key, value) for key, value in spec.items() if key not in before]
        changed = {key: value for key, value in spec.items() if before.get(key, value) != value}
        facts = {key: value for key, value in run.environment.items() if isinstance(value, str | int)}
        tags = [
            RunTag(key, _text(value)) for key, value in (*flattened(facts, "environment").items(), *changed.items())
        ]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + MAX_PARAMETERS])
        self._client.log_batch(self._run_id, tags=tags)

    def log(self, row: Row) -> None:
        self._last_epoch = row["epoch"]
        self._log_metrics(numbers(row))

    def _log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log metrics of the last epoch that MLflow does not have."""
        from mlflow.entities import Metric

        epoch, now = self._last_epoch, int(1000 * time.time())
        new = {name: value for name, value in metrics.items() if epoch not in self._logged[name]}
        self._client.log_batch(self._run_id, [Metric(name, value, now, epoch) for name, value in new.items()])
        for name in new:
            self._logged[name].add(epoch)

    def close(self, run: TrackedRun, status: str, metrics: Mapping[str, Any], error: BaseException | None) -> None:
        if not self._run_id:
            return
        try:
            if error is not None:
                self._client.set_tag(self._run_id, ERROR, _text(error_text(error)))
            if status == "finished":
                self._log_metrics({FINAL + name: value for name, value in numbers(metrics).items()})
                self._client.log_artifact(self._run_id, str(run.path / "result.json"))
                if self.report:
                    self._client.log_artifact(self._run_id, str(self.report_page(run)))
        finally:
            self._client.set_terminated(self._run_id, STATUSES[status])


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 1] + "…"


def _is_local(uri: str) -> bool:
    return uri.startswith((SQLITE, "file:", "/"))


def _absolute(uri: str) -> str:
    """Return the address of a database with an absolute path, so that the run can be resumed from anywhere."""
    path = uri.removeprefix(SQLITE)
    return SQLITE + os.path.abspath(path) if uri.startswith(SQLITE) and path and path != ":memory:" else uri


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Let one process at a time open a local database.

    MLflow creates the tables without a lock, and the first runs of a sweep start together.
    """
    path = uri.removeprefix(SQLITE)
    if path == uri or not os.path.isabs(path):
        yield
        return
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)  # which unlocks it
