"""The calibration that a run has kept, with its prediction sets or intervals: read, written and removed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from ensemblekit.core.errors import RunError
from ensemblekit.core.losses import Loss
from ensemblekit.inference.calibration import Calibration
from ensemblekit.inference.conformal import Conformal
from ensemblekit.runs.calibration_file import read_calibration, remove_calibration, write_calibration
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.json_files import as_written
from ensemblekit.runs.own_files import CALIBRATION


@dataclass(frozen=True)
class KeptCalibration:
    """What calibration.json holds."""

    combiner: str = ""
    """The name of the combination that it is for."""
    calibration: Calibration | None = None
    conformal: Conformal | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """What is known about the calibration: the number of samples, and the scores before and after."""

    @classmethod
    def read(cls, directory: RunDirectory, loss: Loss) -> Self:
        """Read the file of a run; empty if there is none.

        Raises:
            RunError: the file is damaged, or was fitted to other weights.
        """
        values = read_calibration(directory.path, directory.format_version)
        if values is None:
            return cls()
        with as_written(directory.path / CALIBRATION):
            return cls.from_json(values, loss)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], loss: Loss) -> Self:
        """Restore it; a ValueError, KeyError or TypeError if the values are not those of one."""
        saved, conformal = values["calibration"], values["conformal"]
        return cls(
            str(values["combiner"]),
            None if saved is None else Calibration.from_json(saved, loss),
            None if conformal is None else Conformal.from_json(conformal),
            dict(values["facts"]),
        )

    def to_json(self) -> dict[str, Any] | None:
        """Return it as JSON has it; None without calibration, sets and intervals."""
        if self.calibration is None and self.conformal is None:
            return None
        return {
            "combiner": self.combiner,
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "conformal": None if self.conformal is None else self.conformal.to_json(),
            "facts": self.facts,
        }

    @classmethod
    def read_intact(cls, directory: RunDirectory, loss: Loss) -> Self:
        """Read the file of a run; empty also if it is damaged, for what replaces or removes it."""
        try:
            return cls.read(directory, loss)
        except RunError:
            return cls()

    def write(self, directory: RunDirectory) -> None:
        """Keep it in the run directory; without calibration, sets and intervals there is no file."""
        with directory.lock():
            values = self.to_json()
            if values is None:
                remove_calibration(directory.path)
                return
            write_calibration(directory.path, directory.format_version, values)

    def without_calibration(self) -> Self:
        """Return it with nothing but the prediction sets or intervals."""
        return replace(self, calibration=None, facts={})

    def without_conformal(self) -> Self:
        """Return it with nothing but the calibration."""
        return replace(self, conformal=None)
