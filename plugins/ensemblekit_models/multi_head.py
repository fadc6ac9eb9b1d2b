"""One network of any model with a linear output layer for each member."""

from __future__ import annotations

from inspect import signature

from pydantic import Field, field_validator
from torch import nn

from ensemblekit import Family, Model
from ensemblekit_models.member_layers import MemberLinear
from ensemblekit_models.softmax import SOFTMAX, with_softmax


class MultiHead(Family):
    """A network of any model as a trunk that all members share; each has its own linear head on the trunk's outputs."""

    paper = "Lee et al. 2015, Why M Heads are Better than One: Training a Diverse Ensemble of Deep Networks"
    formula = "W_k ReLU(trunk(x)) + b_k for member k"

    model: Model = Field(description="model of the trunk")
    features: int = Field(64, ge=1, description="number of outputs of the trunk")
    softmax: bool = SOFTMAX

    @field_validator("model")
    @classmethod
    def _is_a_trunk(cls, model: Model) -> Model:
        if isinstance(model, Family):
            raise ValueError(f'"{model.name}" is a family itself; choose a model that builds one network')
        if model.fitted:
            raise ValueError(f'"{model.name}" is fitted and does not learn by gradients; choose another model')
        if "member" in signature(model.build).parameters:
            raise ValueError(f'"{model.name}" builds a network for each member, but the trunk is one for all of them')
        if model.gives_probabilities():
            raise ValueError(
                f'"{model.name}" ends with a softmax; leave it out, and set softmax of "multi_head" instead'
            )
        return model

    def gives_probabilities(self) -> bool:
        return self.softmax

    def build_family(self, input_shape: tuple[int, ...], num_outputs: int, num_members: int) -> nn.Module:
        heads = MemberLinear(num_members, self.features, num_outputs)
        network = nn.Sequential(self.model.build(input_shape, self.features), nn.ReLU(), heads)
        return with_softmax(network) if self.softmax else network
