"""Fails to import."""

raise RuntimeError("a dependency is too old")
