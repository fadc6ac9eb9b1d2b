"""Methods with one fault each in a hook, and the checks that must find it."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from ensemblekit import Loss, Method, hookimpl
from helpers.broken_methods import FITTED, LIFE_CYCLE, MEMBERS, PURE, RESULTS, RETURNED, SECOND, WEIGHTS, Good


class WrongShape(Good):
    """Returns one loss for the whole batch."""

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(combined, target).mean()


class AlwaysFloat32(Good):
    """Ignores the dtype of the outputs."""

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(combined, target).float()


class ReadsBack(Good):
    """Reads a value from the device."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        losses = loss(outputs, target)
        return losses if losses.max() > 1e9 else 2 * losses


class ThroughNumPy(Good):
    """Computes a weight with NumPy."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target) * float(outputs.detach().numpy().std())


class OnTheCPU(Good):
    """Creates a tensor on the CPU, whatever the device of the outputs."""

    @hookimpl
    def ensemble_loss(self, outputs: Tensor) -> Tensor:
        return torch.zeros(outputs.shape[1], dtype=outputs.dtype)


class NoTensor(Good):
    """Returns a number."""

    @hookimpl
    def ensemble_loss(self) -> float:
        return 0.0


class CentresInPlace(Good):
    """Shifts the outputs in place, which other hooks get too."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        outputs -= 1e-8
        return loss(outputs, target)


class ClampsInPlace(Good):
    """Clamps outputs in place, which changes only large ones."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs.clamp_(-1000, 1000), target)


class ScalesCombined(Good):
    """Doubles the combined output in place, which other hooks get too."""

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(combined.mul_(2), target)


class SortsHeldOutData(Good):
    """Sorts the held-out outputs in place."""

    @hookimpl
    def fit_combiner(self, outputs: Tensor) -> Tensor:
        outputs.copy_(outputs.sort(dim=1).values)
        return outputs[:, 0].mean(dim=1, keepdim=True)


class MovesInputs(Good):
    """Modifies the batch in place."""

    @hookimpl
    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        return inputs.add_(gradient.sign())


class ReadsInputs(Good):
    """Reads a value of the gradient back."""

    @hookimpl
    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        return inputs + 0.1 if float(gradient.abs().max()) > -1 else inputs


class OddMask(Good):
    """Returns a mask of integers."""

    @hookimpl
    def select_members(self, outputs: Tensor) -> Tensor:
        return torch.ones(1, outputs.shape[1], dtype=torch.int64, device=outputs.device)


class ForgetsToReturn(Good):
    """Computes a loss and does not return it."""

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor | None:
        loss(combined, target)


class ForgetsInOneBranch(Good):
    """Returns a mask only if a parameter is set."""

    hard: bool = Field(False, description="whether members are selected")

    @hookimpl  # noqa: RET503 - the fault
    def select_members(self, outputs: Tensor) -> Tensor | None:
        if self.hard:
            return torch.ones_like(outputs[..., 0], dtype=torch.bool)
        outputs.softmax(dim=-1)


class ForgetsARate(Good):
    """Computes a learning rate and does not return it."""

    @hookimpl
    def learning_rate(self, base: float, epoch: float) -> float | None:
        base / (1 + epoch)


class HelperForgets(Good):
    """Returns the result of a function that returns nothing."""

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int) -> Tensor | None:
        return self._weights(num_samples, num_members)

    def _weights(self, num_samples: int, num_members: int) -> Tensor | None:
        torch.ones(num_samples, num_members)


class ForgetsTheMoved(Good):
    """Computes second inputs and does not return them."""

    @hookimpl
    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        inputs + gradient


class ForgetsTheFit(Good):
    """Fits a combiner and does not return it."""

    @hookimpl
    def fit_combiner(self, outputs: Tensor) -> Tensor | None:
        outputs.mean(dim=(1, 2))


class FitsACount(Good):
    """Returns an integer as the fit."""

    @hookimpl
    def combine(self, outputs: Tensor, fitted: Tensor | None) -> Tensor | None:
        return None if fitted is None else outputs[int(fitted)]

    @hookimpl
    def fit_combiner(self) -> Tensor:
        return torch.tensor(0)


class NoHooks(Method):
    """Has a parameter that no hook uses."""

    formula = "sum_i l(h_i, y)"
    strength: float = Field(1.0, description="of nothing")


class Rolls(Good):
    """Samples from torch's global generator in every step."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        losses = loss(outputs, target)
        return losses * (1 + 1e-7 * torch.rand_like(losses).round(decimals=1))


class NegativeWeights(Good):
    """Samples negative weights."""

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int, generator: torch.Generator) -> Tensor:
        columns = [torch.randn(num_samples, generator=generator) for _ in range(num_members)]
        return torch.stack(columns, dim=1)


class DrawnTogether(Good):
    """Samples the weights of all members at once."""

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int, generator: torch.Generator) -> Tensor:
        return torch.rand(num_samples, num_members, generator=generator)


class GlobalWeights(Good):
    """Samples weights from torch's global generator."""

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int) -> Tensor:
        return torch.rand(num_samples, num_members)


class FitsAtRandom(Good):
    """Fits the combiner from a random start."""

    @hookimpl
    def fit_combiner(self, num_members: int) -> Tensor:
        return torch.rand(num_members)


class WholeGradient(Good):
    """Normalises the gradient over the whole batch."""

    @hookimpl
    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        return inputs + gradient / gradient.norm()


class RandomDirection(Good):
    """Adds noise to the inputs."""

    @hookimpl
    def second_inputs(self, inputs: Tensor) -> Tensor:
        return inputs + torch.randn_like(inputs)


class CroppedInputs(Good):
    """Removes the last column of the inputs."""

    @hookimpl
    def second_inputs(self, inputs: Tensor) -> Tensor:
        return inputs[..., :-1]


class NoPass(Good):
    """Asks for zero passes."""

    @hookimpl
    def passes(self) -> int:
        return 0


class NegativeRate(Good):
    """Has a negative learning rate within an epoch."""

    @hookimpl
    def learning_rate(self, base: float, epoch: float) -> float:
        return base if epoch == int(epoch) else -base


class OddWeights(Good):
    """Returns weights without a dimension of members."""

    @hookimpl
    def sample_weights(self, num_samples: int) -> Tensor:
        return torch.ones(num_samples)


class Crashes(Good):
    """Raises an exception in a hook."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        raise ZeroDivisionError("of all things")


class OnePenalty(Good):
    """Returns one penalty for all members."""

    @hookimpl
    def weight_penalty(self, weights: Tensor) -> Tensor:
        return weights.square().sum()


class CommonPenalty(Good):
    """Pulls members towards their mean, which they do not know."""

    @hookimpl
    def weight_penalty(self, weights: Tensor) -> Tensor:
        return (weights - weights.mean(dim=0)).square().sum(dim=1)


class CommonStep(Good):
    """Normalises the gradients of all members together."""

    @hookimpl
    def second_weights(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return weights + 0.1 * gradient / gradient.norm()


class GlobalViews(Good):
    """Samples views with torch's global generator."""

    @hookimpl
    def member_inputs(self, inputs: Tensor, members: Tensor) -> Tensor:
        return inputs + torch.randn(len(members), *inputs.shape, dtype=inputs.dtype, device=inputs.device)


class OneView(Good):
    """Returns one view for all members."""

    @hookimpl
    def member_inputs(self, inputs: Tensor) -> Tensor:
        return inputs * 2


FAULTS: list[tuple[type[Method], set[str], tuple[str, ...]]] = [
    (OnePenalty, {MEMBERS}, ("shape (2,)", "shape ()", "OnePenalty.weight_penalty")),
    (CommonPenalty, {MEMBERS}, ("nothing of the others", "CommonPenalty.weight_penalty")),
    (CommonStep, {MEMBERS}, ("nothing of the others", "CommonStep.second_weights")),
    (GlobalViews, {MEMBERS}, ("nothing of the others", "GlobalViews.member_inputs")),
    (OneView, {MEMBERS}, ("(2, 4, 6)", "(4, 6)", "OneView.member_inputs")),
    (WrongShape, {RESULTS}, ("float32 of shape (4,)", "shape ()", "no sum() or mean() over the batch")),
    (AlwaysFloat32, {RESULTS}, ("float64 of shape (4,)", "got: float32", "no .float()")),
    (OnTheCPU, {RESULTS}, ("on meta", "on cpu", "on outputs.device", "OnTheCPU.ensemble_loss")),
    (NoTensor, {RESULTS}, ("got: a float", "return a tensor", "NoTensor.ensemble_loss")),
    (ReadsBack, {RESULTS}, ("meta", ".item()", "member_loss(), ", "losses if losses.max() > 1e9")),
    (ThroughNumPy, {RESULTS}, ("on the meta device too", "no NumPy", "member_loss(), ", "numpy().std()")),
    (CentresInPlace, {RESULTS}, ("outputs changed in place", "outputs -= shift", "CentresInPlace.member_loss")),
    (ClampsInPlace, {RESULTS}, ("outputs changed in place", "ClampsInPlace.member_loss")),
    (ScalesCombined, {RESULTS}, ("combined changed in place", "ScalesCombined.ensemble_loss")),
    (SortsHeldOutData, {FITTED}, ("outputs changed in place", "SortsHeldOutData.fit_combiner")),
    (MovesInputs, {SECOND}, ("inputs changed in place", "MovesInputs.second_inputs")),
    (ReadsInputs, {SECOND}, ("on the meta device too", "second_inputs(), ")),
    (OddMask, {RESULTS}, ("a mask that broadcasts to (3, 4)", "int64 of shape (1, 4)", "a bool mask")),
    (ForgetsToReturn, {RETURNED}, ("None in every call", "end the hook with return", "ForgetsToReturn.ensemble_loss")),
    (ForgetsInOneBranch, {RETURNED}, ("write return None", "ForgetsInOneBranch.select_members")),
    (ForgetsARate, {RETURNED}, ("None in every call", "ForgetsARate.learning_rate")),
    (HelperForgets, {RETURNED}, ("None in every call", "HelperForgets.sample_weights")),
    (ForgetsTheMoved, {SECOND}, ("got: None", "ForgetsTheMoved.second_inputs")),
    (ForgetsTheFit, {RETURNED}, ("None in every call", "ForgetsTheFit.fit_combiner")),
    (FitsACount, {FITTED}, ("a floating-point tensor on cpu", "FitsACount.fit_combiner")),
    (NoHooks, {RETURNED}, ("at least one hook", "strength", "NoHooks, ")),
    (Rolls, {PURE}, ("the same result", "Rolls.member_loss")),
    (NegativeWeights, {WEIGHTS}, ("at least 0", "NegativeWeights.sample_weights")),
    (DrawnTogether, {WEIGHTS}, ("for M = 2 than for M = 3", "DrawnTogether.sample_weights")),
    (GlobalWeights, {WEIGHTS}, ("the same weights for the same seed",)),
    (
        OddWeights,
        {WEIGHTS},
        ("expected: a floating-point tensor of shape (50, 3)", "of shape (50,)", "OddWeights.sample_weights"),
    ),
    (FitsAtRandom, {FITTED}, ("the same fit", "FitsAtRandom.fit_combiner")),
    (WholeGradient, {SECOND}, ("two members at once", "WholeGradient.second_inputs")),
    (RandomDirection, {SECOND}, ("nothing random", "RandomDirection.second_inputs")),
    (CroppedInputs, {SECOND}, ("(4, 3, 2, 2)", "(4, 3, 2, 1)", "CroppedInputs.second_inputs")),
    (NoPass, {LIFE_CYCLE}, ("at least 1", "got: 0", "NoPass.passes")),
    (NegativeRate, {LIFE_CYCLE}, ("at least 0 at epoch 0.5", "NegativeRate.learning_rate")),
    (Crashes, {RESULTS}, ("ZeroDivisionError: of all things", "member_loss(), ", "raise ZeroDiv")),
]
