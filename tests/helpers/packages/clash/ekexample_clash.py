"""Registers names that others have."""

from ensemblekit import Method


class Other(Method):
    """Another method of the same name."""
