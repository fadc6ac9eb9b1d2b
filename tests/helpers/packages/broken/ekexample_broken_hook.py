"""Imports, but what it registers cannot be used."""

from ensemblekit import Method, hookimpl

IMPOSTOR = 3


class BrokenHook(Method):
    """A typo in the hook's name."""

    @hookimpl
    def member_los(self, outputs):
        return outputs
