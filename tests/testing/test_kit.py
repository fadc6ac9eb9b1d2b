"""The kit as a plugin author uses it: in a test file, with the option of pytest, and without pytest."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers import broken_methods
from helpers.broken_hooks import Crashes
from helpers.broken_methods import FirstSampleOnly, Good
from torch import Tensor

from ensemblekit import DataInfo, Loss, UsageError, hookimpl
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.plugin import Model
from ensemblekit.testing import Check, CheckResult, ContractError, contract, run_contract
from ensemblekit.testing.numeric_gradients import gradient_pair
from ensemblekit.testing.overlap import describe_overlap

pytest_plugins = ["pytester"]
AUTHORS_TEST = """\
import pytest
from ensemblekit.testing import contract
from helpers.broken_methods import {name}

@pytest.mark.parametrize("check", contract({name}()), ids=str)
def test_contract(check):
    check()
"""


def test_a_check_is_a_callable_with_a_readable_name():
    checks = contract(Good())
    assert all(isinstance(check, Check) for check in checks)
    assert "gradients are finite" in map(str, checks)
    assert checks[0]() is None


def test_a_class_stands_for_its_defaults_and_its_required_parameters_are_named():
    class Needy(Good):
        """Has a required parameter."""

        strength: float

    with pytest.raises(
        UsageError, match=r"(?s)Needy has required parameters: strength.*contract\(Needy\(strength=…\)\)"
    ):
        contract(Needy)
    (result,) = run_contract(Needy)
    assert (result.passed, "strength" in result.message) == (False, True)
    for wrong in (len, DataInfo, "gncl"):
        with pytest.raises(UsageError, match="neither a plugin nor a plugin class"):
            contract(wrong)
    with pytest.raises(UsageError, match="cannot be constructed with its default parameters"):
        contract(Model)


def test_a_failure_is_an_assertion_that_reads_like_a_review():
    check = next(check for check in contract(FirstSampleOnly) if check.name == broken_methods.ORDER)
    with pytest.raises(AssertionError) as raised:
        check()
    assert isinstance(raised.value, ContractError)
    labels = [line.partition(":")[0] for line in str(raised.value).splitlines()]
    assert labels == ["expected", "got", "look at", "fix"]


def test_running_a_contract_never_raises_and_times_each_check():
    results = run_contract(Crashes)
    assert all(isinstance(result, CheckResult) and result.seconds >= 0 for result in results)
    (message,) = [result.message for result in results if result.passed is False]
    assert "ZeroDivisionError: of all things" in message
    assert 'raise ZeroDivisionError("of all things")' in message


def test_a_check_that_fails_because_another_one_does_is_skipped():
    skipped = {result.name: result.message for result in run_contract(Crashes) if result.passed is None}
    assert broken_methods.FINITE in skipped
    assert set(skipped.values()) == {f'fix "{broken_methods.RESULTS}" first'}
    alone = next(check for check in contract(Crashes) if check.name == broken_methods.FINITE)
    with pytest.raises(ContractError, match=f'^skipped: fix "{broken_methods.RESULTS}" first$'):
        alone()


def test_checks_leave_torch_as_it_was():
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    run_contract(CrossEntropy)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_what_a_plugin_prints_goes_to_stderr(capsys):
    class Talks(Good):
        """Prints in its hooks."""

        @hookimpl
        def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
            print("called")
            return loss(outputs, target)

        def separable(self) -> bool:
            print("separable() called")
            return False

    assert all(result.passed for result in run_contract(Talks))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "called\n" in printed.err


@pytest.mark.parametrize(
    "stop", [lambda x: x.detach(), lambda x: x.data, torch.detach], ids=["detach", "data", "torch"]
)
def test_detached_values_are_constants_of_the_numerical_gradient(stop):
    def objective(outputs):
        with torch.no_grad():
            best = outputs.exp().topk(1).values
        return (stop(outputs).square() * outputs).sum() + (best * outputs).sum()

    at = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)
    analytical, numerical = gradient_pair(objective, at)
    torch.testing.assert_close(analytical, at.square() + at.exp().max(), rtol=1e-12, atol=0)
    torch.testing.assert_close(numerical, analytical, rtol=1e-7, atol=1e-7)


def test_the_numerical_gradient_reveals_values_that_went_through_python_numbers():
    analytical, numerical = gradient_pair(lambda x: (torch.tensor(x.tolist()) * x).sum(), torch.ones(2).double())
    assert not torch.allclose(analytical, numerical, rtol=1e-3)


def test_coarse_data_may_repeat_and_interleaved_splits_do_not_overlap():
    coarse = torch.arange(400) % 4
    parts = [(coarse[start::2].float().unsqueeze(1), coarse[start::2]) for start in (0, 1)]
    assert describe_overlap((parts[0][0], parts[0][1]), (parts[0][0].clone(), parts[0][1].clone())) == ""
    fine = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    assert describe_overlap((fine[::2], coarse[:20]), (fine[1::2], coarse[:20])) == ""


def test_a_few_duplicates_are_allowed_and_more_only_if_the_data_repeats_itself():
    inputs = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(100) % 4

    def shared(common: int, train_size: int, start: int) -> str:
        train, test = (inputs[:train_size], targets[:train_size]), (inputs[start:].clone(), targets[start:].clone())
        for own, others in zip(test, train, strict=True):
            own[:common] = others[:common]
        return describe_overlap(train, test)

    assert shared(2, train_size=60, start=90) == ""  # chance
    assert shared(3, train_size=60, start=60) == ""  # few of many
    assert shared(12, train_size=60, start=60).startswith("30% of its samples")
    inputs[3:20] = inputs[2]
    targets[3:20] = targets[2]
    assert shared(12, train_size=60, start=60) == ""


def test_an_authors_test_file_passes_or_shows_the_review_without_the_kits_own_code(pytester):
    pytester.makepyfile(test_good=AUTHORS_TEST.format(name="Good"))
    pytester.makepyfile(test_broken=AUTHORS_TEST.format(name="FirstSampleOnly"))
    result = pytester.runpytest_inprocess("-v", "-k", "finite or order")
    shown = result.stdout.str()
    for name in (broken_methods.FINITE, broken_methods.CORRECT):
        assert f"test_good.py::test_contract[{name}] PASSED" in shown
        assert f"test_broken.py::test_contract[{name}] PASSED" in shown
    assert f"test_good.py::test_contract[{broken_methods.ORDER}] PASSED" in shown
    assert f"test_broken.py::test_contract[{broken_methods.ORDER}] FAILED" in shown
    assert "got: with the samples in reverse order" in shown
    assert "look at: FirstSampleOnly.member_loss, " in shown
    assert "testing/method" not in shown


def test_the_option_turns_the_checks_of_installed_plugins_into_tests(pytester):
    listed = pytester.runpytest_inprocess("--ensemblekit", "gncl", "--ensemblekit", "loss:mse", "--collect-only", "-q")
    assert "ensemblekit::gncl::gradients are finite" in listed.outlines
    assert "ensemblekit::mse::its probabilities sum to one" in listed.outlines
    selection = "(state and deterministic) or (gradients and finite and not match)"
    chosen = pytester.runpytest_inprocess("--ensemblekit", "gncl", "-k", selection, "-v")
    ran = {line.partition(" PASSED")[0] for line in chosen.outlines if " PASSED" in line}
    assert ran == {f"ensemblekit::gncl::{name}" for name in (broken_methods.FINITE, broken_methods.PURE)}


def test_the_option_suggests_a_name_for_an_unknown_one(pytester):
    result = pytester.runpytest_inprocess("--ensemblekit", "gnkl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert 'did you mean "gncl"?' in result.stderr.str()


def test_a_failure_of_the_option_is_the_review_alone(pytester):
    pytester.makepyfile(flat='from ensemblekit import Method\nclass Flat(Method):\n    """No formula."""\n')
    result = pytester.runpytest_inprocess("--ensemblekit", "flat.py", "-k", "formula")
    shown = result.stdout.str()
    assert "expected: the formula that the method minimises\ngot: none\nlook at: Flat, flat.py:2\n" in shown
    assert "FAILED ensemblekit::flat::its formula is given" in shown
    assert "checks.py" not in shown
    assert shown.count("FAILED ensemblekit::") == 1


def test_pytest_starts_without_torch_and_the_kit_works_without_pytest():
    light = (
        "import sys, ensemblekit.testing.pytest_plugin; assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", light], check=True)
    alone = (
        "import sys; sys.modules['pytest'] = None\n"
        "from ensemblekit.testing import run_contract\n"
        "from ensemblekit.core.losses import MSE\n"
        "assert all(result.passed for result in run_contract(MSE))"
    )
    subprocess.run([sys.executable, "-c", alone], check=True)


def test_the_package_lists_its_names_and_no_others():
    import ensemblekit.testing as kit

    assert dir(kit) == sorted(kit.__all__)
    with pytest.raises(AttributeError, match="no attribute 'contracts_'"):
        kit.contracts_  # noqa: B018 - the access is what is tested
