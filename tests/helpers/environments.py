"""Fresh virtual environments that share the installed packages, so that nothing is downloaded."""

from __future__ import annotations

import os
import site
import sys
import venv
from pathlib import Path


def new_environment(home: Path, editable: bool = True) -> Path:
    """Create an environment that sees the packages that are installed here, editable ones included if asked for."""
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    # addsitedir also follows the .pth files there, through which editable installations are found
    following = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    plain = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join(following if editable else plain) + "\n")
    for command in ("pip", "pytest", "ensemblekit"):
        script = home / "bin" / command
        # -P: like an installed command, and unlike python -m, it does not import from the current directory.
        script.write_text(f'#!/bin/sh\nexec "{home}/bin/python" -P -m {command} "$@"\n')
        script.chmod(0o755)
    return home


def environment_variables(home: Path) -> dict[str, str]:
    """The variables of a process in the environment; pip never asks the network."""
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_QUIET": "0"}
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **pip, "PATH": path, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "-W error"}
