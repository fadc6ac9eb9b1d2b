"""The outputs of a run's members on its own data: those that it has kept, else computed once and kept from then on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import EnsemblekitError, RunError, UsageError, choices
from ensemblekit.core.out_of_fold import OUT_OF_FOLD, held_out_members, held_out_outputs
from ensemblekit.core.plugin import Method
from ensemblekit.core.registry import Registry
from ensemblekit.core.verification import implemented_hooks
from ensemblekit.data.fingerprint import check_same_data
from ensemblekit.data.in_memory import python_dataset
from ensemblekit.data.loading import Data, Split, load_data
from ensemblekit.data.scaling import TargetScaling
from ensemblekit.inference.combining import Combiner
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.inference.kept_calibration import KeptCalibration
from ensemblekit.inference.loading import load_ensemble, trained_methods
from ensemblekit.inference.metadata import saved_info
from ensemblekit.inference.outputs import check_finite
from ensemblekit.members.layout import run_objective
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.json_files import as_written
from ensemblekit.runs.outputs import KeptOutputs, is_too_large
from ensemblekit.runs.run import read_spec
from ensemblekit.spec.sections import Spec

SPLITS = ("test", "validation", OUT_OF_FOLD)


class RunLoader:
    """Loads the ensemble of a run, the outputs of its members, and how they are combined.

    Files have them as the members learnt them, so that no digit is lost; here they are in the original units.
    """

    def __init__(self, directory: RunDirectory, registry: Registry) -> None:
        self.directory, self.registry = directory, registry
        self._computed: dict[str, KeptOutputs] | None = None
        """Outputs that could not be kept in the run directory."""

    def ensemble(self) -> Ensemble:
        """Load the trained ensemble."""
        return load_ensemble(self.directory.path, self.registry)

    def outputs(self, split: str, data: Any = None) -> KeptOutputs:
        """Return the outputs on a split, as `Ensemble.member_outputs` gives them; see `Run.outputs`."""
        if split not in SPLITS:
            raise UsageError(f'no outputs are kept for "{split}"', "split", choices(split, SPLITS))
        self._check_finished()
        kept = self._computed or self.directory.read_outputs() or self._compute(data)
        has_folds = read_spec(self.directory, self.registry).data.folds is not None
        if split == OUT_OF_FOLD and split not in kept and has_folds:  # they were too large to keep
            kept = self._compute(data)
        if split not in kept:
            raise self._no_outputs(split, has_folds)
        return self._restored(kept[split])

    def _no_outputs(self, split: str, has_folds: bool) -> UsageError:
        path = str(self.directory.path)
        if split == OUT_OF_FOLD:
            what = "the run has no out-of-fold outputs: every member was trained on all training samples"
            return UsageError(what, path, "train with data.folds")
        fix = "train with data.validation_fraction of more than 0"
        if has_folds:  # they are predictions of some members, whose errors are not those of all
            fix += "; out-of-fold outputs cannot take its place, since they are those of some members and not of all"
        return UsageError(f"the run has no {split} data", path, fix)

    @property
    def info(self) -> DataInfo:
        """Task and shapes of the data that the run was trained on."""
        self._check_finished()
        metadata = self.directory.read_metadata()
        with as_written(self.directory.path / "model.json"):
            return saved_info(metadata)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes, if they have names."""
        metadata = self.directory.read_metadata()
        with as_written(self.directory.path / "model.json"):
            return tuple(metadata["classes"]) if metadata["classes"] else None

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._spec.seed

    @cached_property
    def _spec(self) -> Spec:
        """The spec of the run, read once: analyses ask for the combiner many times."""
        return read_spec(self.directory, self.registry)

    def combiner(self) -> Combiner:
        """Return how the members' outputs are combined and calibrated; no network is built."""
        combiner = self.plain_combiner()
        kept = KeptCalibration.read(self.directory, combiner.loss)
        return replace(combiner, calibration=kept.calibration, conformal=kept.conformal)

    def plain_combiner(self, spec: Spec | None = None) -> Combiner:
        """Return how the members' outputs are combined, without a calibration that the run has kept.

        Args:
            spec: the run's spec with another combiner, which must not need fitted parameters. Default: that of the run.
        """
        self._check_finished()
        own = self._spec
        metadata = self.directory.read_metadata()
        tensors = self.directory.read_model()[0] if self._combines_by_tensors(own, metadata) else {}
        with as_written(self.directory.path / "model.json"):
            objective = run_objective(spec or own, self.info, trained_methods(own, tensors, metadata))
            by_index = {plan.index: plan for plan in own.networks}
            plans = [by_index[index] for index in metadata["members"]]
            members = [plan for plan in plans if plan.group.role == "member"] or plans
            indices = tuple(plan.index + number for plan in members for number in range(plan.members))
            return Combiner(
                objective,
                len(indices),
                tensors.get("combiner") if spec is None else None,
                self._scaling(),
                indices=indices,
                extra_metrics=own.known_metrics,
            )

    @staticmethod
    def _combines_by_tensors(spec: Spec, metadata: Mapping[str, Any]) -> bool:
        """Whether the combination may need tensors of the model: fitted ones, or what methods remember."""
        plugins = [*spec.methods, spec.combiner]
        implemented = [hook for plugin in plugins for hook in implemented_hooks(type(plugin))]
        remembers = any(type(method).state is not Method.state for method in spec.methods)
        return "fit_combiner" in implemented or remembers or bool(metadata.get("methods"))

    def _check_finished(self) -> None:
        path = self.directory.path
        if not self.directory.is_finished:
            raise RunError("the run has not finished", str(path), f"ensemblekit resume {path}")

    def _scaling(self) -> TargetScaling | None:
        metadata = self.directory.read_metadata()
        with as_written(self.directory.path / "model.json"):
            saved = metadata.get("target_scaling")
            return TargetScaling.from_json(saved) if saved else None

    def _restored(self, kept: KeptOutputs) -> KeptOutputs:
        """Convert outputs and real targets to the original units."""
        scaling = self._scaling() if kept.targets.is_floating_point() else None
        if scaling is None:
            return kept
        loss = self._spec.loss
        outputs = loss.rescale(kept.outputs, scaling.restore)
        return replace(kept, outputs=outputs, targets=scaling.restore(kept.targets))

    def _compute(self, data: Any) -> dict[str, KeptOutputs]:
        """Compute the outputs of a run that has kept none, and keep them if it may and if nobody uses the directory."""
        ensemble = self.ensemble()
        loaded = _load_data(ensemble.spec, data)
        check_same_data(self.directory.environment.get("data"), loaded.fingerprint, ensemble.spec.data.name)
        kept = compute_outputs(ensemble, loaded)
        if ensemble.spec.training.keep_outputs and not is_too_large(kept):
            with suppress(EnsemblekitError), self.directory.lock():
                self.directory.add_outputs(kept)
                return kept
        self._computed = kept
        return kept


def compute_outputs(ensemble: Ensemble, data: Data) -> dict[str, KeptOutputs]:
    """Compute the outputs of an ensemble's members on test and validation data, and out of fold, as they learnt them.

    Raises:
        NumericError: an output is not finite.
    """
    kept = {}
    splits = {"test": data.test} | ({} if data.validation is None else {"validation": data.validation})
    if data.train.folds is not None:
        splits[OUT_OF_FOLD] = data.train
    for name, split in splits.items():
        positions = members = None
        if name == OUT_OF_FOLD:
            positions, members = _held_out(ensemble, split)
        networks = _network_outputs(ensemble, split, positions)
        outputs = ensemble.predictions_of(networks)
        check_finite(outputs, lambda index, name=name: f"sample {index} of the {name} data")  # type: ignore[misc]
        index = torch.arange(len(split)) if split.indices is None else split.indices
        more = networks if ensemble.combiner.objective.combines_more else None
        kept[name] = KeptOutputs(outputs.contiguous(), split.targets, index, more, members)
    return kept


def _held_out(ensemble: Ensemble, train: Split) -> tuple[Tensor, Tensor]:
    """Return the positions and the indices of the members that were trained without a sample's fold, (rows, N)."""
    num_folds, combiner = ensemble.spec.data.folds, ensemble.combiner
    assert num_folds is not None
    assert train.folds is not None
    indices = torch.tensor(combiner.indices or range(combiner.num_members))
    return held_out_members(indices, train.folds.cpu(), num_folds)


def _network_outputs(ensemble: Ensemble, split: Split, positions: Tensor | None) -> Tensor:
    """Compute the outputs (S · R, N, W) of all networks for a split, or of the networks at some positions (R, N)."""
    parts = []
    with torch.no_grad():
        for batch in split.to(ensemble.device).batches(ensemble.spec.training.batch_size):
            outputs = ensemble.network_outputs(batch.inputs).cpu()
            if positions is not None:
                passes = len(outputs) // ensemble.combiner.num_members
                outputs = held_out_outputs(outputs, positions[:, batch.index.cpu()], passes)
            parts.append(outputs)
    return torch.cat(parts, dim=1).float()


def _load_data(spec: Spec, data: Any) -> Data:
    """Load the data of a run, which is passed again if it was passed in Python."""
    return load_data(spec.data if data is None else python_dataset(spec.data, data), spec.seed)
