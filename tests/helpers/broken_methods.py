"""Methods with one fault each, and the checks that must find it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor

from ensemblekit import GrowingEnsemble, Loss, Method, Problem, Spec, hookimpl

DESCRIPTION = "its description is one sentence"
PARAMETERS = "every parameter is described"
ROUND_TRIP = "a spec says exactly what it is"
KNOWN_HOOKS = "hooks exist and name only known arguments"
FORMULA = "its formula is given"
ANSWERS = "hooks return the right shape, dtype and device"
ANSWERED = "every hook gives an answer"
FINITE = "gradients are finite"
RIGHT = "gradients are those of the objective"
ONE_MEMBER = "it works with one member"
ORDER = "the order of samples does not matter"
SEPARABLE = "what is declared separable is separable"
NO_MEMORY = "hooks have no memory and no randomness of their own"
WEIGHTS = "sample weights are valid and drawn member by member"
FITTED = "a combiner is fitted alike each time"
SECOND = "second inputs are made element by element"
LIFE_CYCLE = "life-cycle hooks answer within range"
ENGINES = "all engines give the same numbers"
RESUMES = "a run that was stopped goes on bit for bit"


class Good(Method):
    """Does nothing wrong."""

    formula = "sum_i l(h_i, y)"

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target)


class ADP(Method):
    """Lets members spread what they give to the wrong classes, which takes fewer members than wrong classes."""

    paper = "Pang et al. 2019, Improving Adversarial Robustness via Promoting Ensemble Diversity"
    formula = "sum_i l(h_i, y) - alpha H(f) - beta log det(G),  G_ij = cos of the wrong classes' probabilities"

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target)

    @hookimpl
    def ensemble_loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        probabilities = outputs.softmax(dim=-1)
        mean = probabilities.mean(dim=0)
        entropy = torch.special.entr(mean + 1e-20).sum(dim=-1)
        true = torch.arange(outputs.shape[-1], device=outputs.device) == target.unsqueeze(-1)
        wrong = probabilities.masked_fill(true, 0).transpose(0, 1)
        wrong = wrong / (wrong.square().sum(dim=-1, keepdim=True) + 1e-20).sqrt()
        gram = wrong @ wrong.mT + 1e-6 * torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device)
        return -2 * entropy - 0.5 * gram.logdet()

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        info = spec.data.info
        if info is not None and spec.ensemble.members > info.num_outputs - 1:
            yield Problem("/ensemble.members", "as many members as classes, or more", "have fewer")


class EvenOnly(Good):
    """Pairs members, so that none may be left over."""

    @hookimpl
    def ensemble_loss(self, outputs: Tensor, num_members: int) -> Tensor:
        pairs = outputs.view(num_members // 2, 2, *outputs.shape[1:])
        return -(pairs[:, 0] - pairs[:, 1]).square().sum(dim=(0, 2))

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int) -> Tensor:
        return torch.ones(num_samples, num_members // 2).repeat_interleave(2, dim=1)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.ensemble.members % 2:
            yield Problem("/ensemble.members", "an odd number of members", "add one")


class FourOrMore(Good):
    """Works with no fewer than four members."""

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.ensemble.members < 4:
            yield Problem("/ensemble.members", "fewer than four members", "have four")


GOOD = (Good, ADP, EvenOnly, FourOrMore)


class Undescribed(Good):
    pass


class EndsLate(Good):
    """A first line that goes on
    in the second."""


class BareParameter(Good):
    """Says nothing of its parameter."""

    strength: float = 1.0


class ChangesItsValue(Good):
    """Reads another value back than it wrote."""

    strength: float = Field(1.0, description="doubled whenever it is read")

    @field_validator("strength")
    @classmethod
    def _doubled(cls, strength: float) -> float:
        return 2 * strength


class Misspelt(Method):
    """Has a hook that does not exist."""

    formula = "none"

    @hookimpl
    def membr_loss(self, outputs: Tensor) -> Tensor:
        return outputs.sum(-1)


class NoFormula(Good):
    """Does not say what it minimises."""

    formula = ""


class WrongShape(Good):
    """Returns a loss of the whole batch."""

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
    """Makes a tensor on the CPU, wherever the outputs are."""

    @hookimpl
    def ensemble_loss(self, outputs: Tensor) -> Tensor:
        return torch.zeros(outputs.shape[1], dtype=outputs.dtype)


class NoTensor(Good):
    """Returns a number."""

    @hookimpl
    def ensemble_loss(self) -> float:
        return 0.0


class CentresInPlace(Good):
    """Centres the outputs that other hooks are given too."""

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
    """Doubles the ensemble's output that other hooks are given too."""

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(combined.mul_(2), target)


class SortsHeldOutData(Good):
    """Sorts the outputs that the ensemble is evaluated with."""

    @hookimpl
    def fit_combiner(self, outputs: Tensor) -> Tensor:
        outputs.copy_(outputs.sort(dim=1).values)
        return outputs[:, 0].mean(dim=1, keepdim=True)


class MovesInputs(Good):
    """Moves the batch itself."""

    @hookimpl
    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        return inputs.add_(gradient.sign())


class ReadsInputs(Good):
    """Moves inputs by a number that it reads."""

    @hookimpl
    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        return inputs + 0.1 if float(gradient.abs().max()) > -1 else inputs


class OddMask(Good):
    """Selects by a mask of indices."""

    @hookimpl
    def select_members(self, outputs: Tensor) -> Tensor:
        return torch.ones(1, outputs.shape[1], dtype=torch.int64, device=outputs.device)


class ForgetsToReturn(Good):
    """Computes a loss and keeps it to itself."""

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor | None:
        loss(combined, target)


class ForgetsInOneBranch(Good):
    """Answers only with other parameters than it has."""

    hard: bool = Field(False, description="whether members are chosen")

    @hookimpl  # noqa: RET503 - the fault
    def select_members(self, outputs: Tensor) -> Tensor | None:
        if self.hard:
            return torch.ones_like(outputs[..., 0], dtype=torch.bool)
        outputs.softmax(dim=-1)


class ForgetsARate(Good):
    """Computes a learning rate and keeps it to itself."""

    @hookimpl
    def learning_rate(self, base: float, epoch: float) -> float | None:
        base / (1 + epoch)


class HelperForgets(Good):
    """Hands on what a function of its own does not return."""

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int) -> Tensor | None:
        return self._weights(num_samples, num_members)

    def _weights(self, num_samples: int, num_members: int) -> Tensor | None:
        torch.ones(num_samples, num_members)


class ForgetsTheMoved(Good):
    """Moves inputs and keeps them to itself."""

    @hookimpl
    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor | None:
        inputs + gradient


class ForgetsTheFit(Good):
    """Fits a combiner and keeps it to itself."""

    @hookimpl
    def fit_combiner(self, outputs: Tensor) -> Tensor | None:
        outputs.mean(dim=(1, 2))


class FitsACount(Good):
    """Fits whole numbers."""

    @hookimpl
    def combine(self, outputs: Tensor, fitted: Tensor | None) -> Tensor | None:
        return None if fitted is None else outputs[int(fitted)]

    @hookimpl
    def fit_combiner(self) -> Tensor:
        return torch.tensor(0)


class NoHooks(Method):
    """Has a parameter that nothing asks for."""

    formula = "sum_i l(h_i, y)"
    strength: float = Field(1.0, description="of nothing")


class Constant(Good):
    """Lets the ensemble pay what nobody can change."""

    @hookimpl
    def ensemble_loss(self, combined: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(combined.detach(), target)


class SpreadRoot(Good):
    """Takes the root of a spread that may be zero."""

    @hookimpl
    def ensemble_loss(self, outputs: Tensor, combined: Tensor) -> Tensor:
        return (outputs - combined).square().sum(dim=(0, 2)).sqrt()


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


class WrongGradient(Good):
    """Has a backward of its own that is wrong."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return _WrongBackward.apply(loss(outputs, target))


class TeachesNothing(Good):
    """Detaches all that members could learn from."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target).detach() + 0 * outputs.sum(dim=-1)


class DividesByTheOthers(Good):
    """Divides by M - 1."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        return loss(outputs, target) * torch.ones_like(outputs[..., 0]) / torch.as_tensor(float(num_members - 1))


class FirstSampleOnly(Good):
    """Lets the first sample of a batch count double."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        position = torch.arange(outputs.shape[1], device=outputs.device)
        return loss(outputs, target) * (1 + (position == 0).to(outputs.dtype))


class NotReallySeparable(Good):
    """Says that it is separable and couples members."""

    def separable(self) -> bool:
        return True

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target) / len(outputs)


class Rolls(Good):
    """Draws from torch's global generator at every step."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        losses = loss(outputs, target)
        return losses * (1 + 1e-7 * torch.rand_like(losses).round(decimals=1))


class NegativeWeights(Good):
    """Draws weights below zero."""

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int, generator: torch.Generator) -> Tensor:
        columns = [torch.randn(num_samples, generator=generator) for _ in range(num_members)]
        return torch.stack(columns, dim=1)


class DrawnTogether(Good):
    """Draws the weights of all members at once."""

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int, generator: torch.Generator) -> Tensor:
        return torch.rand(num_samples, num_members, generator=generator)


class GlobalWeights(Good):
    """Draws weights from torch's global generator."""

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int) -> Tensor:
        return torch.rand(num_samples, num_members)


class FitsAtRandom(Good):
    """Starts its search for the combiner's weights anywhere."""

    @hookimpl
    def fit_combiner(self, num_members: int) -> Tensor:
        return torch.rand(num_members)


class WholeGradient(Good):
    """Moves inputs along the gradient of the whole batch, scaled to one length."""

    @hookimpl
    def second_inputs(self, inputs: Tensor, gradient: Tensor) -> Tensor:
        return inputs + gradient / gradient.norm()


class RandomDirection(Good):
    """Moves inputs anywhere."""

    @hookimpl
    def second_inputs(self, inputs: Tensor) -> Tensor:
        return inputs + torch.randn_like(inputs)


class CroppedInputs(Good):
    """Cuts the inputs' last column off."""

    @hookimpl
    def second_inputs(self, inputs: Tensor) -> Tensor:
        return inputs[..., :-1]


class NoPass(Good):
    """Makes no pass at all."""

    @hookimpl
    def passes(self) -> int:
        return 0


class NegativeRate(Good):
    """Learns backwards within an epoch."""

    @hookimpl
    def learning_rate(self, base: float, epoch: float) -> float:
        return base if epoch == int(epoch) else -base


class OnlyTheMainThread(Good):
    """Computes something else in another thread."""

    def separable(self) -> bool:
        return True

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target) * (1 if threading.current_thread() is threading.main_thread() else 2)


class CountsEpochs(Good):
    """Counts epochs itself and forgets them when it is resumed."""

    _epochs: int = PrivateAttr(0)

    @hookimpl
    def epoch_started(self, ensemble: GrowingEnsemble) -> None:
        self._epochs += 1

    @hookimpl
    def learning_rate(self, base: float) -> float:
        return base / (1 + self._epochs)


class RefusesEverything(Good):
    """Accepts no spec."""

    def check_spec(self, spec: object) -> list[Problem]:
        return [Problem("", "not today", "try tomorrow")]


class HasNoOpinion(Good):
    """Returns None for no problems."""

    def check_spec(self, spec: Spec) -> None:
        pass


class OddWeights(Good):
    """Draws a weight for each sample, and none for each member."""

    @hookimpl
    def sample_weights(self, num_samples: int) -> Tensor:
        return torch.ones(num_samples)


class Crashes(Good):
    """Raises when it is asked for a loss."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        raise ZeroDivisionError("of all things")


FAULTS: list[tuple[type[Method], set[str], tuple[str, ...]]] = [
    (Undescribed, {DESCRIPTION}, ("no docstring", "Undescribed, ")),
    (EndsLate, {DESCRIPTION}, ('"A first line that goes on"',)),
    (BareParameter, {PARAMETERS}, ("strength", "description=")),
    (ChangesItsValue, {ROUND_TRIP}, ("strength=2.0",)),
    (Misspelt, {KNOWN_HOOKS}, ('no hook "membr_loss"', 'did you mean "member_loss"?')),
    (NoFormula, {FORMULA}, ("formula =",)),
    (WrongShape, {ANSWERS}, ("float32 of shape (4,)", "shape ()", "no sum() or mean() over the batch")),
    (AlwaysFloat32, {ANSWERS}, ("float64 of shape (4,)", "got: float32", "no .float()")),
    (OnTheCPU, {ANSWERS}, ("on meta", "on cpu", "on outputs.device", "OnTheCPU.ensemble_loss")),
    (NoTensor, {ANSWERS}, ("got: a float", "return a tensor", "NoTensor.ensemble_loss")),
    (ReadsBack, {ANSWERS}, ("meta", ".item()", "member_loss(), ", "losses if losses.max() > 1e9")),
    (ThroughNumPy, {ANSWERS}, ("on the meta device too", "no NumPy", "member_loss(), ", "numpy().std()")),
    (CentresInPlace, {ANSWERS}, ("outputs changed in place", "outputs -= shift", "CentresInPlace.member_loss")),
    (ClampsInPlace, {ANSWERS}, ("outputs changed in place", "ClampsInPlace.member_loss")),
    (ScalesCombined, {ANSWERS}, ("combined changed in place", "ScalesCombined.ensemble_loss")),
    (SortsHeldOutData, {FITTED}, ("outputs changed in place", "SortsHeldOutData.fit_combiner")),
    (MovesInputs, {SECOND}, ("inputs changed in place", "MovesInputs.second_inputs")),
    (ReadsInputs, {SECOND}, ("on the meta device too", "second_inputs(), ")),
    (OddMask, {ANSWERS}, ("a mask that broadcasts to (3, 4)", "int64 of shape (1, 4)", "a mask of bool")),
    (ForgetsToReturn, {ANSWERED}, ("None at every call", "end the hook with return", "ForgetsToReturn.ensemble_loss")),
    (ForgetsInOneBranch, {ANSWERED}, ("let it say return None", "ForgetsInOneBranch.select_members")),
    (ForgetsARate, {ANSWERED}, ("None at every call", "ForgetsARate.learning_rate")),
    (HelperForgets, {ANSWERED}, ("None at every call", "HelperForgets.sample_weights")),
    (ForgetsTheMoved, {SECOND}, ("got: None", "ForgetsTheMoved.second_inputs")),
    (ForgetsTheFit, {ANSWERED}, ("None at every call", "ForgetsTheFit.fit_combiner")),
    (FitsACount, {FITTED}, ("a floating-point tensor on cpu", "FitsACount.fit_combiner")),
    (NoHooks, {ANSWERED}, ("at least one hook", "strength", "NoHooks, ")),
    (Constant, {RIGHT}, ("no gradient flows", "Constant.ensemble_loss")),
    (SpreadRoot, {FINITE, ONE_MEMBER}, ("members with equal outputs", "SpreadRoot.ensemble_loss")),
    (WrongGradient, {RIGHT}, ("central differences", "WrongGradient.member_loss")),
    (TeachesNothing, {RIGHT}, ("zero everywhere", "TeachesNothing.member_loss")),
    (DividesByTheOthers, {ONE_MEMBER}, ("M = 1", "max(num_members - 1, 1)", "DividesByTheOthers.member_loss")),
    (FirstSampleOnly, {ORDER}, ("reverse order", "FirstSampleOnly.member_loss")),
    (NotReallySeparable, {SEPARABLE}, ("add up to the whole", "NotReallySeparable.separable")),
    (Rolls, {NO_MEMORY}, ("the same answer", "Rolls.member_loss")),
    (NegativeWeights, {WEIGHTS}, ("at least 0", "NegativeWeights.sample_weights")),
    (DrawnTogether, {WEIGHTS}, ("for M = 2 than for M = 3", "DrawnTogether.sample_weights")),
    (GlobalWeights, {WEIGHTS}, ("the same weights for the same seed",)),
    (
        OddWeights,
        {WEIGHTS},
        ("expected: floating-point of shape (50, 3)", "of shape (50,)", "OddWeights.sample_weights"),
    ),
    (FitsAtRandom, {FITTED}, ("the same fit", "FitsAtRandom.fit_combiner")),
    (WholeGradient, {SECOND}, ("two members at once", "WholeGradient.second_inputs")),
    (RandomDirection, {SECOND}, ("nothing random", "RandomDirection.second_inputs")),
    (CroppedInputs, {SECOND}, ("(4, 3, 2, 2)", "(4, 3, 2, 1)", "CroppedInputs.second_inputs")),
    (NoPass, {LIFE_CYCLE}, ("at least 1", "got: 0", "NoPass.passes")),
    (NegativeRate, {LIFE_CYCLE}, ("at least 0 at epoch 0.5", "NegativeRate.learning_rate")),
    (OnlyTheMainThread, {ENGINES}, ("threaded engine", "OnlyTheMainThread.member_loss")),
    (CountsEpochs, {RESUMES}, ("taken up after epoch 2 of 4", "CountsEpochs.epoch_started")),
    (RefusesEverything, {ANSWERS}, ("not today", "tried were 3, 2, 4 members", "RefusesEverything.check_spec")),
    (HasNoOpinion, {ANSWERS}, ("problems from check_spec()", "got: None", "HasNoOpinion.check_spec")),
    (Crashes, {ANSWERS}, ("ZeroDivisionError: of all things", "member_loss(), ", "raise ZeroDiv")),
]
