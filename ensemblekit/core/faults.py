"""Exceptions that nobody foresaw, as errors that a person can use: memory that ran out, a plugin's code, or a bug."""

from __future__ import annotations

import sys
import traceback
from types import FrameType

from ensemblekit.core.errors import EnsemblekitError, PluginError, ResourceError

DEBUG = "ensemblekit --debug … shows the traceback"
_OUR_OWN = ("ensemblekit_methods", "ensemblekit_models", "ensemblekit_datasets", "ensemblekit_extensions")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch says that of a CPU's in a plain RuntimeError."""
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return True
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def explained(error: BaseException) -> EnsemblekitError:
    """What to tell of an exception that is none of ours."""
    if is_out_of_memory(error):
        fix = "lower training.batch_size, ensemble.members or the model's size, or set engine.recompute = true"
        return ResourceError("out of memory", one_line(str(error)), fix)
    what = f"{type(error).__name__}: {one_line(str(error))}".removesuffix(": ")
    places = list(traceback.walk_tb(error.__traceback__))  # every line that was being run, the innermost last
    theirs = [(frame, line) for frame, line in places if _top_module(frame) in _plugin_packages()]
    if theirs:
        where = _place(*theirs[-1])
        return PluginError(f"a plugin failed with {what}", where, f"mend it; ensemblekit check tests it, {DEBUG}")
    where = _place(*places[-1]) if places else ""
    return EnsemblekitError(what, where, f"{DEBUG}; if data and model are right, please report it")


def one_line(text: str) -> str:
    """A message of several lines as one."""
    return " ".join(text.split())


def _place(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_name}() of {frame.f_code.co_filename}, line {line}"


def _top_module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _plugin_packages() -> set[str]:
    """The packages and files of plugins that others wrote, as far as they are loaded."""
    plugin = sys.modules.get("ensemblekit.core.plugin")
    classes = [plugin.Plugin] if plugin is not None else []
    for plugin_class in classes:
        classes += plugin_class.__subclasses__()
    return {plugin_class.__module__.partition(".")[0] for plugin_class in classes} - {"ensemblekit", *_OUR_OWN}
