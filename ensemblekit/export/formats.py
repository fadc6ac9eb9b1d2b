"""What a format of an export is: it turns a run into a file or a folder, and says what it wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ensemblekit.core.errors import UsageError
from ensemblekit.core.registry import Registry

InputType = Literal["uint8", "float32"]


@dataclass(frozen=True)
class ExportRequest:
    """A run, and where and how to write it."""

    run: Path
    """The run directory."""
    output: Path
    """The file or folder to write."""
    registry: Registry
    """The plugins that the run may use."""
    data: Any = None
    """The run's data, if it was passed in Python."""
    input_type: InputType | None = None
    """The type of inputs that were stored as bytes; None: as the run's data has them."""
    licence: str | None = None
    """The licence of the model; None: not stated."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    format: str
    num_bytes: int
    usage: str
    """A few lines of Python that use it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What else there is to say, as JSON has it: inputs, outputs, the largest difference from the original."""
    notes: tuple[str, ...] = ()
    """What a user should know although it is no error."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        about = {"path": str(self.path), "format": self.format, "num_bytes": self.num_bytes}
        return {**about, **self.facts, "notes": list(self.notes), "usage": self.usage}


@dataclass(frozen=True)
class Format:
    """A format that runs can be exported to."""

    default_name: str
    """Name of the file or folder in the run directory, if no other is given."""
    write: Callable[[ExportRequest], Exported]
    """Writes it, atomically."""
    packages: Sequence[str] = ()
    """Packages that it needs beside those of ensemblekit itself."""
    extra: str = ""
    """The extra that has these packages."""
    option: Literal["input_type", "licence"] = "input_type"
    """The option that it takes beside those that every format does."""

    def check_options(self, name: str, **options: str | None) -> None:
        """Raise a `UsageError` if an option is given that this format, called `name`, does not take."""
        for option, value in options.items():
            if value is not None and option != self.option:
                what = f"the format {name} has no such option"
                raise UsageError(what, f"--{option.replace('_', '-')}", "leave it out")

    def check_installed(self, name: str) -> None:
        """Raise a `UsageError` that names the extra if a package is missing."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            what = (
                f"the format needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
            )
            raise UsageError(what, f"--format {name}", f"pip install 'ensemblekit[{self.extra}]'")
