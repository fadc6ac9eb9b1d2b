"""A few steps of training on any engine, and the comparison of two such trainings."""

from __future__ import annotations

import torch
from torch import Tensor

import ensemblekit as ek
from ensemblekit.core.objective import Objective
from ensemblekit.data.loading import Batch
from ensemblekit.engines.selection import engine_class
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.members.build import build_members
from ensemblekit.members.python_specs import registry_of
from ensemblekit.members.state import MemberState
from ensemblekit.spec.optimizers import optimizer_section
from ensemblekit.spec.reader import build_plugin
from helpers.plain_methods import plain_methods

M, B, SHAPE, C = 4, 12, (1, 8, 8), 3
CPU = torch.device("cpu")
VARIANTS = [
    *({"name": name} for name in plain_methods()),
    {"name": "gncl", "lambda": 0},
    {"name": "gncl", "mode": "exact"},
    {"name": "boosting", "schedule": "stagewise"},
]


def model(name: str, **parameters) -> ek.Model:
    return ek.models()[name].load()(**parameters)


MLP = model("mlp", hidden=(8,), dropout=0.3)
RESNET = model("resnet", width=4, blocks=2)


def method(table: dict) -> ek.Method:
    return build_plugin(ek.Method, table, registry_of())


def batches(count: int = 3, dtype: torch.dtype = torch.float32) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        Batch(
            torch.randn(B, *SHAPE, generator=generator).to(dtype),
            torch.randint(C, (B,), generator=generator),
            torch.arange(B),
        )
        for _ in range(count)
    ]


def member_states(
    models: list[ek.Model], frozen: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> list[MemberState]:
    networks = build_members(models, SHAPE, C, seed=0)
    return [
        MemberState(network.to(dtype), of, index, frozen=index in frozen)
        for index, (network, of) in enumerate(zip(networks, models, strict=True))
    ]


def settings(optimizer: str = "adabelief", **options) -> EngineSettings:
    section = optimizer_section(optimizer).from_table({"name": optimizer, "lr": 0.01})
    return EngineSettings(CPU, section, **options)


def train(
    name: str,
    members: list[MemberState],
    objective: Objective,
    options: EngineSettings,
    weights: Tensor | None = None,
    dtype=torch.float32,
):
    """Train three steps; returns the objectives, the outputs afterwards and the members."""
    engine = engine_class(name)(members, objective, options)
    values = [engine.train_step(batch, weights, 0.01, step)[0] for step, batch in enumerate(batches(dtype=dtype))]
    engine.store_optimizer_state()
    outputs = engine.predict(batches(1, dtype)[0].inputs)
    engine.close()
    return torch.stack(values), outputs, members


def assert_same_training(found, expected, tolerance=1e-5) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1], expected[1], rtol=tolerance, atol=tolerance)
    for left, right in zip(found[2], expected[2], strict=True):
        assert (left.frozen, left.steps) == (right.frozen, right.steps)
        state, other = left.network.state_dict(), right.network.state_dict()
        assert state.keys() == other.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)
        assert left.optimizer_state.keys() == right.optimizer_state.keys()
        for name, entry in left.optimizer_state.items():
            for key, value in entry.items():
                torch.testing.assert_close(
                    torch.as_tensor(value), torch.as_tensor(right.optimizer_state[name][key]), rtol=1e-3, atol=1e-5
                )


def frozen_by(objective: Objective) -> tuple[int, ...]:
    """Return the members that are frozen at the end of a run that adds members one by one."""
    return tuple(range(M - 1)) if objective.hooks.call.members_at_start(num_members=M) < M else ()
