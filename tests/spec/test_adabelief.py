"""AdaBelief is bit-identical to adabelief-pytorch, in every setting, where torch computes it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from adabelief_pytorch import AdaBelief as Reference

from ensemblekit.core import kernels
from ensemblekit.spec.adabelief import AdaBelief, rectification

SETTINGS = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "fixed_decay": True},
    {"weight_decay": 0.1, "weight_decouple": False},
    {"betas": (0.5, 0.9), "eps": 1e-8},
    {"degenerated_to_sgd": False},
    {"rectify": False},
    {"amsgrad": True},
    {"amsgrad": True, "rectify": False, "weight_decay": 0.1},
]


def after_steps(optimizer_class: type, dtype: torch.dtype, settings: dict) -> tuple[list[torch.Tensor], dict]:
    """Return the parameters after more steps than the rectification needs to set in, and the state of the first."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in [(3, 5), (7,), (2,)]]
    with contextlib.redirect_stdout(None):
        optimizer = optimizer_class(parameters, lr=0.01, **{"eps": 1e-12, **settings})
    for step in range(20):
        for parameter in parameters[:2]:  # the last has no gradient
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
    return parameters, optimizer.state[parameters[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_setting_is_bit_identical_to_the_package(settings, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "library", lambda: None)
    found, state = after_steps(AdaBelief, dtype, settings)
    expected, expected_state = after_steps(Reference, dtype, settings)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
    assert state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        assert torch.equal(torch.as_tensor(state[key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_compiled_code_gives_the_same_up_to_rounding(settings):
    found, state = after_steps(AdaBelief, torch.float32, settings)
    expected, expected_state = after_steps(Reference, torch.float32, settings)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state["exp_avg_var"], expected_state["exp_avg_var"], rtol=1e-6, atol=0)


def test_the_rectified_update_is_reached_in_these_steps():
    assert [step for step in range(1, 21) if rectification(step, 0.999) is None] == [1, 2, 3, 4, 5]
