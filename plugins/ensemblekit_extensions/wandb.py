"""Runs in Weights & Biases, online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from ensemblekit_extensions.tracker import FINAL, Row, TrackedRun, Tracker, error_text, missing_package, numbers

EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 255}
"""How W&B is told that a run has finished, failed or was killed; 255 is what it uses itself for Ctrl-C."""


class WandB(Tracker):
    """Logs runs to Weights & Biases: spec, environment, metrics of every epoch, result and report.

    Whether it connects to a server is decided by `mode`, else by W&B's own settings such as WANDB_MODE. A resumed run
    continues the same W&B run, whose id is kept in wandb.json in the run directory. Offline, W&B starts another local
    directory for it, which has all epochs: pass the newest one to `wandb sync`.
    """

    project: str = Field("ensemblekit", min_length=1, description="project of the runs")
    entity: str | None = Field(None, min_length=1, description="user or team; default: that of your W&B account")
    run_name: str | None = Field(None, min_length=1, description="name of the run; default: that of the run directory")
    group: str | None = Field(None, min_length=1, description="group of the run; default: the sweep it belongs to")
    tags: tuple[str, ...] = Field((), description="tags of the run")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        None, description="whether to connect to a server; default: as WANDB_MODE or W&B's settings say"
    )
    report: bool = Field(True, description="keep the report page of a finished run as an artifact")

    _log: Any = PrivateAttr(None)
    """The run in W&B."""
    _next_step: int = PrivateAttr(0)

    def check(self, is_resumed: bool) -> None:
        self._log = None
        try:
            import wandb  # noqa: F401 - a missing package is found here, before anything is trained
        except ImportError as error:
            raise missing_package("wandb", "wandb", self.name) from error

    def open(self, run: TrackedRun) -> None:
        import wandb

        known = run.read_state("wandb").get("run_id")
        is_offline = (self.mode or wandb.setup().settings.mode) == "offline"
        self._log = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.run_name or run.path.absolute().name,
            group=self.group or run.sweep,
            tags=self.tags,
            mode=self.mode,
            id=known,
            # an offline directory has all epochs: `wandb sync` then has to replace what it uploaded before
            resume=None if is_offline else "allow",
            reinit="create_new",  # a run that the user has opened is left alone
            settings=wandb.Settings(console="off"),  # the display of the run owns the terminal
        )
        if known is None and not self._log.disabled:
            run.write_state("wandb", {"run_id": self._log.id})
        # training a run further changes the number of epochs
        self._log.config.update({**run.spec, "environment": run.environment}, allow_val_change=True)
        self._next_step = self._log.step

    def log(self, row: Row) -> None:
        if row["epoch"] >= self._next_step:
            self._log.log(numbers(row), step=row["epoch"])
            self._next_step = row["epoch"] + 1

    def close(self, run: TrackedRun, status: str, metrics: Mapping[str, Any], error: BaseException | None) -> None:
        log, self._log = self._log, None
        if log is None:
            return
        try:
            log.summary.update({FINAL + name: value for name, value in numbers(metrics).items()})
            if error is not None or "error" in log.summary.keys():  # noqa: SIM118 - a summary is no mapping
                log.summary["error"] = "" if error is None else error_text(error)
            if status == "finished":
                self._keep_files(log, run)
        finally:
            log.finish(exit_code=EXIT_CODES[status])

    def _keep_files(self, log: Any, run: TrackedRun) -> None:
        import wandb

        artifact = wandb.Artifact(f"run-{log.id}", type="run")
        artifact.add_file(str(run.path / "spec.toml"))
        artifact.add_file(str(run.path / "result.json"))
        try:
            if self.report:
                artifact.add_file(str(self.report_page(run)))
        finally:
            log.log_artifact(artifact)
