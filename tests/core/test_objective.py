"""How the objective calls hooks, and what it says of hooks that break their contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.plain_methods import plain_methods

import ensemblekit as ek
from ensemblekit import Method, hookimpl
from ensemblekit.core.errors import DataError, NumericError, PluginError
from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.losses import NLL
from ensemblekit.core.objective import Objective

M, B, C = 3, 4, 5
OUTPUTS = torch.randn(M, B, C, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGET = torch.arange(B)


class Answers(Method):
    """Answers one hook with a given value."""

    hook: str
    value: Any

    @hookimpl
    def combine(self):
        return self.value if self.hook == "combine" else None

    @hookimpl
    def member_loss(self):
        return self.value if self.hook == "member_loss" else None

    @hookimpl
    def ensemble_loss(self):
        return self.value if self.hook == "ensemble_loss" else None

    @hookimpl
    def select_members(self):
        return self.value if self.hook == "select_members" else None

    @hookimpl
    def sample_weights(self):
        return self.value if self.hook == "sample_weights" else None

    @hookimpl
    def passes(self):
        return self.value if self.hook == "passes" else None

    @hookimpl
    def fit_combiner(self):
        return self.value if self.hook == "fit_combiner" else None


def wrong_answers():
    right_shape = {"combine": (B, C), "member_loss": (M, B), "ensemble_loss": (B,)}
    for hook, shape in right_shape.items():
        yield hook, torch.zeros(*shape, 1, dtype=torch.float64), "of shape"
        yield hook, torch.zeros(7, dtype=torch.float64), "of shape"
        yield hook, torch.zeros(shape, dtype=torch.float32), "float32"
        yield hook, torch.zeros(shape, dtype=torch.float64, device="meta"), "meta"
        yield hook, 1.0, "a float"
    yield "select_members", torch.ones(M + 1, B), "of shape"
    yield "select_members", torch.ones(2, M, B), "of shape"
    yield "select_members", torch.ones(M, B, device="meta"), "meta"
    yield "select_members", [True] * M, "a list"


@pytest.mark.parametrize(("hook", "value", "got"), list(wrong_answers()))
def test_a_hook_that_returns_the_wrong_thing_is_named_with_its_plugin(hook, value, got):
    with pytest.raises(PluginError) as error:
        ek.objective(["gncl", Answers(hook=hook, value=value)], OUTPUTS, TARGET)
    message = str(error.value)
    assert 'plugin "answers"' in message
    assert f'hook "{hook}"' in message
    assert got in message
    assert "expected" in message
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    "value", [torch.ones(7, 2), torch.ones(2, 7), torch.ones(7, M, dtype=torch.int64), "weights"], ids=str
)
def test_sample_weights_of_the_wrong_form_are_named_with_their_plugin(value):
    with pytest.raises(PluginError, match=r'plugin "answers": hook "sample_weights"'):
        ek.draw_sample_weights(Answers(hook="sample_weights", value=value), 7, M)


@pytest.mark.parametrize("value", [torch.ones(M, dtype=torch.int64), torch.ones(M, device="meta"), [1.0] * M], ids=str)
def test_a_fitted_combiner_of_the_wrong_form_is_named_with_its_plugin(value):
    objective = Objective([Answers(hook="fit_combiner", value=value)], ek.MSE())
    with pytest.raises(PluginError, match=r'plugin "answers": hook "fit_combiner"'):
        objective.fit_combiner(OUTPUTS, TARGET)


def test_a_fitted_combiner_that_is_not_finite_is_refused():
    objective = Objective([Answers(hook="fit_combiner", value=torch.full((M,), torch.nan))], ek.MSE())
    with pytest.raises(NumericError, match=r'plugin "answers": hook "fit_combiner"'):
        objective.fit_combiner(OUTPUTS, TARGET)


class Fits(Method):
    """Fits one number, and combines by it."""

    number: float

    @hookimpl
    def fit_combiner(self, outputs):
        return torch.tensor(self.number, dtype=outputs.dtype)

    @hookimpl
    def combine(self, outputs, fitted):
        return outputs[0] if fitted is None else outputs[0] + fitted


def test_the_combiner_of_the_last_listed_method_is_fitted_and_used_but_not_in_training():
    objective = Objective([Fits(number=1.0), Fits(number=2.0).named("second")], ek.MSE())
    fitted = objective.fit_combiner(OUTPUTS, TARGET)
    assert torch.equal(objective.predict(OUTPUTS, fitted), OUTPUTS[0] + 2)
    assert torch.equal(objective.combine(OUTPUTS), OUTPUTS[0])
    assert objective.hooks.fits_combiner
    assert Objective([], ek.MSE()).fit_combiner(OUTPUTS, TARGET) is None


@pytest.mark.parametrize(("value", "got"), [(0, "returned 0"), (True, "True"), (2.5, "a float"), ("16", "a str")])
def test_a_number_of_passes_that_is_none_is_named_with_its_plugin(value, got):
    hooks = RunHooks([Answers(hook="passes", value=value)])
    with pytest.raises(PluginError, match=rf'(?s)plugin "answers": hook "passes" .*{got}.*at least 1'):
        hooks.passes(M)


def test_the_last_listed_method_that_answers_says_how_many_passes_there_are():
    answers = [Answers(hook="passes", value=value).named(f"answers{value}") for value in (2, 3, None)]
    assert RunHooks(answers).passes(M) == 3
    assert RunHooks([]).passes(M) is None


def test_each_pass_is_combined_by_itself_and_the_results_are_averaged():
    boosting = Objective([ek.methods()["boosting"].load()()], ek.MSE())
    passes = torch.stack([OUTPUTS, 3 * OUTPUTS])
    torch.testing.assert_close(boosting.predict(passes.flatten(0, 1), passes=2), 2 * OUTPUTS.sum(dim=0))


def test_sample_weights_that_are_not_finite_are_refused():
    with pytest.raises(NumericError, match=r'plugin "answers": hook "sample_weights"'):
        ek.draw_sample_weights(Answers(hook="sample_weights", value=torch.full((7, M), torch.inf)), 7, M)


@pytest.mark.parametrize(
    ("hook", "shape"),
    [("combine", (B, C)), ("member_loss", (M, B)), ("ensemble_loss", (B,)), ("select_members", (M, B))],
)
def test_a_value_that_is_not_finite_is_blamed_on_its_plugin(hook, shape):
    value = torch.full(shape, torch.nan, dtype=torch.float64)
    with pytest.raises(NumericError, match=f'plugin "answers": hook "{hook}"') as error:
        ek.objective(["end_to_end", Answers(hook=hook, value=value)], OUTPUTS, TARGET)
    assert error.value.exit_code == 6


def test_outputs_that_are_not_finite_are_blamed_on_their_member():
    outputs = OUTPUTS.clone()
    outputs[2, 1, 0] = torch.inf
    with pytest.raises(NumericError, match="outputs of member 2"):
        ek.objective("gncl", outputs, TARGET)


@pytest.mark.parametrize("method", ["independent", "gncl", "end_to_end"])
def test_raw_outputs_are_said_to_be_no_probabilities_instead_of_blaming_the_method(method):
    outputs = torch.tensor([[[0.3, -0.7]], [[2.0, 1.0]]])
    with pytest.raises(DataError, match=r"the outputs are not probabilities: the smallest is -0\.7") as error:
        ek.objective(method, outputs, torch.tensor([1]), loss="nll")
    assert "cross_entropy" in error.value.fix
    with pytest.raises(NumericError, match="the outputs are not probabilities"):
        Objective([], NLL()).check_finite(outputs, torch.tensor([1]))


def test_a_loss_that_overflows_is_named_with_its_member_and_sample():
    outputs = torch.tensor([[[1.0], [1.0]], [[1.0], [-1e4]]])
    with pytest.raises(NumericError, match='the loss "exponential" of member 1 is not finite for sample 1'):
        ek.objective("independent", outputs, torch.tensor([1, 1]), loss="exponential")
    with pytest.raises(NumericError, match='the loss "nll" of member 0') as error:
        ek.objective("independent", torch.tensor([[[1.0, 0.0]]]), torch.tensor([1]), loss="nll")
    assert "true class has probability 0" in error.value.fix


def test_a_member_that_is_left_out_may_have_an_infinite_loss():
    outputs = torch.tensor([[[0.5, 0.5]], [[0.0, 1.0]]])
    value = ek.objective("smcl", outputs, torch.tensor([0]), loss="nll")
    assert value.item() == pytest.approx(0.6931, abs=1e-4)


def test_masks_of_several_methods_multiply():
    first = Answers(hook="select_members", value=torch.tensor([[1.0], [0.0], [1.0]]))
    second = Answers(hook="select_members", value=torch.tensor([True, True, False, False])).named("second")
    losses = -OUTPUTS.log_softmax(-1)[:, torch.arange(B), TARGET]
    expected = (losses[[0, 2]][:, :2].sum() / M) / B
    torch.testing.assert_close(ek.objective([first, second], OUTPUTS, TARGET), expected)


def test_sample_weights_must_have_a_row_for_each_sample():
    with pytest.raises(DataError, match=r"one per sample and member: \(4, 3\)"):
        ek.objective("bagging", OUTPUTS, TARGET, sample_weights=torch.ones(M, B))


@pytest.mark.parametrize("outputs", [OUTPUTS[0], OUTPUTS.long()], ids=["two dimensions", "integers"])
def test_outputs_must_be_floating_point_of_three_dimensions(outputs):
    with pytest.raises(DataError, match=r"\(M, B, C\)"):
        Objective([], ek.MSE())(outputs, TARGET)


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("name", plain_methods())
def test_every_method_runs_on_the_device_of_its_inputs(name, loss):
    """On the meta device a stray CPU tensor, or reading a value back, fails."""
    outputs = torch.randn(M, B, C, device="meta", requires_grad=True)
    target = torch.zeros(B, dtype=torch.int64, device="meta")
    tables = [{"name": name}]
    tables += [{"name": name, "mode": mode} for mode in ("exact", "bounded") if name == "gncl"]
    tables += [{"name": name, "combine": "max"}] if name == "smcl" else []
    tables += [{"name": name, "penalty": p} for p in ("kl", "cross_entropy") if name == "diversity_cooperation"]
    tables += [{"name": name, "schedule": "stagewise"}] if name == "boosting" else []
    for table in tables:
        value = ek.objective(table, outputs, target, loss, sample_weights=torch.ones(B, M, device="meta"))
        (gradient,) = torch.autograd.grad(value, outputs)
        assert gradient.device.type == "meta"
        assert gradient.shape == outputs.shape


def test_exact_gncl_of_a_loss_without_closed_form_runs_on_the_device_of_its_inputs():
    outputs = torch.randn(M, B, 1, device="meta", requires_grad=True)
    target = torch.ones(B, dtype=torch.int64, device="meta")
    ek.objective({"name": "gncl", "mode": "exact"}, outputs, target, "exponential").backward()
    assert outputs.grad.device.type == "meta"


@pytest.mark.parametrize("name", plain_methods())
def test_no_method_reads_a_value_back_in_the_step(name, monkeypatch):
    objective = Objective([ek.methods()[name].load()()], ek.MSE())
    outputs = OUTPUTS.clone().requires_grad_()

    def forbidden(*_):
        raise AssertionError("a value was read back from the device")

    for reader in ("item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, reader, forbidden)
    objective(outputs, TARGET).backward()
