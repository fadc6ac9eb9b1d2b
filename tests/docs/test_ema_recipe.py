"""The recipe of the moving average computes what its formula says, with every engine."""

from __future__ import annotations

import pytest
import torch
from helpers.places import ROOT

import ensemblekit as ek
from ensemblekit.core.registry import load_file

RECIPE = ROOT / "docs" / "cookbook" / "ema.py"
SPEC = {
    "data": {"name": "digits", "limit_train": 120, "limit_test": 60},
    "model": {"name": "ema", "decay": 0.8, "model": {"name": "mlp", "hidden": [8]}},
    "ensemble": {"members": 2},
    "training": {"epochs": 2, "batch_size": 20, "optimizer": {"name": "sgd", "lr": 0.1}},
    "engine": {"name": "sequential", "device": "cpu"},
}


def outputs(engine, path):
    spec = {**SPEC, "engine": {"name": engine, "device": "cpu"}}
    run = ek.train(spec, path, progress=False, plugins=[RECIPE])
    return run.outputs("test").outputs, run


def test_evaluation_uses_the_average_of_the_weights_of_all_steps_as_the_formula_weights_them():
    (info,) = load_file(RECIPE)
    decay = 0.7
    model = info.load()(model=ek.models()["mlp"].load()(hidden=(3,), batch_norm=False), decay=decay)
    network = model.build((4,), 2)
    inputs, history = torch.randn(5, 4), []
    for _ in range(6):
        history.append([weight.detach().clone() for weight in network.parameters()])
        network.train()(inputs).square().sum().backward()
        with torch.no_grad():
            for weight in network.parameters():
                weight -= 0.1 * weight.grad
    # written as one sum: step t counts (1 - d_t) times all later d, and not as a recursion
    keep = [min(decay, 1 - 1 / step) for step in range(1, 7)]
    shares = [(1 - keep[t]) * torch.tensor(keep[t + 1 :]).prod() for t in range(6)]
    assert sum(shares) == pytest.approx(1)
    average = [
        sum(share * weights[i] for share, weights in zip(shares, history, strict=True)) for i in range(len(history[0]))
    ]
    plain = ek.models()["mlp"].load()(hidden=(3,), batch_norm=False).build((4,), 2)
    with torch.no_grad():
        for weight, value in zip(plain.parameters(), average, strict=True):
            weight.copy_(value)
        torch.testing.assert_close(network.eval()(inputs), plain.eval()(inputs))
        live = network.network.eval()(inputs)
    assert not torch.allclose(network(inputs), live)


def test_all_engines_agree_and_the_loaded_ensemble_predicts_with_the_average(tmp_path):
    expected, run = outputs("sequential", tmp_path / "sequential")
    for engine in ("threaded", "stacked"):
        torch.testing.assert_close(outputs(engine, tmp_path / engine)[0], expected, rtol=1e-4, atol=1e-5)
    plain = ek.train({**SPEC, "model": SPEC["model"]["model"]}, tmp_path / "plain", progress=False)
    assert not torch.allclose(plain.outputs("test").outputs, expected, atol=1e-2)
    state = ek.load(run.path, plugins=[RECIPE]).state_dict()
    assert any(name.endswith("steps") and value.item() == 12 for name, value in state.items())
