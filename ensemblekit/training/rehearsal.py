"""A rehearsal of a run: what its methods will do to the members, found out without data and networks."""

from __future__ import annotations

from typing import NoReturn

from ensemblekit.core.errors import UsageError
from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.losses import Loss
from ensemblekit.spec.sections import Spec

Action = tuple[int, str, tuple[float, ...]]
"""What a method does to the members: epoch, name and arguments."""


def rehearse(spec: Spec, num_epochs: int, refusal: UsageError) -> Rehearsal:
    """Let the methods of a spec do in the first epochs what they do to the members.

    Args:
        spec: the spec.
        num_epochs: how many epochs to rehearse.
        refusal: raised if a method needs the training data or the members' outputs to decide.
    """
    # copies, because methods may remember something
    hooks = RunHooks([method.model_copy(deep=True) for method in spec.methods]).call
    members = Rehearsal(hooks.members_at_start(num_members=spec.ensemble.members), spec, refusal)
    counts = {"num_epochs": spec.training.epochs, "num_members": spec.ensemble.members, "num_steps": 1}
    for epoch in range(1, num_epochs + 1):
        members.epoch = epoch
        hooks.epoch_started(ensemble=members, epoch=epoch, **counts)
        hooks.epoch_trained(ensemble=members, epoch=epoch, **counts)
    return members


class Rehearsal:
    """Stands in for the ensemble in training, and remembers what is done to it; there is no data."""

    def __init__(self, size: int, spec: Spec, refusal: UsageError) -> None:
        self.indices, self.spec, self.refusal, self.epoch = list(range(size)), spec, refusal, 0
        """`indices` are those of the current members in the spec; a copy has that of its original."""
        self.num_built = size
        self.actions: list[Action] = []
        self.blended: list[tuple[int, int]] = []
        """Pairs of members, by their indices in the spec, of which the first gets a share of the other's weights."""

    def __len__(self) -> int:
        return len(self.indices)

    def grow(self) -> int:
        """Add a member at the end."""
        self.indices.append(self.num_built)
        self.num_built += 1
        return self._note("grow", len(self) - 1)

    def keep_copy(self, member: int) -> int:
        """Insert a copy of a member before it."""
        self.indices.insert(member, self.indices[member])
        return self._note("copy", member)

    def freeze(self, member: int) -> None:
        """Freeze a member."""
        self._note("freeze", member)

    def drop(self, member: int) -> None:
        """Remove a member."""
        del self.indices[member]
        self._note("drop", member)

    def blend(self, member: int, other: int, share: float) -> None:
        """Move the weights of a member towards those of another."""
        self.blended.append((self.indices[member], self.indices[other]))
        self._note("blend", member, other, share)

    def refresh_statistics(self, member: int) -> None:
        """Compute the batch-norm statistics of a member anew, which changes nothing that is planned."""

    @property
    def loss(self) -> Loss:
        """The loss of the run."""
        return self.spec.loss

    def __getattr__(self, name: str) -> NoReturn:
        if name not in ("targets", "outputs", "sample_weights", "set_sample_weights"):
            raise AttributeError(name)
        raise self.refusal

    def _note(self, action: str, member: int, *more: float) -> int:
        self.actions.append((self.epoch, action, (member, *more)))
        return member
