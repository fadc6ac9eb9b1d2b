"""The installed methods that need nothing but the members' outputs, for tests of every method.

The others are checked with auxiliary networks by their contract, and in tests of their own.
"""

from __future__ import annotations

import ensemblekit as ek


def plain_methods() -> list[str]:
    """Return their names in order."""
    return [name for name, info in sorted(ek.methods().items()) if not info.load()().required_groups()]
