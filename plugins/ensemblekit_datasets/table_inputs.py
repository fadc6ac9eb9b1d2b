"""The columns of a table as inputs of an exported graph, which prepares them as the run prepares a file."""

from __future__ import annotations

import torch
from torch import Tensor

from ensemblekit import GraphInput, InputNetwork
from ensemblekit_datasets.encoding import Category, Encoder
from ensemblekit_datasets.number_scaling import Number


class TableInputs(InputNetwork):
    """Numbers in the units of the file, and codes of categories: a graph has no texts.

    A missing number is nan. The code of a category is its index in the list of its column; any other code, such as -1,
    is a category that the training rows do not have.
    """

    fill: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, numbers: tuple[Number, ...], categories: tuple[Category, ...]) -> None:
        super().__init__()
        self.num_numbers, self.sizes = len(numbers), [column.width for column in categories]
        for name in ("fill", "mean", "std"):
            values = [getattr(column, name) for column in numbers]
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64))
        self.inputs = (*_number_input(numbers), *_category_input(categories))

    def forward(self, *raw: Tensor) -> Tensor:
        parts = []
        if self.num_numbers:
            filled = torch.where(raw[0].isnan(), self.fill, raw[0])
            parts.append(((filled - self.mean) / self.std).float())
        if self.sizes:
            columns = zip(raw[-1].unbind(dim=1), self.sizes, strict=True)
            parts += [(codes.unsqueeze(1) == torch.arange(size)).float() for codes, size in columns]
        return torch.cat(parts, dim=1)

    def raw(self, stored: Tensor) -> tuple[Tensor, ...]:
        numbers, *encoded = stored.split([self.num_numbers, *self.sizes], dim=1)
        codes = [torch.where(one.any(dim=1), one.argmax(dim=1), -1) for one in encoded]
        inputs = [numbers.double() * self.std + self.mean] if self.num_numbers else []
        return (*inputs, *([torch.stack(codes, dim=1)] if codes else []))


def table_inputs(encoder: Encoder) -> TableInputs | None:
    """Return the inputs for the columns of an encoder; None if it encodes columns in a way that no graph has."""
    order = encoder.encoded_order
    numbers = tuple(column for column in order if type(column) is Number)
    categories = tuple(column for column in order if type(column) is Category)
    return TableInputs(numbers, categories) if [*numbers, *categories] == order else None


def _number_input(numbers: tuple[Number, ...]) -> tuple[GraphInput, ...]:
    if not numbers:
        return ()
    names = [column.name for column in numbers]
    description = f"{len(names)} columns of numbers in the units of the table, nan for a missing one"
    return (GraphInput("numbers", torch.float64, (len(names),), description, {"columns": names}),)


def _category_input(categories: tuple[Category, ...]) -> tuple[GraphInput, ...]:
    if not categories:
        return ()
    columns = [{"name": column.name, "categories": list(column.categories)} for column in categories]
    description = f"{len(columns)} columns of categories, each by its index in the list of its column; -1: another one"
    return (GraphInput("categories", torch.int64, (len(columns),), description, {"columns": columns}),)
