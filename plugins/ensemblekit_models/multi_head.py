"""One network of any model with a linear output layer for each member."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import TYPE_CHECKING

from pydantic import Field
from torch import nn

from ensemblekit import Family, Model, Problem
from ensemblekit_models.member_layers import MemberLinear
from ensemblekit_models.softmax import SOFTMAX, with_softmax

if TYPE_CHECKING:
    from ensemblekit import Spec


class MultiHead(Family):
    """A network of any model as a trunk that all members share; each has its own linear head on the trunk's outputs."""

    paper = "Lee et al. 2015, Why M Heads are Better than One: Training a Diverse Ensemble of Deep Networks"
    formula = "W_k ReLU(trunk(x)) + b_k for member k"

    model: Model = Field(description="model of the trunk")
    features: int = Field(64, ge=1, description="number of outputs of the trunk")
    softmax: bool = SOFTMAX

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        yield from super().check_spec(spec)
        reason = self._no_trunk()
        if reason is not None:
            yield Problem("model", f'"{self.model.name}" {reason[0]}', reason[1])

    def _no_trunk(self) -> tuple[str, str] | None:
        """Return why the model cannot be the trunk and what to do about it; None if it can."""
        other = "use a model that builds one network and learns by gradients"
        if isinstance(self.model, Family):
            return "is a family, which has several members itself", other
        if self.model.fitted:
            return "is fitted to the data, but a trunk learns together with the heads", other
        if "member" in signature(self.model.build).parameters:
            return "builds another network for each member, but all of them share the trunk", other
        if self.model.gives_probabilities():
            return "ends with a softmax, but the heads need raw features", f"set softmax of {self.name} instead"
        return None

    def gives_probabilities(self) -> bool:
        return self.softmax

    def build_family(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        num_members: int,
        categories: tuple[tuple[int, int], ...] = (),
    ) -> nn.Module:
        heads = MemberLinear(num_members, self.features, num_outputs)
        trunk = self.model.build_for(input_shape, self.features, categories=categories)
        network = nn.Sequential(trunk, nn.ReLU(), heads)
        return with_softmax(network) if self.softmax else network
