"""The only training loop; a `Trainer` owns a run from its plan to its result. It knows no method, model or data set.

An epoch: life-cycle hooks, steps, evaluation, one line of metrics, one checkpoint; long epochs have checkpoints inside.
All randomness is a function of the seed, the epoch and the step, so that a run that was stopped anywhere resumes from
its last checkpoint and gives bit-identical results.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import Interrupted, UsageError
from ensemblekit.core.hookspecs import RunStatus
from ensemblekit.core.objective import Moment
from ensemblekit.core.out_of_fold import OUT_OF_FOLD, fold_weights
from ensemblekit.core.registry import Registry
from ensemblekit.core.seeds import derive_seed
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.data.fingerprint import check_same_data
from ensemblekit.data.loading import Batch, Data, load_data
from ensemblekit.data.weighting import weighted_by_class
from ensemblekit.engines.base import Engine, predicts
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.engines.together import SharedStack
from ensemblekit.members.growing import GrowingMembers
from ensemblekit.members.layout import run_objective
from ensemblekit.ranks.group import ALONE, Group
from ensemblekit.ranks.session import launch
from ensemblekit.runs.checkpoints import Checkpoint
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.manifests import Position
from ensemblekit.runs.recorder import RunRecorder
from ensemblekit.spec.checks import check_data
from ensemblekit.spec.resolution import with_absolute_paths, with_loss_for
from ensemblekit.spec.sections import Spec
from ensemblekit.training import finishing
from ensemblekit.training.busy_machine import BusyMachine
from ensemblekit.training.checks import (
    check_members,
    check_methods,
    check_settings,
    check_tensors,
    check_weights_count,
    settings_notices,
)
from ensemblekit.training.cooperation import (
    check_alike,
    check_generators,
    check_same_checkpoint,
    check_shared,
    network_ranks,
    rank_device,
)
from ensemblekit.training.engine_in_use import EngineInUse
from ensemblekit.training.environment import choose_device, environment, machine_facts
from ensemblekit.training.evaluation import Evaluator
from ensemblekit.training.fitting import fit_members, look_up_outputs
from ensemblekit.training.interruption import StopRequest
from ensemblekit.training.leakage import check_no_leakage
from ensemblekit.training.life_cycle import (
    SAMPLE_WEIGHTS,
    EnsembleInTraining,
    method_tensors,
    method_values,
    restore_methods,
)
from ensemblekit.training.meetings import Meetings
from ensemblekit.training.model_selection import ModelSelection
from ensemblekit.training.partial_epoch import restore_epoch
from ensemblekit.training.plan import make_plan
from ensemblekit.training.resuming import machine_notices, recorded_threads
from ensemblekit.training.saving import Saver
from ensemblekit.training.statistics import EpochStatistics
from ensemblekit.training.stopwatch import Stopwatch
from ensemblekit.training.unbounded import UnboundedObjective

CHECK_EVERY = 64
"""Steps between two checks for nan; each check synchronises with the device."""
MAX_KNOWN_BYTES = 2**28
"""Outputs of a frozen member for the training data are computed once up to this size, and else in every step."""


Steps = Generator[int, None, None]
"""A run in training, which yields before each step the number of steps so far."""


def finish(steps: Steps) -> None:
    """Train a run to its end."""
    try:
        for _ in steps:
            pass
    except KeyboardInterrupt as error:  # a signal may have come between two steps: the run has to know of it too
        steps.throw(error)


class Trainer:
    """Trains the ensemble of one spec in one run directory.

    Args:
        spec: what to train.
        directory: claimed for a new run, or an existing run that is locked.
        data: the data, if it is not the spec's.
        listeners: objects that follow the life cycle by hooks, such as a display.
        device: where to train, if not on the spec's device.
        stop: asks training to stop; it is looked at before every step and every batch of an evaluation.
        group: the processes that train the ensemble together; each has a `Trainer`.
        shared: the stack in which the run is trained together with others.

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
        stop: StopRequest | None = None,
        group: Group = ALONE,
        shared: SharedStack | None = None,
    ) -> None:
        self.started = time.perf_counter()
        self.group = group
        self.device = rank_device(device or choose_device(spec.engine.device), group)
        loaded = data or load_data(spec.data, spec.seed)
        weighted = weighted_by_class(loaded, spec.training.class_weights)
        self.data = weighted.mixed_by(spec.mix).to(self.device)
        spec = with_loss_for(spec, self.data.info.task)
        check_alike(spec, self.data, self.device, group)
        self.spec, self.directory = spec, directory
        self.stop = stop or StopRequest()
        if not group.is_alone:
            group.gives_up = lambda: self.stop.signal_number is not None
        self.meetings = Meetings(group, self.stop)
        self.recorder = RunRecorder(directory)
        self.methods = [method.model_copy(deep=True) for method in spec.methods]
        """Those of the spec, copied: they may remember something, and a spec may be trained several times."""
        logged = spec if group.is_first else replace(spec, extensions=())
        self.objective = run_objective(logged, self.data.info, self.methods, [*listeners, self.recorder])
        self.hooks = self.objective.hooks
        ranks = network_ranks(spec, self.data.info, self.device, group)
        keep_start = self.objective.members.need_start
        self.members = GrowingMembers(spec, self.data.info, self.device, keep_start, group, ranks)
        passes, width = self.hooks.passes(spec.ensemble.members), self.members.layout.width
        self.settings = EngineSettings.of(spec, self.device, passes, width, len(self.data.train), group)
        self.members.start(self.hooks.call.members_at_start(num_members=spec.ensemble.members))
        # the targets as they were loaded: on the CPU, where weights are sampled
        targets = loaded.train.targets
        weights = self.hooks.sample_weights(len(targets), spec.ensemble.members, spec.seed, targets)
        self.weights = None if weights is None else weights.to(self.device)
        self.weights_were_set = False
        """Whether a method has set them since."""
        self.batch_lengths = self.data.train.training_batch_lengths(spec.training.batch_size)
        self._check_supported()
        self.ensemble = EnsembleInTraining(self)
        num_steps = spec.training.epochs * len(self.batch_lengths)
        trained = (self.members, self.objective, self.settings)
        self.engine = EngineInUse(spec.engine.name, *trained, self._first_batch, num_steps, shared)
        self.evaluator = Evaluator(spec, self.data, self.objective, self.engine.current)
        self.selection = ModelSelection(spec.training.patience)
        self.busy_machine, self.unbounded = BusyMachine(self.device), UnboundedObjective(self.objective.separable)
        followers = [*self.methods, *spec.extensions]
        self.steps_are_followed = any("step_finished" in implemented_hooks(type(plugin)) for plugin in followers)
        self.clock = Stopwatch()
        self.saver = Saver(self)
        self.partial: Checkpoint | None = None
        """The checkpoint inside an epoch that the run is resumed from, until that epoch goes on."""
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}
        self.member_metrics: list[dict[str, Any]] = []

    def _check_supported(self) -> None:
        if self.settings.passes is not None:
            self.members.check_stochastic()
        if self.objective.final_hooks.fits_combiner and self.data.validation is None:
            what = "a method fits how members are combined on validation data, and there is none"
            raise UsageError(what, "data.validation_fraction", "set it to more than 0")
        self.members.check_supported(bf16=self.settings.bf16, single_samples=1 in self.batch_lengths)
        check_members(self.spec, self.objective, self.settings.passes)
        check_generators(self.members.networks, self.group)

    def train(self, registry: Registry) -> None:
        """Train from the beginning; `registry` knows the packages of the plugins.

        Raises:
            SpecError: the spec does not fit the loaded data.
        """
        finish(self.training_steps(registry))

    def training_steps(self, registry: Registry) -> Steps:
        """Train like `train`, and yield before each step: runs that share a stack are trained step by step."""
        check_data(self.spec, self.data.info)
        check_settings(self.spec, self.data)
        batch, weights = self._first_batch()
        check_methods(self.spec, self.objective, batch)
        check_weights_count(self.objective, batch, weights)
        if self.spec.data.folds is not None:
            all_weights = self._weights(batch, list(range(self.spec.ensemble.members)))
            check_no_leakage(self.spec, self.objective, self.members.states, batch, all_weights)
        with self._life_cycle():
            for text in settings_notices(self.spec, self.data):
                self.hooks.call.notice(text=text)
            self.fit_members()
            seconds_per_step = self.engine.choose()
            chosen = {"name": self.engine.name, "device": str(self.device)}
            resolved = with_absolute_paths(replace(self.spec, engine=self.spec.engine.model_copy(update=chosen)))
            facts = {"device": str(self.device), "engine": self.engine.name, "engines_measured": seconds_per_step}
            facts |= {"data": self.data.fingerprint, **self.members.whereabouts}
            if not self.group.is_alone:
                facts["launch"] = sorted(launch())
            with self.stop.awaited():
                self.directory.begin(resolved.to_toml(), {**environment(self.spec, registry), **facts})
                check_shared(self.directory.path, self.group)
                self.saver.save(0)
                yield from self._run()

    def check_same_data(self) -> None:
        """Raise a `DataError` unless the data is that of the run in the directory."""
        check_same_data(self.directory.environment.get("data"), self.data.fingerprint, self.spec.data.name)

    def check_restorable(self) -> None:
        """Raise a `RunError` if the last checkpoint cannot be used, or if its tensors are not those of the members."""
        if not self.directory.has_saved_nothing:
            self.restore(self.directory.load_checkpoint())

    def resume(self) -> None:
        """Continue from the last checkpoint to the end; a run that was stopped before the first one starts again.

        torch uses as many threads as when the run was started, where it can.
        """
        finish(self.resumed_steps())

    def resumed_steps(self) -> Steps:
        """Continue like `resume`, and yield before each step."""
        self.check_same_data()
        recorded = self.directory.environment
        starts_again = self.directory.has_saved_nothing
        row = "started again: it was stopped before its first checkpoint" if starts_again else self._restore_last()
        self.directory.write_status("running")
        with recorded_threads(recorded), self._life_cycle(("resume", row)):
            for text in (*self.directory.damage, *machine_notices(recorded)):
                self.hooks.call.notice(text=text)
            for text in self.engine.choose_again(recorded):
                self.hooks.call.notice(text=text)
            facts = {"epoch": self.saver.last.epoch, "step": self.saver.last.step, "engine": self.engine.name}
            facts |= {"device": str(self.device), **machine_facts(), **self.members.whereabouts}
            resumed = [*recorded.get("resumed", ()), facts]
            self.directory.update_environment(data=self.data.fingerprint, resumed=resumed)
            check_shared(self.directory.path, self.group)
            with self.stop.awaited():
                if starts_again:
                    self.saver.save(0)
                yield from self._run()

    def _restore_last(self) -> str:
        """Restore everything from the last checkpoint; says from which."""
        rejoins = self.group.rejoins
        checkpoint = self.directory.load_checkpoint(last=Position(rejoins.epoch, rejoins.step) if rejoins else None)
        self.restore(checkpoint)
        self.partial = checkpoint if checkpoint.step else None
        self.saver.has_saved(checkpoint.position)
        self.clock.seconds |= checkpoint.state.get("seconds", {})
        if checkpoint.epoch == self.directory.continued_from:
            self.selection.evaluations_since_best = 0
        check_same_checkpoint(checkpoint.position, self.group)  # before the first rank removes others
        self.history = self.group.first(self.directory.truncate_metrics(checkpoint.epoch))
        return f"resumed from {checkpoint.position}"

    @contextmanager
    def _life_cycle(self, *rows: tuple[str, str]) -> Iterator[None]:
        """Announce the run, and its end however it ends; `rows` are added to the plan."""
        plan = [
            *make_plan(self.spec, self.data, self.members.networks, self.settings.passes),
            ("out", str(self.directory.path)),
            *rows,
        ]
        try:
            self.hooks.call.run_started(spec=self.spec, path=self.directory.path, plan=plan)
            yield
        except BaseException as error:
            interrupted = isinstance(error, Interrupted | KeyboardInterrupt)
            self._announce_end("interrupted" if interrupted else "failed", error)
            raise
        finally:
            self.engine.close()
        self.hooks.announce("run_finished", metrics=self.metrics)
        self._announce_end("finished", None)

    def _announce_end(self, status: RunStatus, error: BaseException | None) -> None:
        self.hooks.announce(
            "run_ended",
            status=status,
            metrics=self.metrics,
            members=self.member_metrics,
            seconds=self.clock.seconds,
            error=error,
        )

    def _first_batch(self) -> tuple[Batch, Tensor | None]:
        """Return a batch for trials, and the weights of its samples for the current members."""
        batches = self.data.train.training_batches(self.spec.training.batch_size, self.spec.seed, epoch=1)
        batch = next(iter(batches))
        return batch, self._weights(batch, [index for state in self.members.states for index in state.indices])

    def fit_members(self) -> None:
        """Fit the members that are fitted once and not trained, and look up outputs that are known."""
        splits = {"train": self.data.train, "validation": self.data.validation, "test": self.data.test}
        fit_members(self.members.states, splits, self.weights, self.spec)

    def _run(self) -> Steps:
        """Train all epochs that are left, each with a checkpoint, and write the result."""
        num_epochs = self.spec.training.epochs
        self.group.saved(self.saver.last.epoch, self.saver.last.step)
        self.clock.seconds["start"] += time.perf_counter() - self.started
        devices = () if self.device.type == "cpu" else (self.device,)
        for epoch in range(self.saver.last.epoch + 1, num_epochs + 1):
            if self.selection.is_exhausted:
                break
            with torch.random.fork_rng(devices=devices):
                row = yield from self._epoch(epoch)
            is_best = self.selection.is_best(row)
            self.history.append(row)
            self.hooks.announce("epoch_finished", epoch=epoch, num_epochs=num_epochs, metrics=row)
            if text := self.unbounded.notice(row):
                self.hooks.call.notice(text=text)
            self.saver.save(epoch, is_best)
        self._finish()

    def _epoch(self, epoch: int) -> Generator[int, None, dict[str, Any]]:
        """Train one epoch, or what is left of it, and evaluate it; returns its metrics."""
        statistics, engine = self._start_epoch(epoch)
        with self.clock.measure("training") as statistics.elapsed:
            rate = yield from self._steps(engine, epoch, statistics)
            self._end_epoch(epoch, statistics)
        seconds = statistics.seconds
        row = {"epoch": epoch, **statistics.means(), "learning_rate": rate}
        row |= {"samples_per_second": len(self.data.train) / seconds, "seconds": seconds}
        check_tensors(self.members.network_tensors(), f"epoch {epoch}, step {statistics.num_steps}", self.saver.kept)
        if epoch % self.spec.training.evaluate_every == 0 or epoch == self.spec.training.epochs:
            self.evaluator.where = f"epoch {epoch}; {self.saver.kept}"
            self.evaluator.before_batch = lambda: self._stop_if_asked(epoch, statistics)
            with self.clock.measure("evaluation") as evaluation:
                row |= self.evaluator.all_metrics()
            row["seconds"] += evaluation.seconds
        return row

    def _start_epoch(self, epoch: int) -> tuple[EpochStatistics, Engine]:
        """Prepare the members, the random numbers and the statistics of an epoch, or restore them in its middle."""
        partial, self.partial = self.partial, None
        self.engine.store_optimizer_state()
        arguments = self._epoch_arguments(epoch)
        if partial is None:
            self.hooks.call.epoch_started(**arguments)
        else:  # the methods have prepared the epoch before it was interrupted
            self.hooks.call_observers("epoch_started", **arguments)
        engine = self.engine.current()
        if not self.data.train.is_augmented:
            batch_size = self.evaluator.batch_size
            engine.remember("train", lambda: self.data.train.batches(batch_size), MAX_KNOWN_BYTES)
        self.evaluator.forget()
        # for networks that use torch's global generator; stochastic layers of this project do not
        torch.manual_seed(derive_seed(self.spec.seed, "epoch", epoch))
        statistics = EpochStatistics(self.objective, engine.columns, engine.indices, engine)
        if partial is not None:
            restore_epoch(statistics, partial.tensors, partial.state, self.device)
        if not statistics.is_over:  # after the last step, methods may leave only members that are frozen
            self.members.check_learning(epoch)
        return statistics, engine

    def _epoch_arguments(self, epoch: int) -> dict[str, Any]:
        arguments = {"ensemble": self.ensemble, "num_members": self.spec.ensemble.members, "epoch": epoch}
        return arguments | {"num_epochs": self.spec.training.epochs, "num_steps": len(self.batch_lengths)}

    def _end_epoch(self, epoch: int, statistics: EpochStatistics) -> None:
        """Let methods change the ensemble after the last step, unless they have before the run was interrupted."""
        if self.hooks.is_implemented("epoch_trained") and not statistics.is_over:
            self.engine.store_optimizer_state()
            self.hooks.call.epoch_trained(**self._epoch_arguments(epoch))
            self.evaluator.forget()
        statistics.is_over = True

    def _steps(self, engine: Engine, epoch: int, statistics: EpochStatistics) -> Generator[int, None, float]:
        """Train the steps of an epoch that are left, and yield the number of each; returns the last learning rate."""
        num_steps, first, members = len(self.batch_lengths), statistics.num_steps, statistics.member_indices
        seed, batch_size, num_epochs = self.spec.seed, self.spec.training.batch_size, self.spec.training.epochs
        batches = self.data.train.training_batches(batch_size, seed, epoch, first_step=first)
        rate = self._learning_rate(epoch - 1 + max(first - 1, 0) / num_steps)
        for step, batch in enumerate(batches, start=first):
            run_step = (epoch - 1) * num_steps + step
            self.meetings.meet(run_step, batch, self.saver.is_due)
            self._stop_if_asked(epoch, statistics)
            rate = self._learning_rate(epoch - 1 + step / num_steps)
            moment = Moment(epoch, num_epochs, run_step / (num_steps * num_epochs))
            weights = self._weights(batch, members)
            engine.prepare_step(batch, weights, rate, run_step, moment)
            yield run_step
            with self.busy_machine.step(engine):
                value, outputs = engine.train_step(batch, weights, rate, run_step, moment)
            statistics.add(value, outputs, batch)
            if (step + 1) % CHECK_EVERY == 0:
                statistics.check_finite(epoch, self.saver.kept)
            self.hooks.call.step_finished(
                epoch=epoch,
                step=step + 1,
                num_steps=num_steps,
                num_samples=len(batch.index),
                objective=statistics.last_objective if self.steps_are_followed else value,
                learning_rate=rate,
            )
            if text := self.busy_machine.notice(engine):
                self.hooks.call.notice(text=text)
            if step + 1 < num_steps and self.meetings.must_save(self.saver.is_due):
                self.saver.save_within(statistics, epoch)
        statistics.check_finite(epoch, self.saver.kept)
        return rate

    def _stop_if_asked(self, epoch: int, statistics: EpochStatistics | None = None) -> None:
        """Save and raise `Interrupted` if a signal has come in an epoch; without statistics everything is saved."""
        if not self.meetings.must_stop:
            return
        if statistics is not None and statistics.num_steps:
            self.saver.save_within(statistics, epoch)
        path = self.directory.path
        fix = f"continue with: ensemblekit resume {path}"
        raise Interrupted(f"saved at {self.saver.last}", str(path), fix, exit_code=self.stop.exit_code)

    def _learning_rate(self, epoch: float) -> float:
        num_epochs, base = self.spec.training.epochs, self.spec.optimizer.learning_rate
        rate = self.hooks.learning_rate(base, epoch, num_epochs)
        return base * self.spec.schedule.factor(epoch, num_epochs) if rate is None else rate

    def _weights(self, batch: Batch, members: list[int]) -> Tensor | None:
        """Return the sample weights (B, M) of members: those of methods, and 0 for the fold that is left out."""
        weights = None if self.weights is None else self.weights[batch.index][:, members]
        folds, num_folds = self.data.train.folds, self.spec.data.folds
        if folds is None or num_folds is None:
            return weights
        indices = torch.tensor(members, device=folds.device)
        own = fold_weights(folds[batch.index], indices, num_folds, batch.partner)
        return own if weights is None else weights * own

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, beside that of the members."""
        methods = method_values(self.methods)
        rest = {"methods": methods} if methods else {}
        return {**self.selection.state(), "seconds": dict(self.clock.seconds), **rest}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: those of the members and of the methods, and weights that were set."""
        weights = {SAMPLE_WEIGHTS: self.weights} if self.weights_were_set and self.weights is not None else {}
        return self.group.gather_tensors(self.members.tensors()) | method_tensors(self.methods) | weights

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore members and training state from a checkpoint."""
        self.members.restore(checkpoint.tensors, checkpoint.state["members"])
        restore_methods(self.methods, checkpoint.tensors, checkpoint.state.get("methods", {}))
        if SAMPLE_WEIGHTS in checkpoint.tensors:
            self.weights, self.weights_were_set = checkpoint.tensors[SAMPLE_WEIGHTS].to(self.device), True
        splits = {"train": self.data.train, "validation": self.data.validation, "test": self.data.test}
        look_up_outputs(self.members.states, splits, self.spec.loss)
        self.evaluator.forget()
        self.selection.restore(checkpoint.state)

    def _finish(self) -> None:
        """Keep the best weights if asked to, evaluate the trained ensemble, and write the model and the result."""
        settings, epochs = self.spec.training, self.saver.last.epoch
        stopped_early = self.selection.is_exhausted and epochs < settings.epochs
        if stopped_early:
            self.hooks.call.notice(text=finishing.stopped_early_text(epochs, settings.patience or 0))
        if settings.keep == "best" and self.data.validation is not None:
            self.group.first(None)  # the first rank has written it
            best = self.directory.load_checkpoint(best=True)
            self.restore(best)
            if best.epoch != epochs:
                self.hooks.call.notice(text=finishing.kept_best_text(best.epoch, self.selection.best_loss))
        if self.group.keeps_journal:
            self.evaluator.forget()  # a rank that is started again knows no outputs either
        self.evaluator.where = self.saver.kept
        self.evaluator.before_batch = lambda: self._stop_if_asked(epochs)
        with self.clock.measure("evaluation"):
            check_tensors(self.members.network_tensors(), "the last step", self.saver.kept)
            metrics = self.evaluator.final_metrics()
            networks = [state for state in self.members.networks if predicts(state, self.objective)]
            rows = self.evaluator.member_metrics()
            members = finishing.described(rows, networks, self.settings.passes)
        self.metrics, self.member_metrics = metrics.get("test", {}) | metrics.get(OUT_OF_FOLD, {}), members
        more = {} if self.evaluator.fitted is None else {"combiner": self.evaluator.fitted}
        metadata = finishing.model_metadata(self.data, networks, method_values(self.methods))
        weights = self.group.gather_tensors(self.members.network_tensors(networks))
        tensors = weights | method_tensors(self.methods) | more
        self.directory.write_model(tensors, metadata)
        outputs = finishing.write_outputs(
            self.directory, self.evaluator.kept_outputs() if settings.keep_outputs else {}
        )
        self.directory.update_environment(seconds=self.clock.seconds)
        result = finishing.result(metrics, members, self.history, self.clock.seconds, stopped_early)
        result["milliseconds_per_1000"] = self.evaluator.milliseconds_per_1000
        self.directory.write_result({**result, **outputs, "notices": list(self.recorder.notices)})
        self.stop.outcome = ("the run has finished", str(self.directory.path), "")
