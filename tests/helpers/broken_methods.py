"""Methods with one fault each in documentation, objective or runs, and the checks that must find it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch
from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor

from ensemblekit import DataInfo, GrowingEnsemble, Loss, Method, Problem, Spec, hookimpl

DESCRIPTION = "its description is one sentence"
PARAMETERS = "every parameter is described"
ROUND_TRIP = "it round-trips through a spec"
KNOWN_HOOKS = "its hooks exist and take only known arguments"
FORMULA = "its formula is given"
RESULTS = "hooks return the right shape, dtype and device"
RETURNED = "every implemented hook returns a value"
FINITE = "gradients are finite"
CORRECT = "gradients match finite differences"
ONE_MEMBER = "it works with one member"
ORDER = "the order of samples does not matter"
SEPARABLE = "a separable objective is the sum over its members"
LINEAR = "linear terms agree with the hooks"
PURE = "hooks are deterministic and keep no state"
WEIGHTS = "sample weights are valid and drawn per member"
FITTED = "fitting the combiner is deterministic"
MEMBERS = "members have views and weights of their own"
RANKS = "it gives the same numbers on several ranks"
SECOND = "second inputs are computed elementwise"
LIFE_CYCLE = "life-cycle hooks return values in range"
ENGINES = "all engines agree"
RESUMES = "a resumed run is bit-identical"
STATE = "what it remembers is part of its state"


class Good(Method):
    """Has no fault."""

    formula = "sum_i l(h_i, y)"

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target)


class ADP(Method):
    """Diversifies the probabilities of the wrong classes, of which there must be more than members."""

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
            yield Problem("/ensemble.members", "as many members as classes, or more", "use fewer members")


class EvenOnly(Good):
    """Pairs members, so that their number must be even."""

    @hookimpl
    def ensemble_loss(self, outputs: Tensor, num_members: int) -> Tensor:
        pairs = outputs.view(num_members // 2, 2, *outputs.shape[1:])
        return -(pairs[:, 0] - pairs[:, 1]).square().sum(dim=(0, 2))

    @hookimpl
    def sample_weights(self, num_samples: int, num_members: int) -> Tensor:
        return torch.ones(num_samples, num_members // 2).repeat_interleave(2, dim=1)

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.ensemble.members % 2:
            yield Problem("/ensemble.members", "an odd number of members", "add one member")


class FourOrMore(Good):
    """Needs at least four members."""

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.ensemble.members < 4:
            yield Problem("/ensemble.members", "fewer than four members", "use four")


class ForTwoClasses(Good):
    """Can be used with losses for two classes only."""

    def check_spec(self, spec: Spec) -> Iterable[Problem]:
        if spec.loss.takes != "margins":
            yield Problem("/training.loss", "not a loss of a margin", "use gaussian_hinge")


class ForOneValue(Good):
    """Can be used for one real value only."""

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if (info.task, info.num_outputs) != ("regression", 1):
            yield Problem("", "not one real value", "use another method")


GOOD = (Good, ADP, EvenOnly, FourOrMore, ForTwoClasses, ForOneValue)


class Undescribed(Good):
    pass


class EndsLate(Good):
    """A first line that goes on
    in the second."""


class BareParameter(Good):
    """Does not describe its parameter."""

    strength: float = 1.0


class ChangesItsValue(Good):
    """Reads back another value than it has written."""

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
    """Does not state its formula."""

    formula = ""


class Constant(Good):
    """Adds a loss without a gradient."""

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
    """Has a wrong custom backward."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return _WrongBackward.apply(loss(outputs, target))


class TeachesNothing(Good):
    """Has a gradient of zero."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target).detach() + 0 * outputs.sum(dim=-1)


class DividesByTheOthers(Good):
    """Divides by M - 1."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss, num_members: int) -> Tensor:
        return loss(outputs, target) * torch.ones_like(outputs[..., 0]) / torch.as_tensor(float(num_members - 1))


class FirstSampleOnly(Good):
    """Doubles the loss of the first sample."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        position = torch.arange(outputs.shape[1], device=outputs.device)
        return loss(outputs, target) * (1 + (position == 0).to(outputs.dtype))


class NotReallySeparable(Good):
    """Declares itself separable but couples members."""

    def separable(self) -> bool:
        return True

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target) / len(outputs)


class OnlyTheMainThread(Good):
    """Returns another loss in another thread."""

    def separable(self) -> bool:
        return True

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target) * (1 if threading.current_thread() is threading.main_thread() else 2)


class CountsEpochs(Good):
    """Counts epochs itself and loses the count when it is resumed."""

    _epochs: int = PrivateAttr(0)

    @hookimpl
    def epoch_started(self, ensemble: GrowingEnsemble) -> None:
        self._epochs += 1

    @hookimpl
    def learning_rate(self, base: float) -> float:
        return base / (1 + self._epochs)


class CountsSilently(Good):
    """Counts epochs without an effect yet."""

    _epochs: int = PrivateAttr(0)

    @hookimpl
    def epoch_started(self) -> None:
        self._epochs += 1


class Remembers(CountsEpochs):
    """Counts epochs, and its state has the count."""

    def state(self) -> Mapping[str, int]:
        return {"epochs": self._epochs}

    def load_state(self, state: Mapping[str, int]) -> None:
        self._epochs = state["epochs"]


class ForgetsAPart(CountsSilently):
    """Has a state, without all that it counts."""

    _steps: int = PrivateAttr(0)

    @hookimpl
    def step_finished(self) -> None:
        self._steps += 1

    def state(self) -> Mapping[str, int]:
        return {"epochs": self._epochs}

    def load_state(self, state: Mapping[str, int]) -> None:
        self._epochs = state["epochs"]


class StateOfObjects(Remembers):
    """Returns what no checkpoint can hold."""

    def state(self) -> Mapping[str, int]:
        return {"epochs": {self._epochs}}  # type: ignore[dict-item]


class LooksAtTheProcess(Good):
    """Its loss depends on whether the members are spread over several processes."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target) * (2 if torch.distributed.is_initialized() else 1)


class FreezesEveryone(Good):
    """Leaves no member that learns."""

    @hookimpl
    def epoch_started(self, ensemble: GrowingEnsemble) -> None:
        for member in range(len(ensemble)):
            ensemble.freeze(member)


class FreezesTheWrongOne(Good):
    """Freezes a member that does not exist."""

    @hookimpl
    def epoch_started(self, ensemble: GrowingEnsemble) -> None:
        ensemble.freeze(99)


class ClaimsOtherTerms(Good):
    """Says that its objective is another one than its hooks compute."""

    def linear_terms(self, num_members: int) -> tuple[float, float]:
        return 1 / num_members, 0.0

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        return loss(outputs, target)


class CallsBackward(Good):
    """Computes gradients itself."""

    @hookimpl
    def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
        losses = loss(outputs.requires_grad_(), target)
        losses.sum().backward()
        return losses


class RefusesEverything(Good):
    """Accepts no spec."""

    def check_spec(self, spec: object) -> list[Problem]:
        return [Problem("", "not today", "try tomorrow")]


class HasNoOpinion(Good):
    """Returns None for no problems."""

    def check_spec(self, spec: Spec) -> None:
        pass


FAULTS: list[tuple[type[Method], set[str], tuple[str, ...]]] = [
    (Undescribed, {DESCRIPTION}, ("no docstring", "Undescribed, ")),
    (EndsLate, {DESCRIPTION}, ('"A first line that goes on"',)),
    (BareParameter, {PARAMETERS}, ("strength", "description=")),
    (ChangesItsValue, {ROUND_TRIP}, ("strength=2.0",)),
    (Misspelt, {KNOWN_HOOKS}, ('no hook "membr_loss"', 'did you mean "member_loss"?')),
    (NoFormula, {FORMULA}, ("formula =",)),
    (Constant, {CORRECT}, ("no gradient flows", "Constant.ensemble_loss")),
    (SpreadRoot, {FINITE, ONE_MEMBER}, ("members with equal outputs", "SpreadRoot.ensemble_loss")),
    (WrongGradient, {CORRECT}, ("central differences", "WrongGradient.member_loss")),
    (TeachesNothing, {CORRECT}, ("zero everywhere", "TeachesNothing.member_loss")),
    (DividesByTheOthers, {ONE_MEMBER}, ("M = 1", "max(num_members - 1, 1)", "DividesByTheOthers.member_loss")),
    (FirstSampleOnly, {ORDER}, ("reverse order", "FirstSampleOnly.member_loss")),
    (NotReallySeparable, {SEPARABLE}, ("add up to the whole", "NotReallySeparable.separable")),
    (OnlyTheMainThread, {ENGINES}, ("threaded engine", "OnlyTheMainThread.member_loss")),
    (LooksAtTheProcess, {RANKS}, ("2 ranks to be bit-identical", "LooksAtTheProcess.member_loss")),
    (CountsSilently, {STATE}, ("another _epochs after a run", "CountsSilently.epoch_started")),
    (ForgetsAPart, {STATE}, ("another _steps", "ForgetsAPart.load_state")),
    (CountsEpochs, {RESUMES, STATE}, ("resumed after epoch 1 of 2", "CountsEpochs.epoch_started")),
    (
        FreezesEveryone,
        {RESUMES, STATE},
        ("every member is frozen at the start of epoch 1", "leave a member that learns"),
    ),
    (FreezesTheWrongOne, {RESUMES, STATE}, ("there is no member 99", "ensemble.freeze(99)")),
    (ClaimsOtherTerms, {LINEAR}, ("the objective and the gradient that the hooks give", "linear_terms gives")),
    (CallsBackward, {FINITE, CORRECT, ONE_MEMBER, LINEAR}, ("calls backward()", "CallsBackward.member_loss")),
    (RefusesEverything, {RESULTS}, ("not today", "tried: 3, 2, 4 members", "RefusesEverything.check_spec")),
    (HasNoOpinion, {RESULTS}, ("an iterable of Problem from check_spec()", "got: None", "HasNoOpinion.check_spec")),
]
