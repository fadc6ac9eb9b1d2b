"""Plugins whose parameters are plugins, given to commands and tests as a local plugin file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field
from torch import Tensor, nn

from ensemblekit import DataInfo, Family, Loss, Method, Model, Problem, Spec, hookimpl


class Picky(Model):
    """One linear layer, with opinions on the rest of the spec."""

    width: int = Field(3, ge=1, description="size of the hidden layer")
    file: Path | None = Field(None, description="a file that it would read")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        hidden = nn.Linear(input_shape[0], self.width)
        return nn.Sequential(hidden, nn.Tanh(), nn.Linear(self.width, num_outputs))

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.training.epochs > 90:
            yield Problem("width", "too small for so many epochs", "raise it")
            yield Problem("/training.epochs", "too many", "lower it")

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if info.num_outputs > 2:
            yield Problem("", "takes two classes only", "use other data")

    def notes(self, spec: Spec) -> Iterable[str]:
        yield f"picky of width {self.width}"

    def unsupported(self) -> dict[str, str]:
        return {"autocast": "it is picky"}

    def gives_probabilities(self) -> bool:
        return self.width == 7


class Wrapper(Model):
    """Any model, with others that it does not use."""

    model: Model = Field(description="the model that is built")
    others: tuple[Model, ...] = Field((), description="models that are not used")
    maybe: Model | None = Field(None, description="a model that is not used")
    usual: Model = Field(Picky(width=5), description="a model that is not used")
    loss: Loss | None = Field(None, description="a loss that is not used")
    scale: float = Field(1.0, gt=0, alias="lambda", description="a number")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return self.model.build(input_shape, num_outputs)


class Lenient(Wrapper):
    """A wrapper that does not ask the models in it."""

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        return ()

    def unsupported(self) -> dict[str, str]:
        return {}


class OfFamilies(Model):
    """Needs a family."""

    family: Family = Field(description="a family of members")

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return self.family.build(input_shape, num_outputs)


class Scaled(Method):
    """The member loss of another method, scaled."""

    formula = "f/M sum_i l(h_i, y)"

    method: Method = Field(description="the method that is scaled")
    factors: tuple[float, ...] = Field((1.0,), description="factors of the loss")

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        return self.factors[0] / num_members * loss(outputs, target)


class Fitted(Picky):
    """A model that is fitted and does not learn by gradients."""

    fitted = True
