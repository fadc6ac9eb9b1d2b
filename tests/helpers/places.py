"""Where things are that several tests need."""

from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parent.parent
TOY_PLUGINS = HELPERS / "toy_plugins.py"
PACKAGES = HELPERS / "packages"
