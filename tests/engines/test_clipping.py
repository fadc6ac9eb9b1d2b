"""What `clip_norm` sees: a member's gradient of the objective, with the factor that the method gives its loss."""

from __future__ import annotations

import pytest
import torch
from helpers.engine_training import CPU, M, batches, member_states, model

from ensemblekit.core.losses import CrossEntropy
from ensemblekit.core.objective import Objective
from ensemblekit.engines.selection import engine_class
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.spec.optimizers import optimizer_section
from ensemblekit.spec.sections import ENGINES

SGD = optimizer_section("sgd").from_table({"name": "sgd", "lr": 1.0})
NETWORK = model("mlp", hidden=(8,), batch_norm=False)


def trained(name: str, members: list, clip_norm: float, rate: float) -> list[dict[str, torch.Tensor]]:
    engine = engine_class(name)(members, Objective([], CrossEntropy()), EngineSettings(CPU, SGD, clip_norm=clip_norm))
    for step, batch in enumerate(batches(dtype=torch.float64)):
        engine.train_step(batch, None, rate, step)
    engine.close()
    return [member.network.state_dict() for member in members]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_member_of_m_trains_like_a_single_network_with_m_times_the_norm(engine):
    """Independent members: the objective has 1/M of each loss, so its gradient is 1/M of the single network's."""
    clip_norm, rate = 0.05, 0.4
    members = member_states([NETWORK] * M, dtype=torch.float64)
    single = member_states([NETWORK] * M, dtype=torch.float64)
    unclipped = member_states([NETWORK] * M, dtype=torch.float64)
    together = trained(engine, members, clip_norm, rate)
    alone = [trained("sequential", [member], M * clip_norm, rate / M)[0] for member in single]
    without = trained(engine, unclipped, 1e9, rate)
    for left, right, free in zip(together, alone, without, strict=True):
        for name, value in left.items():
            torch.testing.assert_close(value, right[name], rtol=1e-4, atol=1e-6)
        assert any(not torch.allclose(value, free[name]) for name, value in left.items())
