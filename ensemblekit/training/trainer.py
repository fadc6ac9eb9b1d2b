"""The only training loop; a `Trainer` owns a run from its plan to its result. It knows no method, model or data set.

An epoch: life-cycle hooks, steps, evaluation, one line of metrics, one checkpoint. All randomness is a function of the
seed, the epoch and the step, so that a run that was stopped anywhere resumes from its last checkpoint and gives
bit-identical results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import Interrupted, UsageError
from ensemblekit.core.hookspecs import RunStatus
from ensemblekit.core.metrics import evaluate, flat_metrics, member_metrics
from ensemblekit.core.objective import Objective
from ensemblekit.core.registry import Registry
from ensemblekit.core.seeds import derive_seed
from ensemblekit.data.fingerprint import check_same_data
from ensemblekit.data.loading import Batch, Data, load_data
from ensemblekit.engines.base import Engine, EngineSettings
from ensemblekit.engines.selection import Work, check_engine, engine_class, fastest, measure_engines
from ensemblekit.members.growing import GrowingMembers
from ensemblekit.runs.checkpoints import Checkpoint
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.recorder import RunRecorder
from ensemblekit.spec.checks import check_data
from ensemblekit.spec.resolution import with_absolute_paths, with_loss_for
from ensemblekit.spec.sections import Spec
from ensemblekit.training.environment import choose_device, environment
from ensemblekit.training.interruption import StopRequest, stop_requests
from ensemblekit.training.plan import make_plan
from ensemblekit.training.statistics import EpochStatistics

CHECK_EVERY = 64
"""Steps between two checks for nan; each check synchronises with the device."""
EVALUATION_BYTES = 2**22
"""Size of the batches in evaluation, if that is more than a training batch."""


class Trainer:
    """Trains the ensemble of one spec in one run directory.

    Args:
        spec: what to train.
        directory: claimed for a new run, or an existing run that is locked.
        data: the data, if it is not the spec's.
        listeners: objects that follow the life cycle by hooks, such as a display.
        device: where to train, if not on the spec's device.

    Raises:
        UsageError: the spec cannot be trained on this data or on this machine.
    """

    def __init__(
        self,
        spec: Spec,
        directory: RunDirectory,
        data: Data | None = None,
        listeners: Iterable[object] = (),
        device: torch.device | None = None,
    ) -> None:
        self.started = time.perf_counter()
        self.device = device or choose_device(spec.engine.device)
        self.data = (data or load_data(spec.data, spec.seed)).to(self.device)
        spec = with_loss_for(spec, self.data.info.task)
        self.spec, self.directory = spec, directory
        self.splits = {"test": self.data.test}
        if self.data.validation is not None:
            self.splits["validation"] = self.data.validation
        self.recorder = RunRecorder(directory)
        self.objective = Objective(spec.methods, spec.loss, spec.extensions, [*listeners, self.recorder])
        self.hooks = self.objective.hooks
        self.settings = EngineSettings.of(spec, self.device, self.hooks.passes(spec.ensemble.members))
        self.members = GrowingMembers(spec, self.data.info, self.device)
        self.members.start(self.hooks.call.members_at_start(num_members=spec.ensemble.members))
        targets = self.data.train.targets
        weights = self.hooks.sample_weights(len(targets), spec.ensemble.members, spec.seed, targets.cpu())
        self.weights = None if weights is None else weights.to(self.device)
        self.batch_lengths = self.data.train.training_batch_lengths(spec.training.batch_size)
        self._check_supported()
        self.engine_name = spec.engine.name
        self.engine: Engine | None = None
        self.predictions: dict[str, Tensor] = {}
        """The members' outputs for a split, by its name; cleared when the members learn."""
        self.fitted: Tensor | None = None
        """The parameters of the combiner, fitted on the validation data at the last evaluation."""
        self.best_loss, self.evaluations_since_best = math.inf, 0
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
        self.member_metrics: list[dict[str, Any]] = []
        self.seconds = {"start": 0.0, "training": 0.0, "evaluation": 0.0, "checkpoints": 0.0}

    def _check_supported(self) -> None:
        if self.settings.passes is not None:
            self.members.check_stochastic()
        if self.hooks.fits_combiner and self.data.validation is None:
            what = "a method fits how members are combined on validation data, and there is none"
            raise UsageError(what, "data.validation_fraction", "set it to more than 0")
        self.members.check_supported(bf16=self.settings.bf16, single_samples=1 in self.batch_lengths)

    def train(self, registry: Registry) -> None:
        """Train from the beginning; `registry` knows the packages of the plugins.

        Raises:
            SpecError: the spec does not fit the loaded data.
        """
        check_data(self.spec, self.data.info)
        with self._life_cycle():
            seconds_per_step = self.choose_engine()
            chosen = {"name": self.engine_name, "device": str(self.device)}
            resolved = with_absolute_paths(replace(self.spec, engine=self.spec.engine.model_copy(update=chosen)))
            facts = {"device": str(self.device), "engine": self.engine_name, "engines_measured": seconds_per_step}
            facts["data"] = self.data.fingerprint
            self.directory.begin(resolved.to_toml(), {**environment(self.spec, registry), **facts})
            self._run(start_epoch=0)

    def resume(self) -> None:
        """Continue from the last checkpoint to the end; a run that was stopped before the first one starts again."""
        recorded = self.directory.environment.get("data")
        check_same_data(recorded, self.data.fingerprint, self.spec.data.name)
        if recorded is None:
            self.directory.update_environment(data=self.data.fingerprint)
        if self.directory.has_saved_nothing:
            start_epoch, row = 0, "started again: it was stopped before its first checkpoint"
        else:
            checkpoint = self.directory.load_checkpoint()
            self.restore(checkpoint)
            self.history = self.directory.truncate_metrics(checkpoint.epoch)
            start_epoch, row = checkpoint.epoch, f"resumed from epoch {checkpoint.epoch}"
        self.directory.write_status("running")
        with self._life_cycle(("resume", row)):
            for text in self.directory.damage:
                self.hooks.call.notice(text=text)
            self.choose_engine()
            self._run(start_epoch)

    @contextmanager
    def _life_cycle(self, *rows: tuple[str, str]) -> Iterator[None]:
        """Announce the run, and its end however it ends; `rows` are added to the plan."""
        plan = [*make_plan(self.spec, self.data, self.members.states), ("out", str(self.directory.path)), *rows]
        try:
            self.hooks.call.run_started(spec=self.spec, path=self.directory.path, plan=plan)
            yield
        except BaseException as error:
            interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
            self._announce_end("interrupted" if interrupted else "failed", error)
            raise
        finally:
            if self.engine is not None:
                self.engine.close()
        self.hooks.call.run_finished(metrics=self.metrics)
        self._announce_end("finished", None)

    def _announce_end(self, status: RunStatus, error: BaseException | None) -> None:
        self.hooks.call.run_ended(
            status=status, metrics=self.metrics, members=self.member_metrics, seconds=self.seconds, error=error
        )

    def choose_engine(self) -> dict[str, float]:
        """Choose the engine, by measuring if the spec says "auto"; returns the measured seconds per step."""
        states, seconds_per_step = self.members.states, {}
        if self.engine_name == "auto":
            batches = self.data.train.training_batches(self.spec.training.batch_size, self.spec.seed, epoch=1)
            batch = next(iter(batches))
            weights = self._weights(batch, [state.seed_index for state in states])
            seconds_per_step = measure_engines(Work(states, self.objective, self.settings, batch, weights))
            self.engine_name = fastest(seconds_per_step)
        check_engine(self.engine_name, states, self.settings)
        self.hooks.call.engine_chosen(engine=self.engine_name, seconds_per_step=seconds_per_step)
        return seconds_per_step

    def _run(self, start_epoch: int) -> None:
        """Train all epochs after `start_epoch`, each with a checkpoint, and write the result."""
        settings = self.spec.training
        self.seconds["start"] = time.perf_counter() - self.started
        with stop_requests() as stop:
            if start_epoch == 0:
                self._save_checkpoint(0, is_best=False)
            devices = () if self.device.type == "cpu" else (self.device,)
            for epoch in range(start_epoch + 1, settings.epochs + 1):
                if settings.patience is not None and self.evaluations_since_best >= settings.patience:
                    break
                with torch.random.fork_rng(devices=devices):
                    row = self._epoch(epoch, stop)
                is_best = self._is_best(row)
                self.history.append(row)
                self.hooks.call.epoch_finished(epoch=epoch, num_epochs=settings.epochs, metrics=row)
                self._save_checkpoint(epoch, is_best)
            if settings.keep == "best" and self.data.validation is not None:
                self.restore(self.directory.load_checkpoint(best=True))
            self._finish()

    def _epoch(self, epoch: int, stop: StopRequest) -> dict[str, Any]:
        """Train one epoch and evaluate it; returns its metrics."""
        num_epochs, num_steps = self.spec.training.epochs, len(self.batch_lengths)
        if self.engine is not None:
            self.engine.store_optimizer_state()
        self.hooks.call.epoch_started(
            ensemble=self.members,
            epoch=epoch,
            num_epochs=num_epochs,
            num_members=self.spec.ensemble.members,
            num_steps=num_steps,
        )
        engine = self.current_engine()
        self.predictions.clear()
        # for networks that use torch's global generator; stochastic layers of this project do not
        torch.manual_seed(derive_seed(self.spec.seed, "epoch", epoch))
        with self._clock("training") as training:
            statistics = self._steps(engine, epoch, stop)
        row = {"epoch": epoch, **statistics}
        row["images_per_second"] = len(self.data.train) / training.seconds
        row["seconds"] = training.seconds
        if epoch % self.spec.training.evaluate_every == 0 or epoch == num_epochs:
            with self._clock("evaluation") as evaluation:
                row |= self._evaluate()
            row["seconds"] += evaluation.seconds
        return row

    def _steps(self, engine: Engine, epoch: int, stop: StopRequest) -> dict[str, float]:
        """Train all steps of an epoch; returns their means."""
        members = [state.seed_index for state in engine.active_members]
        statistics = EpochStatistics(self.objective, members)
        num_steps = len(self.batch_lengths)
        rate = 0.0
        batches = self.data.train.training_batches(self.spec.training.batch_size, self.spec.seed, epoch)
        for step, batch in enumerate(batches):
            if stop.signal_number is not None:
                raise self._interrupted(epoch - 1, stop)
            rate = self._learning_rate(epoch - 1 + step / num_steps)
            run_step = (epoch - 1) * num_steps + step
            value, outputs = engine.train_step(batch, self._weights(batch, members), rate, run_step)
            statistics.add(value, outputs, batch)
            if (step + 1) % CHECK_EVERY == 0:
                statistics.check_finite(epoch, self.directory.path)
            self.hooks.call.step_finished(
                epoch=epoch,
                step=step + 1,
                num_steps=num_steps,
                num_samples=len(batch.index),
                objective=value,
                learning_rate=rate,
            )
        statistics.check_finite(epoch, self.directory.path)
        return {**statistics.means(), "learning_rate": rate}

    def current_engine(self) -> Engine:
        """Return the engine for the current members; a new one if they have changed."""
        if self.engine is not None:
            if not self.members.changed:
                return self.engine
            self.engine.close()
        self.engine = engine_class(self.engine_name)(self.members.states, self.objective, self.settings)
        self.members.changed = False
        return self.engine

    def _learning_rate(self, epoch: float) -> float:
        num_epochs, base = self.spec.training.epochs, self.spec.optimizer.learning_rate
        rate = self.hooks.learning_rate(base, epoch, num_epochs)
        return base * self.spec.schedule.factor(epoch, num_epochs) if rate is None else rate

    def _weights(self, batch: Batch, members: list[int]) -> Tensor | None:
        return None if self.weights is None else self.weights[batch.index][:, members]

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics on validation and test data."""
        metrics = {}
        if "validation" in self.splits:
            self._fit_combiner()
            metrics = {f"validation_{name}": value for name, value in self._metrics("validation").items()}
        return flat_metrics(self._metrics("test")) | metrics

    def _fit_combiner(self) -> None:
        """Fit on the validation data how members are combined, on the means over stochastic passes."""
        outputs = self._outputs("validation").unflatten(0, (self.settings.passes or 1, -1)).mean(dim=0)
        self.fitted = self.hooks.fit_combiner(outputs, self.splits["validation"].targets, self.objective.loss)

    def _metrics(self, split: str) -> dict[str, float]:
        outputs = self._outputs(split)
        combined = self.objective.combine(outputs, self.fitted, self.settings.passes or 1)
        return evaluate(outputs, self.splits[split].targets, self.spec.loss, combined, self.data.restore_targets)

    def _outputs(self, split: str) -> Tensor:
        """Return the members' outputs (M, N, C) for a split, computed once until the members learn."""
        if split not in self.predictions:
            engine = self.current_engine()
            large_batch = EVALUATION_BYTES // (4 * math.prod(self.data.info.input_shape))
            batches = self.splits[split].batches(max(self.spec.training.batch_size, large_batch))
            self.predictions[split] = torch.cat([engine.predict(batch.inputs) for batch in batches], dim=1)
        return self.predictions[split]

    def _is_best(self, row: Mapping[str, Any]) -> bool:
        """Whether this is the best epoch so far, by validation loss."""
        loss = row.get("validation_loss")
        if loss is None:
            return False
        if loss < self.best_loss:
            self.best_loss, self.evaluations_since_best = loss, 0
            return True
        self.evaluations_since_best += 1
        return False

    def _save_checkpoint(self, epoch: int, is_best: bool) -> None:
        with self._clock("checkpoints"):
            if self.engine is not None:
                self.engine.store_optimizer_state()
            state = {
                "members": self.members.state(),
                "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
                "since_best": self.evaluations_since_best,
            }
            self.directory.save_checkpoint(Checkpoint(epoch, self.members.tensors(), state), best=is_best)
        self.hooks.call.checkpoint_saved(epoch=epoch, path=self.directory.path)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore members and training state from a checkpoint."""
        self.members.restore(checkpoint.tensors, checkpoint.state["members"])
        self.predictions.clear()
        best_loss = checkpoint.state["best_loss"]
        self.best_loss = math.inf if best_loss is None else best_loss
        self.evaluations_since_best = checkpoint.state["since_best"]

    def _finish(self) -> None:
        """Evaluate the trained ensemble, and write the model and the result."""
        with self._clock("evaluation"):
            if self.hooks.fits_combiner:
                self._fit_combiner()
            self.metrics = flat_metrics(self._metrics("test"))
            targets = self.splits["test"].targets
            self.member_metrics = member_metrics(
                self._outputs("test"), targets, self.spec.loss, self.data.restore_targets
            )
        for index, entry in enumerate(self.member_metrics):
            number, network = divmod(index, len(self.members))
            if (self.settings.passes or 1) > 1:
                entry |= {"network": network, "pass": number}
            state = self.members.states[network]
            entry |= {"parameters": state.num_parameters, "frozen": state.frozen}
        combiner = {} if self.fitted is None else {"combiner": self.fitted}
        self.directory.write_model(self.members.network_tensors() | combiner, self._model_metadata())
        self.directory.update_environment(seconds=self.seconds)
        result = {"metrics": self.metrics, "members": self.member_metrics, "epochs": len(self.history)}
        result["notices"] = list(self.recorder.notices)
        self.directory.write_result(result)

    def _model_metadata(self) -> Mapping[str, Any]:
        info, transform, scaling = self.data.info, self.data.test.transform, self.data.target_scaling
        return {
            "task": info.task,
            "input_shape": list(info.input_shape),
            "num_outputs": info.num_outputs,
            "classes": list(self.data.classes) if self.data.classes else None,
            "members": [state.seed_index for state in self.members.states],
            "transform": transform.to_json() if transform is not None else None,
            "target_scaling": scaling.to_json() if scaling is not None else None,
            "preparation": self.data.preparation,
        }

    def _interrupted(self, epoch: int, stop: StopRequest) -> Interrupted:
        path = self.directory.path
        fix = f"continue with: ensemblekit resume {path}"
        return Interrupted(f"saved at epoch {epoch}", str(path), fix, exit_code=stop.exit_code)

    @contextmanager
    def _clock(self, activity: str) -> Iterator[Elapsed]:
        """Add the time of a block to the seconds of an activity."""
        elapsed = Elapsed()
        start = time.perf_counter()
        yield elapsed
        elapsed.seconds = time.perf_counter() - start
        self.seconds[activity] += elapsed.seconds


@dataclass
class Elapsed:
    """The duration of a block, once it has ended."""

    seconds: float = 0.0
