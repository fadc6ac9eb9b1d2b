"""Embeddings of a table's categories: the one-hot block of each column times a matrix of its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

MOST_AUTOMATIC = 50
Embedding = Annotated[int, Field(ge=1)] | Literal["auto"] | None
EMBEDDING: Any = Field(
    None,
    description="numbers that each category of a table's column is embedded as, at most as many as the column has "
    'categories; "auto": half as many as categories, at most 50; not set: categories stay one-hot encoded',
)
"""The parameter of models that can embed categories."""


class CategoryEmbedding(nn.Module):
    """Replaces each one-hot block of its inputs by an embedding: (B, inputs) → (B, size); other inputs stay.

    A category that the training rows do not have is all zeros, and so is its embedding. The matrices start as
    `nn.Embedding` does, with the scale of standardised numbers.

    Args:
        inputs: Number of inputs.
        categories: (first input, number of categories) of each block, ascending.
        embedding: Size of each embedding, see `EMBEDDING`.
    """

    def __init__(self, inputs: int, categories: tuple[tuple[int, int], ...], embedding: int | Literal["auto"]) -> None:
        super().__init__()
        self.widths: list[int] = []
        """Widths of the parts of the inputs, in their order."""
        self.matrix_of: dict[int, int] = {}
        """By the index of a part, the index of its matrix; other parts stay as they are."""
        matrices: list[nn.Parameter] = []
        end = 0
        for first, count in categories:
            if first > end:
                self.widths.append(first - end)
            self.matrix_of[len(self.widths)] = len(matrices)
            self.widths.append(count)
            matrices.append(nn.Parameter(torch.randn(count, _size(count, embedding))))
            end = first + count
        if inputs > end:
            self.widths.append(inputs - end)
        self.matrices = nn.ParameterList(matrices)
        self.size = inputs + sum(matrix.shape[1] - matrix.shape[0] for matrix in matrices)

    def forward(self, inputs: Tensor) -> Tensor:
        parts = list(inputs.split(self.widths, dim=-1))
        for part, matrix in self.matrix_of.items():
            parts[part] = parts[part] @ self.matrices[matrix]
        return torch.cat(parts, dim=-1)


def embedding_layers(
    inputs: int, categories: tuple[tuple[int, int], ...], embedding: int | Literal["auto"] | None
) -> tuple[list[nn.Module], int]:
    """Return the layers that embed the categories, if there is anything to embed, and the number of their outputs."""
    if embedding is None or not categories:
        return [], inputs
    layer = CategoryEmbedding(inputs, categories, embedding)
    return [layer], layer.size


def _size(count: int, embedding: int | Literal["auto"]) -> int:
    return min(MOST_AUTOMATIC, (count + 1) // 2) if embedding == "auto" else min(embedding, count)
