"""The kit as an author meets it: in a test file, with pytest's option, and without pytest."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers import broken_methods
from helpers.broken_methods import Crashes, FirstSampleOnly, Good
from torch import Tensor

from ensemblekit import DataInfo, Loss, UsageError, hookimpl
from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.plugin import Model
from ensemblekit.testing import Check, CheckResult, ContractError, contract, run_contract
from ensemblekit.testing.numeric_gradients import derivatives
from ensemblekit.testing.overlap import shared_samples

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


def test_a_class_stands_for_its_defaults_and_says_which_it_lacks():
    class Needy(Good):
        """Wants to be told something."""

        strength: float

    with pytest.raises(UsageError, match=r"Needy has required parameters: strength; .*contract\(Needy\(strength=…\)\)"):
        contract(Needy)
    (result,) = run_contract(Needy)
    assert (result.passed, "strength" in result.message) == (False, True)
    for wrong in (len, DataInfo, "gncl"):
        with pytest.raises(UsageError, match="neither a plugin nor a plugin class"):
            contract(wrong)
    with pytest.raises(UsageError, match="cannot be made with its defaults"):
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


def test_what_fails_for_a_reason_that_another_check_names_is_not_checked():
    unchecked = {result.name: result.message for result in run_contract(Crashes) if result.passed is None}
    assert broken_methods.FINITE in unchecked
    assert set(unchecked.values()) == {f'first mend "{broken_methods.ANSWERS}"'}
    alone = next(check for check in contract(Crashes) if check.name == broken_methods.FINITE)
    with pytest.raises(ContractError, match=f'^not checked: first mend "{broken_methods.ANSWERS}"$'):
        alone()


def test_checks_leave_torch_as_it_was():
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    run_contract(CrossEntropy)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.get_num_threads() == threads


def test_what_a_plugin_prints_goes_to_stderr(capsys):
    class Talks(Good):
        """Prints what it is asked."""

        @hookimpl
        def member_loss(self, outputs: Tensor, target: Tensor, loss: Loss) -> Tensor:
            print("asked")
            return loss(outputs, target)

        def separable(self) -> bool:
            print("asked whether it is separable")
            return False

    assert all(result.passed for result in run_contract(Talks))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "asked\n" in printed.err


@pytest.mark.parametrize(
    "stop", [lambda x: x.detach(), lambda x: x.data, torch.detach], ids=["detach", "data", "torch"]
)
def test_what_is_taken_out_of_the_graph_is_held_still_by_numerical_derivatives(stop):
    def objective(outputs):
        with torch.no_grad():
            best = outputs.exp().topk(1).values
        return (stop(outputs).square() * outputs).sum() + (best * outputs).sum()

    at = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)
    analytical, numerical = derivatives(objective, at)
    torch.testing.assert_close(analytical, at.square() + at.exp().max(), rtol=1e-12, atol=0)
    torch.testing.assert_close(numerical, analytical, rtol=1e-7, atol=1e-7)


def test_numerical_derivatives_do_not_hide_values_that_went_through_python_numbers():
    analytical, numerical = derivatives(lambda x: (torch.tensor(x.tolist()) * x).sum(), torch.ones(2).double())
    assert not torch.allclose(analytical, numerical, rtol=1e-3)


def test_coarse_data_may_repeat_itself_and_interleaved_parts_are_two():
    coarse = torch.arange(400) % 4
    parts = [(coarse[start::2].float().unsqueeze(1), coarse[start::2]) for start in (0, 1)]
    assert shared_samples((parts[0][0], parts[0][1]), (parts[0][0].clone(), parts[0][1].clone())) == ""
    fine = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    assert shared_samples((fine[::2], coarse[:20]), (fine[1::2], coarse[:20])) == ""


def test_single_duplicates_are_no_fault_and_some_are_one_only_where_samples_do_not_repeat_themselves():
    inputs = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(100) % 4

    def shared(common: int, train_size: int, start: int) -> str:
        train, test = (inputs[:train_size], targets[:train_size]), (inputs[start:].clone(), targets[start:].clone())
        for own, others in zip(test, train, strict=True):
            own[:common] = others[:common]
        return shared_samples(train, test)

    assert shared(2, train_size=60, start=90) == ""  # chance
    assert shared(3, train_size=60, start=60) == ""  # few of many
    assert shared(12, train_size=60, start=60).startswith("30% of its samples")
    inputs[3:20] = inputs[2]
    targets[3:20] = targets[2]
    assert shared(12, train_size=60, start=60) == ""


def test_an_authors_test_file_passes_or_shows_the_review_without_the_kits_own_code(pytester):
    pytester.makepyfile(test_good=AUTHORS_TEST.format(name="Good"))
    pytester.makepyfile(test_broken=AUTHORS_TEST.format(name="FirstSampleOnly"))
    result = pytester.runpytest_inprocess("-k", "finite or order")
    result.assert_outcomes(failed=1, passed=3, deselected=34)
    shown = result.stdout.str()
    assert "test_broken.py::test_contract[the order of samples does not matter]" in shown
    assert "got: with the samples in reverse order" in shown
    assert "look at: FirstSampleOnly.member_loss, " in shown
    assert "testing/method.py" not in shown


def test_the_option_makes_tests_of_installed_plugins(pytester):
    listed = pytester.runpytest_inprocess("--ensemblekit", "gncl", "--ensemblekit", "loss:mse", "--collect-only", "-q")
    assert "ensemblekit::gncl::gradients are finite" in listed.outlines
    assert "ensemblekit::mse::its probabilities sum to one" in listed.outlines
    chosen = pytester.runpytest_inprocess("--ensemblekit", "gncl", "-k", "finite or memory", "-v")
    chosen.assert_outcomes(passed=2, deselected=17)
    chosen.stdout.fnmatch_lines(["ensemblekit::gncl::gradients are finite PASSED*"])


def test_the_option_suggests_a_name_for_an_unknown_one(pytester):
    result = pytester.runpytest_inprocess("--ensemblekit", "gnkl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert 'did you mean "gncl"?' in result.stderr.str()


def test_a_failure_of_the_option_is_the_review_alone(pytester):
    pytester.makepyfile(flat='from ensemblekit import Method\nclass Flat(Method):\n    """No formula."""\n')
    result = pytester.runpytest_inprocess("--ensemblekit", "flat.py", "-k", "formula")
    result.assert_outcomes(failed=1, deselected=18)
    shown = result.stdout.str()
    assert "expected: the formula of what the method minimises\ngot: none\nlook at: Flat, flat.py:2\n" in shown
    assert "FAILED ensemblekit::flat::its formula is given" in shown
    assert "checks.py" not in shown


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
