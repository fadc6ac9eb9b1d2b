"""The only training loop. It knows no method, model or data set by name.

An epoch: life-cycle hooks, steps, evaluation, one line of metrics, one checkpoint. Everything random is a function of
the seed, the epoch and the step, so that a run that was stopped anywhere goes on from its last checkpoint bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.errors import Interrupted, PluginError, UsageError
from ensemblekit.core.metrics import evaluate, flat_metrics, member_metrics
from ensemblekit.core.objective import Objective
from ensemblekit.core.seeds import derive_seed
from ensemblekit.data.loading import Batch, Data, Split
from ensemblekit.display.progress import Progress
from ensemblekit.engines import ENGINES, Engine, Settings, unsupported
from ensemblekit.engines.selection import measure_engines
from ensemblekit.members.growing import TrainingMembers
from ensemblekit.runs.directory import Checkpoint, RunDirectory
from ensemblekit.spec.sections import Spec
from ensemblekit.training.interruption import StopRequest
from ensemblekit.training.statistics import Seen

CHECK_EVERY = 64
"""Steps between two looks at whether everything is still finite: looking waits for the device."""
EVALUATED_BYTES = 2**22
"""How large batches are in evaluation, if that is more than a batch of training: nothing is learnt from them."""


class Trainer:
    """Trains the ensemble of one spec on one data set."""

    def __init__(self, spec: Spec, data: Data, device: torch.device, progress: Progress) -> None:
        self.spec, self.progress = spec, progress
        self.data = data.to(device)
        self.objective = Objective(spec.methods, spec.loss, spec.extensions)
        self.hooks = self.objective.hooks.hook
        passes = self.objective.passes(spec.ensemble.members)
        self.settings = Settings(
            device,
            spec.optimizer.build,
            bf16=spec.engine.precision == "bf16",
            compile=spec.engine.compile,
            recompute=spec.engine.recompute,
            elementwise=spec.optimizer.elementwise,
            clip_norm=spec.training.clip_norm,
            passes=passes,
        )
        self.passes = passes or 1
        self.members = TrainingMembers(spec, data.info, spec.loss.num_outputs(data.info), device)
        if passes is not None:
            self.members.refuse_without_noise()
        self.members.start(self.hooks.members_at_start(num_members=spec.ensemble.members))
        weights = self.objective.sample_weights(len(data.train), spec.ensemble.members, spec.seed)
        self.weights = None if weights is None else weights.to(device)
        if self.objective.fits_combiner and data.validation is None:
            what = "a method learns from held-out data how to combine the members, and there is none"
            raise UsageError(what, "data.validation_fraction", "set it to more than 0")
        self.known_outputs: dict[int, Tensor] = {}
        """What the members say of a split, by its id, until they learn: a run ends with what its last epoch asked."""
        self.fitted: Tensor | None = None
        """What the combiner learnt from the validation data, at the last evaluation."""
        lengths = data.train.training_batch_lengths(spec.training.batch_size)
        self.steps_per_epoch = len(lengths)
        self.members.refuse_if_impossible(bf16=self.settings.bf16, single_samples=1 in lengths)
        self.engine_name: str = spec.engine.name
        self.engine: Engine | None = None
        self.best_loss, self.since_best = math.inf, 0
        self.history: list[dict[str, Any]] = []
        self.seconds = {"start": 0.0, "training": 0.0, "evaluation": 0.0, "checkpoints": 0.0}
        """What the run's time was spent on."""

    def choose_engine(self) -> tuple[str, dict[str, float]]:
        """The engine's name, and the seconds per step of those that were tried if the spec leaves it open."""
        slots, optimizer = self.members.slots, self.spec.optimizer.name
        measured: dict[str, float] = {}
        if self.engine_name == "auto":
            batch = next(iter(self.data.train.training_batches(self.spec.training.batch_size, self.spec.seed, epoch=1)))
            weights = self._weights(batch, [slot.member for slot in slots])
            measured = measure_engines(slots, self.objective, self.settings, optimizer, batch, weights)
            self.engine_name = min(measured, key=measured.__getitem__, default="sequential")
        elif reason := unsupported(self.engine_name, slots, self.settings, optimizer):
            raise UsageError(f'engine "{self.engine_name}" cannot run this: {reason}', "engine.name", "use auto")
        return self.engine_name, measured

    def train(self, directory: RunDirectory, start_epoch: int, stop: StopRequest) -> None:
        """Train from after `start_epoch` to the end; every epoch is saved."""
        if start_epoch == 0:
            self._save(directory, 0, best=False)
        num_epochs = self.spec.training.epochs
        devices = () if self.settings.device.type == "cpu" else (self.settings.device,)
        for epoch in range(start_epoch + 1, num_epochs + 1):
            if self.spec.training.patience is not None and self.since_best >= self.spec.training.patience:
                break
            with torch.random.fork_rng(devices=devices):
                row = self._epoch(epoch, directory, stop)
            improved = self._judge(row)
            self.history.append(row)
            directory.append_metrics(row)
            self._save(directory, epoch, improved)
            self.progress.epoch_finished(row)
            self.hooks.epoch_finished(epoch=epoch, num_epochs=num_epochs, metrics=row)
        if self.spec.training.keep == "best" and self.data.validation is not None:
            self.restore(directory.load_checkpoint(best=True))
        self._make_engine()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Become what was saved."""
        self.members.restore(checkpoint.tensors, checkpoint.state["members"])
        self.known_outputs.clear()
        best = checkpoint.state["best_loss"]
        self.best_loss, self.since_best = math.inf if best is None else best, checkpoint.state["since_best"]

    def test(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The final metrics on the test data, and those of each member."""
        with self._clock("evaluation"):
            if self.objective.fits_combiner and self.data.validation is not None:
                self._fit_combiner(self._outputs(self.data.validation), self.data.validation)
            outputs = self._outputs(self.data.test)
            metrics = self._metrics(outputs, self.data.test)
            members = member_metrics(outputs, self.data.test.targets, self.spec.loss)
        for place, entry in enumerate(members):
            number, network = divmod(place, len(self.members))
            slot = self.members.slots[network]
            if self.passes > 1:
                entry |= {"network": network, "pass": number}
            entry["parameters"] = sum(parameter.numel() for parameter in slot.network.parameters())
            entry["frozen"] = slot.frozen
        return flat_metrics(metrics), members

    def close(self) -> None:
        """Release the engine's threads."""
        if self.engine is not None:
            self.engine.close()

    def _make_engine(self) -> Engine:
        """The engine for the members as they are now."""
        if self.engine is not None:
            if not self.members.changed:
                return self.engine
            self.engine.close()
        self.engine = ENGINES[self.engine_name](self.members.slots, self.objective, self.settings)
        self.members.changed = False
        return self.engine

    def _epoch(self, epoch: int, directory: RunDirectory, stop: StopRequest) -> dict[str, Any]:
        num_epochs, num_members = self.spec.training.epochs, self.spec.ensemble.members
        if self.engine is not None:
            self.engine.store_optimizer_state()
        self.hooks.epoch_started(ensemble=self.members, epoch=epoch, num_epochs=num_epochs, num_members=num_members)
        engine = self._make_engine()
        # for networks that draw from torch's global generator; those of this project have numbers of their own
        torch.manual_seed(derive_seed(self.spec.seed, "epoch", epoch))
        self.progress.epoch_started(epoch, num_epochs, self.steps_per_epoch)
        with self._clock("training") as trained:
            row = {"epoch": epoch, **self._steps(engine, epoch, directory, stop)}
        row["images_per_second"] = len(self.data.train) / trained.seconds
        row["seconds"] = trained.seconds
        if epoch % self.spec.training.evaluate_every == 0 or epoch == num_epochs:
            with self._clock("evaluation") as evaluated:
                row |= self._evaluation()
            row["seconds"] += evaluated.seconds
        return row

    @contextmanager
    def _clock(self, what: str) -> Iterator[Elapsed]:
        """Add the time of a block to what is known of the run's."""
        elapsed = Elapsed()
        start = time.perf_counter()
        yield elapsed
        elapsed.seconds = time.perf_counter() - start
        self.seconds[what] += elapsed.seconds

    def _steps(self, engine: Engine, epoch: int, directory: RunDirectory, stop: StopRequest) -> dict[str, float]:
        """All steps of an epoch; returns what was seen on the way."""
        self.known_outputs.clear()
        columns = [slot.member for slot in engine.running]
        seen = Seen(self.objective, columns)
        rate = 0.0
        batches = self.data.train.training_batches(self.spec.training.batch_size, self.spec.seed, epoch)
        for step, batch in enumerate(batches):
            if stop.signal_number is not None:
                raise self._interrupted(directory, epoch - 1, stop)
            rate = self._learning_rate(epoch - 1 + step / self.steps_per_epoch)
            overall = (epoch - 1) * self.steps_per_epoch + step
            value, outputs = engine.train_step(batch, self._weights(batch, columns), rate, overall)
            seen.add(value, outputs, batch)
            if (step + 1) % CHECK_EVERY == 0:
                seen.check_finite(epoch, directory.path)
            self.progress.step(epoch, step + 1, len(batch.index))
        seen.check_finite(epoch, directory.path)
        return {**seen.means(), "learning_rate": rate}

    def _learning_rate(self, progress: float) -> float:
        num_epochs = self.spec.training.epochs
        base: float = getattr(self.spec.optimizer, "lr")  # noqa: B009 - a field of every optimizer's own section
        chosen: float | None = self.hooks.learning_rate(base=base, epoch=progress, num_epochs=num_epochs)
        if chosen is None:
            return base * self.spec.schedule.factor(progress, num_epochs)
        if not isinstance(chosen, int | float) or not 0 <= chosen < math.inf:
            what, fix = f'hook "learning_rate" returned {chosen!r:.60}', "return a number that is not negative, or None"
            raise PluginError(what, ", ".join(method.name for method in self.spec.methods), fix)
        return chosen

    def _weights(self, batch: Batch, columns: list[int]) -> Tensor | None:
        return None if self.weights is None else self.weights[batch.index][:, columns]

    def _evaluation(self) -> dict[str, float]:
        held_out: dict[str, float] = {}
        if (validation := self.data.validation) is not None:
            outputs = self._outputs(validation)
            self._fit_combiner(outputs, validation)
            held_out = {f"validation_{name}": value for name, value in self._metrics(outputs, validation).items()}
        return flat_metrics(self._metrics(self._outputs(self.data.test), self.data.test)) | held_out

    def _fit_combiner(self, outputs: Tensor, split: Split) -> None:
        over_passes = outputs.unflatten(0, (self.passes, -1)).mean(dim=0)
        self.fitted = self.objective.fit_combiner(over_passes, split.targets)

    def _metrics(self, outputs: Tensor, split: Split) -> dict[str, float]:
        combined = self.objective.combine(outputs, self.fitted, self.passes)
        return evaluate(outputs, split.targets, self.spec.loss, combined)

    def _outputs(self, split: Split) -> Tensor:
        if id(split) not in self.known_outputs:
            engine = self._make_engine()
            fitting = EVALUATED_BYTES // (4 * math.prod(self.data.info.input_shape))
            batches = split.batches(max(self.spec.training.batch_size, fitting))
            self.known_outputs[id(split)] = torch.cat([engine.predict(batch.inputs) for batch in batches], dim=1)
        return self.known_outputs[id(split)]

    def _judge(self, row: Mapping[str, Any]) -> bool:
        """Whether this is the best epoch so far, by the validation data alone."""
        loss = row.get("validation_loss")
        if loss is None:
            return False
        if loss < self.best_loss:
            self.best_loss, self.since_best = loss, 0
            return True
        self.since_best += 1
        return False

    def _save(self, directory: RunDirectory, epoch: int, best: bool) -> None:
        with self._clock("checkpoints"):
            if self.engine is not None:
                self.engine.store_optimizer_state()
            state = {
                "members": self.members.state(),
                "best_loss": self.best_loss if math.isfinite(self.best_loss) else None,
                "since_best": self.since_best,
            }
            directory.save_checkpoint(Checkpoint(epoch, self.members.tensors(), state), best=best)
        self.progress.saved(epoch)

    def _interrupted(self, directory: RunDirectory, epoch: int, stop: StopRequest) -> Interrupted:
        fix = f"continue with: ensemblekit resume {directory.path}"
        return Interrupted(f"saved at epoch {epoch}", str(directory.path), fix, exit_code=stop.exit_code)


@dataclass
class Elapsed:
    """How long something took, once it has ended."""

    seconds: float = 0.0
