"""Implementations of hooks are checked when a plugin is registered."""

from __future__ import annotations

import pytest

from ensemblekit import Method, hookimpl
from ensemblekit.core.errors import PluginError
from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.verification import HOOK_ARGUMENTS


class MisspeltHook(Method):
    """A typo in the hook's name."""

    @hookimpl
    def member_los(self, outputs):
        return outputs


class UnknownArgument(Method):
    """A typo in an argument's name."""

    @hookimpl
    def member_loss(self, outputs, targets):
        return outputs


class ArgumentWithDefault(Method):
    """pluggy would never fill it."""

    @hookimpl
    def ensemble_loss(self, combined, target=None):
        return combined


class Keywords(Method):
    """pluggy would never fill them."""

    @hookimpl
    def combine(self, **everything):
        return everything


class ForgottenMark(Method):
    """Would silently do nothing."""

    def member_loss(self, outputs):
        return outputs


@pytest.mark.parametrize(
    ("plugin", "hook", "hint"),
    [
        (MisspeltHook(), "member_los", 'did you mean "member_loss"?'),
        (UnknownArgument(), "member_loss", 'did you mean "target"?'),
        (ArgumentWithDefault(), "ensemble_loss", "remove the default"),
        (Keywords(), "combine", "name the arguments you need"),
        (ForgottenMark(), "member_loss", "put @hookimpl on it"),
    ],
)
def test_a_wrong_implementation_is_rejected_with_plugin_hook_and_fix(plugin, hook, hint):
    with pytest.raises(PluginError) as error:
        RunHooks([plugin])
    message = str(error.value)
    assert f'plugin "{plugin.name}"' in message
    assert hook in message
    assert hint in message
    assert type(plugin).__name__ in message


def test_a_plugin_cannot_be_registered_twice():
    class Quiet(Method):
        """Answers nothing."""

    with pytest.raises(PluginError, match="listed twice"):
        RunHooks([Quiet(), Quiet()])


def test_registering_touches_no_property_of_the_plugin():
    class Touchy(Method):
        """A property with a side effect."""

        @property
        def expensive(self):
            raise AssertionError("touched")

    RunHooks([Touchy()])


def test_each_run_has_hooks_of_its_own():
    class Halved(Method):
        """Trains on half of the passes."""

        @hookimpl
        def passes(self):
            return 2

    assert RunHooks([Halved()]).passes(num_members=3) == 2
    assert RunHooks([]).passes(num_members=3) is None


def test_the_hooks_are_those_of_the_design():
    objective = {"combine", "fit_combiner", "member_loss", "ensemble_loss", "sample_weights", "select_members"}
    objective |= {"second_inputs", "second_weights", "member_inputs", "weight_penalty"}
    life_cycle = {"members_at_start", "passes", "learning_rate", "epoch_started", "epoch_finished"}
    life_cycle |= {"epoch_trained", "step_finished"}
    life_cycle |= {"run_started", "engine_chosen", "checkpoint_saved", "notice", "run_finished", "run_ended"}
    assert set(HOOK_ARGUMENTS) == objective | life_cycle
