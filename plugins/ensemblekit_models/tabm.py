"""TabM: an ensemble of multi-layer perceptrons that share their weights, for tables."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from ensemblekit import Family
from ensemblekit_models.category_embedding import EMBEDDING, Embedding, embedding_layers
from ensemblekit_models.member_layers import MemberLinear, MemberScale, RankOneLinear
from ensemblekit_models.softmax import SOFTMAX, with_softmax


class TabM(Family):
    """A multi-layer perceptron shared by all members, which have their own adapters and output layers."""

    paper = "Gorishniy et al. 2025, TabM: Advancing Tabular Deep Learning with Parameter-Efficient Ensembling"
    formula = "[s_k ∘ W(r_k ∘ x) + b_k, ReLU, dropout] for each hidden layer, linear layer of member k"

    # the defaults are those of the authors' package
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (512, 512, 512), min_length=1, description="sizes of the hidden layers"
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout probability after each hidden layer")
    embedding: Embedding = EMBEDDING
    adapters: Literal["all", "first"] = Field(
        "all",
        description='hidden layers that each member adapts: "all" (TabM), or only the input of the "first" (TabM-mini)',
    )
    softmax: bool = SOFTMAX

    def formula_for_parameters(self) -> str:
        if self.adapters == "all":
            return self.formula
        return "r_k ∘ x, [linear, ReLU, dropout] for each hidden layer, linear layer of member k"

    def gives_probabilities(self) -> bool:
        return self.softmax

    def build_family(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        num_members: int,
        categories: tuple[tuple[int, int], ...] = (),
    ) -> nn.Module:
        embedding, size = embedding_layers(prod(input_shape), categories, self.embedding)
        layers: list[nn.Module] = [nn.Flatten(), *embedding]
        if self.adapters == "first":
            layers.append(MemberScale(num_members, size))
        for index, hidden in enumerate(self.hidden):
            if self.adapters == "first":
                layers.append(nn.Linear(size, hidden))
            else:  # BatchEnsemble, but only the first adapter starts with random signs
                layers.append(RankOneLinear(num_members, size, hidden, signs=(index == 0, False)))
            layers.append(nn.ReLU(inplace=True))
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            size = hidden
        network = nn.Sequential(*layers, MemberLinear(num_members, size, num_outputs))
        return with_softmax(network) if self.softmax else network
