"""Where things are that several tests need."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
TOY_PLUGINS = Path(__file__).parent / "toy_plugins.py"
