"""The multi-layer perceptron, for tables and small images."""

from __future__ import annotations

from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

from ensemblekit import Model
from ensemblekit_models.category_embedding import EMBEDDING, Embedding, embedding_layers
from ensemblekit_models.softmax import SOFTMAX, with_softmax


class MLP(Model):
    """A multi-layer perceptron on the flattened input; a linear model if it has no hidden layers."""

    formula = "[linear, batch norm, ReLU, dropout] for each hidden layer, linear"

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field((64, 64), description="sizes of the hidden layers")
    batch_norm: bool = Field(True, description="use batch norm in each hidden layer")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability after each hidden layer")
    embedding: Embedding = EMBEDDING
    softmax: bool = SOFTMAX

    def gives_probabilities(self) -> bool:
        return self.softmax

    def build(
        self, input_shape: tuple[int, ...], num_outputs: int, categories: tuple[tuple[int, int], ...] = ()
    ) -> nn.Module:
        embedding, size = embedding_layers(prod(input_shape), categories, self.embedding)
        layers: list[nn.Module] = [nn.Flatten(), *embedding]
        for hidden in self.hidden:
            layers.append(nn.Linear(size, hidden))
            if self.batch_norm:
                layers.append(nn.BatchNorm1d(hidden))
            layers.append(nn.ReLU(inplace=True))
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            size = hidden
        network = nn.Sequential(*layers, nn.Linear(size, num_outputs))
        return with_softmax(network) if self.softmax else network
