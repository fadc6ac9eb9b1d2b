"""Every model supports every execution mode of the engines or declares that it does not, in several variants."""

from __future__ import annotations

import pytest

import ensemblekit as ek
from ensemblekit.core.plugin import Model
from ensemblekit.members.build import build_member
from ensemblekit.testing import Check, contract
from ensemblekit.testing.execution_modes import EXECUTION_MODES, run_stacked, run_vmap
from ensemblekit.testing.model import ModelContract

SHAPE, NUM_OUTPUTS = (3, 32, 32), 5
VARIANTS = [
    {"name": "resnet", "width": 8},
    {"name": "binary_resnet", "width": 8, "stochastic": True},
    {"name": "mlp", "batch_norm": False},
    {"name": "torchvision", "arch": "squeezenet1_1"},  # has dropout
]


def plugin(table: dict[str, object]) -> Model:
    parameters = {key: value for key, value in table.items() if key != "name"}
    return ek.models()[str(table["name"])].load()(**parameters)


def mode_checks() -> list[pytest.param]:
    names = {f"{mode} works as declared" for mode in EXECUTION_MODES}
    return [
        pytest.param(check, id=f"{'-'.join(map(str, table.values()))}-{check}")
        for table in VARIANTS
        for check in contract(plugin(table))
        if check.name in names
    ]


@pytest.mark.parametrize("check", mode_checks())
def test_a_variant_supports_every_mode_or_declares_that_it_does_not(check: Check):
    check()


@pytest.mark.parametrize("table", [VARIANTS[1], {"name": "mlp", "dropout": 0.5}], ids=["binary_resnet", "mlp"])
def test_stacked_members_have_independent_noise(table):
    first, second = (build_member(plugin(table), SHAPE, NUM_OUTPUTS, seed=0, member=index).train() for index in (0, 1))
    second.load_state_dict(first.state_dict())
    outputs, _, _ = run_stacked([first, second], ModelContract(plugin(table)).inputs(shape=SHAPE))
    assert not bool((outputs[0] == outputs[1]).all())


def test_vmap_really_does_not_support_stochastic_depth():
    model_contract = ModelContract(plugin({"name": "torchvision", "arch": "efficientnet_b0"}))
    assert "vmap" in model_contract.plugin.unsupported()
    members = [model_contract.build(member, SHAPE) for member in (0, 1)]
    with pytest.raises(RuntimeError, match="randomness"):
        run_vmap(members, model_contract.inputs(shape=SHAPE))


@pytest.mark.parametrize("arch", ["convnext_tiny", "efficientnet_v2_s", "maxvit_t", "swin_t", "vit_b_16", "resnet50"])
def test_the_networks_of_torchvision_that_vmap_does_not_support_give_the_reason(arch):
    reasons = plugin({"name": "torchvision", "arch": arch}).unsupported()
    assert set(reasons) == (set() if arch == "resnet50" else {"vmap"})
    assert all("vmap" in reason for reason in reasons.values())
