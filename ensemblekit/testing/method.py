"""The contract of a method: what its hooks answer, as pure functions of the members' outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ensemblekit.core.hooks import implemented_hooks
from ensemblekit.core.plugin import Method
from ensemblekit.core.seeds import generator
from ensemblekit.testing.checks import Check, ContractError, asked_gently, difference, form, look_at, on_meta_too
from ensemblekit.testing.common import hooks_are_known
from ensemblekit.testing.method_fixture import BATCH, HOOKS_THAT_ANSWER, MethodBench
from ensemblekit.testing.method_hooks import RARE_HOOK_CHECKS
from ensemblekit.testing.method_training import RUN_CHECKS
from ensemblekit.testing.numeric_gradients import derivatives

ROUNDING = 1e-9
"""What sums in another order may differ by in float64."""


def method_checks(method: Method) -> list[Check]:
    """The checks of a method besides those of any plugin; only its formula if its hooks cannot even be registered."""
    bench = MethodBench(method)

    def check(name: str, function: Callable[[MethodBench], None], *needs: Check) -> Check:
        return Check(name, method, partial(function, bench), needs)

    stated = check("its formula is given", formula)
    if not hooks_are_known(method):
        return [stated]
    right_form = check("hooks return the right shape, dtype and device", answers)
    usable = replace(right_form, examine=partial(answers, bench, devices=("cpu",)))  # enough for the others
    pure = check("hooks have no memory and no randomness of their own", deterministic, usable)
    rare = [
        check("sample weights are valid and drawn member by member", sample_weights, usable),
        check("life-cycle hooks answer within range", life_cycle_answers, usable),
        *(check(name, function, usable) for name, function in RARE_HOOK_CHECKS.items()),
    ]
    found = [
        right_form,
        check("every hook gives an answer", answered, usable, *rare),
        check("gradients are finite", finite_gradients, usable, pure),
        check("gradients are those of the objective", right_gradients, usable, pure),
        check("it works with one member", one_member, usable, pure),
        check("the order of samples does not matter", permuted_batch, usable, pure),
        check("what is declared separable is separable", separable, usable, pure),
        pure,
        *rare,
    ]
    return [stated, *found, *(check(name, function, *found) for name, function in RUN_CHECKS.items())]


def formula(bench: MethodBench) -> None:
    """`inspect` and `validate` show what the method minimises."""
    if not bench.method_class.formula.strip():
        raise ContractError(
            "the formula of what the method minimises", "none", look_at(bench.method_class), 'write formula = "…"'
        )


def answers(bench: MethodBench, devices: Iterable[str] = ("cpu", "meta")) -> None:
    """Every hook by itself, in both precisions, on the CPU and on `meta`, where no value can be read."""
    for device in devices:
        for dtype in (torch.float32, torch.float64):
            outputs = bench.outputs().to(device, dtype)
            target = bench.target().to(device)
            target = target.to(dtype) if target.is_floating_point() else target
            for hook in bench.hooks():
                _check_answer(bench, hook, outputs, target)


def _check_answer(bench: MethodBench, hook: str, outputs: Tensor, target: Tensor) -> None:
    where = look_at(bench.method_class, hook)
    with on_meta_too(outputs.device, bench.method_class, hook):
        arguments = bench.arguments(hook, outputs.clone(), target.clone())
        answer = asked_gently(bench.method_class, hook, partial(bench.ask, hook), arguments)
    if answer is None:
        return
    members, batch, num_outputs = outputs.shape
    if hook == "select_members":
        sizes = tuple(answer.shape) if isinstance(answer, Tensor) else (0,)
        pairs = zip(reversed(sizes), (batch, members), strict=False)
        fits = len(sizes) <= 2 and all(size in (1, full) for size, full in pairs)
        if fits and answer.device == outputs.device and answer.dtype in (torch.bool, outputs.dtype):
            return
        expected = f"a mask that broadcasts to {(members, batch)}, bool or of the outputs' dtype, on {outputs.device}"
        fix = _advice(hook, answer, answer.shape if fits else None, outputs)
        raise ContractError(expected, form(answer), where, fix)
    shape = {"combine": (batch, num_outputs), "member_loss": (members, batch), "ensemble_loss": (batch,)}[hook]
    expected = form(torch.empty(shape, dtype=outputs.dtype, device=outputs.device))
    if form(answer) != expected:
        fix = _advice(hook, answer, shape, outputs)
        raise ContractError(f"{expected} for outputs of {form(outputs)}", form(answer), where, fix)


RIGHT_SHAPE = {
    "combine": "reduce over the members alone, the first dimension of outputs",
    "member_loss": "give a loss for each member and sample: no sum() or mean() over members or the batch",
    "ensemble_loss": "give a loss for each sample: no sum() or mean() over the batch, and none for single members",
    "select_members": "give one entry for each member and sample, or 1 where all are treated alike",
}


def _advice(hook: str, answer: object, shape: tuple[int, ...] | None, outputs: Tensor) -> str:
    """How to mend an answer, by what is wrong with it; shape None: no shape of it would do."""
    if not isinstance(answer, Tensor):
        return "return a tensor"
    if tuple(answer.shape) != shape:
        return RIGHT_SHAPE[hook]
    if answer.device != outputs.device:
        return "make new tensors on outputs.device, as outputs.new_zeros(…) does"
    if hook == "select_members":
        return "compare, as in losses <= limit, for a mask of bool; or end with .to(outputs.dtype)"
    return "keep the outputs' own dtype: no .float() or .double(), and new tensors as outputs.new_zeros(…) makes them"


def answered(bench: MethodBench) -> None:
    """A hook that never answers is like none at all, and so is a method without hooks."""
    if not implemented_hooks(bench.method_class) and (without_use := _own_names(bench.method_class)):
        raise ContractError(
            "at least one hook",
            f"none, and nothing that asks for {without_use[0]}",
            look_at(bench.method_class),
            "implement hooks of ensemblekit.core.hookspecs with @hookimpl, such as member_loss",
        )
    for hook in bench.hooks(HOOKS_THAT_ANSWER):
        if all(answer is None for answer in bench.answers(hook)) and not bench.means_none(hook):
            raise ContractError(
                "something other than None, which leaves the answer to others",
                "None at every call",
                look_at(bench.method_class, hook),
                "end the hook with return …; if it leaves the answer to others on purpose, let it say return None",
            )


def _own_names(method_class: type[Method]) -> list[str]:
    """The parameters and functions that a class has and `Method` has not."""
    functions = [name for name in dir(method_class) if inspect.isfunction(inspect.getattr_static(method_class, name))]
    own = [name for name in functions if not hasattr(Method, name)]
    return [*method_class.model_fields, *own]


def finite_gradients(bench: MethodBench) -> None:
    """Also where square roots, norms and logarithms have none: equal members, and members that are very sure."""
    ordinary = bench.outputs().float()
    target = bench.target()
    target = target.float() if target.is_floating_point() else target
    points = {
        "ordinary outputs": ordinary,
        "members with equal outputs": ordinary[:1].expand_as(ordinary).clone(),
        "outputs that are all zero": torch.zeros_like(ordinary),
        "outputs of size 100": 100 * ordinary.sign(),
    }
    for name, point in points.items():
        value, gradient = _gradient(lambda outputs: bench.objective(outputs, target), point)
        if bool(value.isfinite()) and bool(gradient.isfinite().all()):
            continue
        bad = "the objective is" if not bool(value.isfinite()) else f"{int((~gradient.isfinite()).sum())} entries are"
        where = bench.culprit(partial(_gradient_is_not_finite, point=point))
        raise ContractError(
            f"a finite objective and gradient for {name}",
            f"{bad} not finite",
            where,
            "look for log, sqrt, norm or division at 0; a small constant inside, not a clamp after, helps",
        )


def _gradient(function: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    """A scalar function's value and gradient; zero where it depends on nothing."""
    leaf = point.clone().requires_grad_()
    value = function(leaf)
    if not value.requires_grad:
        return value, torch.zeros_like(point)
    (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return value.detach(), torch.zeros_like(point) if gradient is None else gradient


def _gradient_is_not_finite(function: Callable[[Tensor], Tensor], point: Tensor) -> bool:
    value, gradient = _gradient(function, point)
    return not (bool(value.isfinite()) and bool(gradient.isfinite().all()))


def right_gradients(bench: MethodBench) -> None:
    """Autograd against central differences in float64; what the method detaches is held still in both."""
    outputs, target = bench.outputs(), bench.target()
    analytical, numerical = derivatives(lambda leaf: bench.objective(leaf, target), outputs)
    if wrong := difference(analytical, numerical, 1e-5):
        where = bench.culprit(lambda summed: bool(difference(*derivatives(summed, outputs), 1e-5)))
        raise ContractError(
            "the gradient that central differences give, in float64",
            f"d objective / d outputs is {wrong} (member, sample, output)",
            where,
            "look for a custom backward, in-place changes, or values that went through NumPy or Python numbers",
        )
    for hook in bench.hooks(("member_loss", "ensemble_loss")):
        answer = bench.answer(hook, outputs.clone().requires_grad_(), target)
        if answer is not None and not answer.requires_grad and bool(answer.any()):
            raise ContractError(
                "a loss from which members learn, or zeros",
                "a loss that is a constant to them: no gradient flows from it to the outputs",
                look_at(bench.method_class, hook),
                "compute it from outputs or combined, not from detach() of them nor under torch.no_grad()",
            )
    if not bool(analytical.any()):
        hooks = bench.hooks(("member_loss", "ensemble_loss", "select_members"))
        raise ContractError(
            "an objective that teaches some member something",
            "a gradient that is zero everywhere",
            look_at(bench.method_class, hooks[0] if hooks else ""),
            "return losses that depend on outputs, not on outputs.detach()",
        )


def one_member(bench: MethodBench) -> None:
    """An ensemble of one is a network like any other, unless the method's parameters or `check_spec` exclude it."""
    start = bench.objective.hooks.hook.members_at_start(num_members=bench.members)
    if start != 1 and (bench.method.required_members() not in (None, 1) or not bench.accepts(1)):
        return
    outputs, target = bench.outputs(1), bench.target()
    value, gradient = _gradient(lambda leaf: bench.objective(leaf, target), outputs)
    combined = bench.objective.combine(outputs)
    if not (bool(value.isfinite()) and bool(gradient.isfinite().all()) and bool(combined.isfinite().all())):
        where = bench.culprit(partial(_gradient_is_not_finite, point=outputs))
        got = f"objective {float(value):.4g}, {int((~gradient.isfinite()).sum())} entries of its gradient not finite"
        fix = "a sum over the other members is empty: divide by max(num_members - 1, 1)"
        raise ContractError("finite numbers for M = 1", got, where, fix)


def permuted_batch(bench: MethodBench) -> None:
    """The objective is a mean over samples, and each sample's part goes with it."""
    outputs, target = bench.outputs(), bench.target()
    order = torch.arange(BATCH - 1, -1, -1)
    for hook in bench.hooks():
        plain, moved = (bench.answer(hook, *pair) for pair in ((outputs, target), (outputs[:, order], target[order])))
        if plain is None or moved is None:
            continue
        dim = {"combine": 0, "ensemble_loss": 0}.get(hook, plain.ndim - 1)
        expected = plain if plain.shape[dim] == 1 else plain.index_select(dim, order)
        if wrong := difference(moved.double(), expected.double(), ROUNDING):
            raise ContractError(
                "what a sample gets to be the same wherever it stands in the batch",
                f"with the samples in reverse order, {wrong}",
                look_at(bench.method_class, hook),
                "use nothing of a sample's position; sums over the batch are allowed",
            )


def separable(bench: MethodBench) -> None:
    """Members of a separable objective are computed one by one, so their parts must add up to the whole."""
    if not bench.objective.separable:
        return
    outputs, target = bench.outputs(), bench.target()
    random = generator(0, "contract", "weights")
    weights = torch.rand(BATCH, bench.members, generator=random, dtype=torch.float64)
    whole, gradient = _gradient(lambda leaf: bench.objective(leaf, target, weights), outputs)
    parts, slices = [], []
    for member in range(bench.members):
        own = weights[:, member : member + 1]
        part_of = partial(bench.objective, target=target, weights=own, ensemble_size=bench.members)
        part, piece = _gradient(part_of, outputs[member : member + 1])
        parts.append(part)
        slices.append(piece)
    wrong_value = difference(torch.stack(parts).sum(), whole, ROUNDING)
    wrong_gradient = difference(torch.cat(slices), gradient, ROUNDING)
    if wrong_value or wrong_gradient:
        declared = bench.method_class.separable is not Method.separable
        raise ContractError(
            "the members' parts of the objective, each computed from its own outputs (1, B, C), to add up to the whole",
            f"a sum of {wrong_value}" if wrong_value else f"a gradient of {wrong_gradient}",
            look_at(bench.method_class, "separable" if declared else "combine"),
            "let separable() return False, or use num_members for M instead of len(outputs)",
        )


def deterministic(bench: MethodBench) -> None:
    """The same outputs give the same bits at every call, whatever torch's global generator holds."""
    outputs, target = bench.outputs(), bench.target()
    for hook in bench.hooks():
        found = []
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            found.append(bench.answer(hook, outputs, target))
        first, second = found
        if (first is None) != (second is None) or (first is not None and not torch.equal(first, second)):
            got = "an answer one time and none the other"
            if first is not None and second is not None:
                got = f"at the second call {difference(second.double(), first.double(), 0.0)}"
            raise ContractError(
                "the same answer whenever the same outputs are given",
                got,
                look_at(bench.method_class, hook),
                "keep nothing between calls and draw nothing: what is random belongs to sample_weights, "
                "what changes in time to epoch_started",
            )


def sample_weights(bench: MethodBench) -> None:
    """Finite, not negative, a function of the seed, and of no other member."""
    if "sample_weights" not in implemented_hooks(bench.method_class):
        return
    where = look_at(bench.method_class, "sample_weights")
    num_samples = 50
    drawn = []
    for seed in (0, 1):
        torch.default_generator.manual_seed(seed)
        drawn.append(bench.objective.sample_weights(num_samples, bench.members, seed=0))
    first, second = drawn
    if first is None or second is None:
        return
    if not torch.equal(first, second):
        fix = "draw from the given generator only"
        raise ContractError("the same weights for the same seed", "other weights at the second call", where, fix)
    if bool((first < 0).any()):
        got = f"{float(first.min()):.4g} for a sample"
        raise ContractError("weights of at least 0", got, where, "a negative weight would reward mistakes; clip at 0")
    if not bool((first.sum(dim=0) > 0).all()):
        raise ContractError("some weight for every member", "a member whose weights are all 0", where)
    less = next((size for size in range(bench.members - 1, 0, -1) if bench.accepts(size)), 0)
    fewer = bench.objective.sample_weights(num_samples, less, seed=0) if less else None
    if fewer is not None and not torch.equal(first[:, :less], fewer):
        raise ContractError(
            "a member's weights not to depend on how many members there are",
            f"others for M = {less} than for M = {bench.members}",
            where,
            "draw member by member: torch.stack([draw(num_samples) for _ in range(num_members)], dim=1)",
        )


def life_cycle_answers(bench: MethodBench) -> None:
    """`members_at_start` is a number of members there are, `passes` a number, `learning_rate` a rate."""
    hooks = implemented_hooks(bench.method_class)
    if "members_at_start" in hooks:
        start = bench.objective.hooks.hook.members_at_start(num_members=bench.members)
        if isinstance(start, bool) or not isinstance(start, int) or not 1 <= start <= bench.members:
            where = look_at(bench.method_class, "members_at_start")
            raise ContractError(f"an integer from 1 to {bench.members}, or None", repr(start), where)
    if "passes" in hooks:
        passes = bench.objective.hooks.hook.passes(num_members=bench.members)
        if passes is not None and (isinstance(passes, bool) or not isinstance(passes, int) or passes < 1):
            where = look_at(bench.method_class, "passes")
            raise ContractError("an integer of at least 1, or None", repr(passes), where)
    if "learning_rate" in hooks:
        epochs = bench.spec.training.epochs
        for epoch in (0.0, 0.5, epochs / 2, epochs - 0.01):
            rate = bench.objective.hooks.hook.learning_rate(base=0.1, epoch=epoch, num_epochs=epochs)
            if rate is not None and not (isinstance(rate, int | float) and 0 <= rate < float("inf")):
                where = look_at(bench.method_class, "learning_rate")
                raise ContractError(f"a finite number of at least 0 at epoch {epoch}", repr(rate), where)
