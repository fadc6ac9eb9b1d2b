"""Compiled code: built where there is a compiler, left alone where it is of another version, equal to torch."""

from __future__ import annotations

import os
import shutil
from importlib.machinery import EXTENSION_SUFFIXES

import pytest
import torch
from helpers.compiled_code import VERSIONS, needs_compiled_code, version

from ensemblekit.core import kernels
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.spec.adabelief import AdaBelief


@pytest.fixture
def fresh_library():
    kernels.library.cache_clear()
    yield
    kernels.library.cache_clear()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_pip_has_built_it_where_there_is_a_compiler():
    assert kernels.library() is not None


@needs_compiled_code
def test_a_library_of_another_version_is_not_used(fresh_library, monkeypatch):
    monkeypatch.setattr(kernels, "VERSION_OF_CALLS", kernels.VERSION_OF_CALLS + 1)
    assert kernels.library() is None


def test_a_damaged_library_is_not_used(fresh_library, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    assert kernels.library() is None
    (tmp_path / ("_kernels" + EXTENSION_SUFFIXES[0])).write_bytes(b"no library")
    kernels.library.cache_clear()
    assert kernels.library() is None


@needs_compiled_code
def test_it_can_be_turned_off(fresh_library, monkeypatch):
    monkeypatch.setenv(kernels.SWITCH, "0")
    assert kernels.library() is None
    assert kernels.cross_entropy(torch.zeros(1, 2, 3), torch.zeros(2, dtype=torch.int64)) is None


@needs_compiled_code
@pytest.mark.parametrize("scale", [1, 30])
@pytest.mark.parametrize("classes", [1, 2, 10, 17, 300])
@pytest.mark.parametrize("highest", VERSIONS)
def test_cross_entropy_and_its_gradient_are_those_of_double_precision(highest, classes, scale):
    source = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 70, classes, generator=source) * scale
    target = torch.randint(classes, (70,), generator=source)
    with version(highest):
        found = kernels.cross_entropy(outputs, target)
    assert found is not None
    exact = outputs.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact.transpose(1, 2), target.expand(3, 70), reduction="none")
    losses.sum().backward()
    # outputs are rounded to about 1e-7 of the largest, and so are their differences
    torch.testing.assert_close(found[0].double(), losses.detach(), rtol=1e-6, atol=4e-7 * scale)
    torch.testing.assert_close(found[1].double(), exact.grad, rtol=1e-6, atol=4e-7 * scale)


@needs_compiled_code
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_make_only_their_own_rows_nan(bad):
    outputs = torch.randn(2, 4, 3)
    outputs[1, 2, 1] = bad
    losses, slopes = kernels.cross_entropy(outputs, torch.tensor([0, 1, 2, 0]))
    row = torch.zeros(2, 4, dtype=torch.bool)
    row[1, 2] = True
    assert torch.equal(losses.isnan(), row)
    assert torch.equal(slopes.isnan().all(dim=-1), row)
    assert torch.equal(slopes.isnan().any(dim=-1), row)


@pytest.mark.parametrize("target", [-1, 3])
def test_a_target_that_is_no_class_is_never_an_address(target):
    outputs, targets = torch.randn(2, 1, 3), torch.tensor([target])
    assert kernels.cross_entropy(outputs, targets) is None
    with pytest.raises(RuntimeError, match="out of bounds"):
        CrossEntropy().value_and_gradient(outputs, targets)


def test_other_tensors_are_left_to_torch():
    outputs, target = torch.randn(2, 4, 3), torch.zeros(4, dtype=torch.int64)
    assert kernels.cross_entropy(outputs.double(), target) is None
    assert kernels.cross_entropy(outputs.to("meta"), target.to("meta")) is None
    assert kernels.cross_entropy(outputs.transpose(0, 1), torch.zeros(2, dtype=torch.int64)) is None
    assert kernels.cross_entropy(outputs, target.int()) is None
    assert kernels.cross_entropy(outputs, target.expand(2, 4)) is None


@needs_compiled_code
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "highest", [version for version in VERSIONS if version > 0]
)  # as torch rounds, once for a b + c
def test_adabelief_differs_from_the_operations_of_torch_only_by_the_rounding_of_roots(highest, threads, monkeypatch):
    def trained() -> list[torch.Tensor]:
        source = torch.Generator().manual_seed(0)
        value = torch.randn(40_003, generator=source).requires_grad_()
        optimizer = AdaBelief([value], lr=0.01, betas=(0.8, 0.99), weight_decay=0.1)
        for step in range(12):
            value.grad = torch.randn(value.shape, generator=source) * 10.0 ** -(step % 4)
            optimizer.step()
        state = optimizer.state[value]
        return [value.detach(), state["exp_avg"], state["exp_avg_var"]]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with version(highest):
        found = trained()
    torch.set_num_threads(before)
    monkeypatch.setattr(kernels, "library", lambda: None)
    (value, *moments), (expected, *expected_moments) = found, trained()
    assert all(map(torch.equal, moments, expected_moments))
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


@needs_compiled_code
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    value = torch.ones(100_000)

    def step() -> torch.Tensor:
        values = [value.clone(), torch.zeros_like(value), torch.zeros_like(value), torch.ones_like(value)]
        pointers = (each.data_ptr() for each in values)
        plan = kernels.Update(*pointers, len(value), 0.9, 0.999, 0.1, 0.001, 1e-12, -0.1, 1)
        kernels.adabelief(plan, 2)
        return values[0]

    expected = step()
    if (child := os.fork()) == 0:
        os._exit(0 if torch.equal(step(), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(step(), expected)
