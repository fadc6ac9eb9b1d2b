"""Fresh virtual environments that share the installed packages, so that nothing is downloaded."""

from __future__ import annotations

import os
import site
import venv
from pathlib import Path


def new_environment(home: Path, shared: list[str] | None = None) -> Path:
    """Create an environment that sees the packages in `shared`, by default those that are installed here."""
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})\n" for path in shared or site.getsitepackages()]
    (packages / "shared.pth").write_text("".join(lines))
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
