"""Trained ensembles for other tools: a graph for ONNX or torch.export, a folder for model hubs, a service over HTTP.

Uses the layers up to `display`. Start with `exporting.py`, which has the function `ensemblekit.export` and the table of
formats; `graph.py` is the whole ensemble as one module that can be traced; `hub.py` writes the folder, and
`model_card.py` its card; `service.py` serves a run.

The package has the name of the public function. Since importing a package sets its name in the package above, this one
can be called like the function: importing it hides nothing.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

from ensemblekit.export import exporting


class _CallablePackage(ModuleType):
    """A package that can be called like the function of its name."""

    __call__ = staticmethod(exporting.export)


sys.modules[__name__].__class__ = _CallablePackage
__signature__ = inspect.signature(exporting.export)
