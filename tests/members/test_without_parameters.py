"""Members without anything to learn, such as a fixed rule, stay as they are; a run needs one member that learns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ensemblekit as ek
from ensemblekit.core.errors import UsageError

ENGINES = ["sequential", "threaded", "stacked", "auto"]
INPUTS = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
DATA = (INPUTS, (INPUTS.sum(dim=1) > 0).long())


class Rule(nn.Module):
    """Compares the sum of the inputs with zero."""

    def forward(self, inputs: Tensor) -> Tensor:
        total = inputs.sum(dim=-1, keepdim=True)
        return torch.cat([-total, total], dim=-1)


class Fixed(ek.Model):
    """A network without parameters."""

    def build(self, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
        return Rule()


def spec_of(engine: str, members: int, **changes) -> dict:
    training = {"epochs": 2, "batch_size": 16}
    return {"ensemble": {"members": members}, "training": training, "engine": {"name": engine}, **changes}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("members", [1, 2])
def test_a_run_in_which_no_member_learns_is_refused(members, engine, tmp_path):
    with pytest.raises(UsageError, match="no member has parameters to learn"):
        ek.train(spec_of(engine, members), tmp_path / "run", data=DATA, model=Fixed, progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["independent", "gncl", "bagging", "adversarial"])
def test_members_without_parameters_are_kept_beside_members_that_learn(method, engine, tmp_path):
    groups = [{"members": 2, "model": {"name": "fixed"}}, {"members": 2, "model": {"name": "mlp", "hidden": [4]}}]
    spec = spec_of(engine, 4, ensemble={"groups": groups}, method=method, model="fixed")
    run = ek.train(spec, tmp_path / "run", data=DATA, plugins=[Fixed], progress=False)
    assert [(row["parameters"] > 0, row["frozen"]) for row in run.members] == [(False, True)] * 2 + [(True, False)] * 2
    assert [row["accuracy"] for row in run.members[:2]] == [1, 1]
    outputs = ek.load(run.path, plugins=[Fixed]).member_outputs(INPUTS)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[2], outputs[3])
