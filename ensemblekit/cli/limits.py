"""Too little address space for torch (`ulimit -v`) is found before torch is imported.

Short of memory, the libraries of torch and numpy abort, exit or raise whatever comes to hand. So another process tries
first, but only below a limit where it might fail, and only if the command imports torch at all.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

from ensemblekit.core.errors import IMPORT_GIB, ResourceError, address_space


class TorchGuard(MetaPathFinder):
    """Tries the import of torch in another process when torch is imported first, and raises if that fails."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Find nothing: other finders do."""
        if fullname != "torch":
            return
        sys.meta_path.remove(self)
        if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode != 0:
            limit = (address_space() or 0) / 2**30
            fix = f"raise it to {IMPORT_GIB} GiB or more (ulimit -v)"
            raise ResourceError("not enough memory to import torch", f"the limit of {limit:.1f} GiB", fix)


def guard_torch() -> None:
    """Have a small limit of the address space reported when torch is imported."""
    limit = address_space()
    if limit is not None and limit < IMPORT_GIB * 2**30 and "torch" not in sys.modules:
        sys.meta_path.insert(0, TorchGuard())
