"""The kinds of plugin that have a template, with the summary of a new package.

Apart from the rest of this package because `ensemblekit new --help` shows the kinds and must not import pydantic.
"""

from __future__ import annotations

SUMMARIES = {
    "method": "An ensembling method for ensemblekit.",
    "model": "A base model for ensemblekit.",
    "dataset": "A data set for ensemblekit.",
    "extension": "An extension for ensemblekit.",
}
