"""A run in bf16 and its ensemble compute in the same precision, so that their metrics agree."""

from __future__ import annotations

import pytest
import torch
from helpers.small_runs import small_spec, training

import ensemblekit as ek
from ensemblekit.spec.sections import ENGINES


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_in_bf16_and_its_evaluation_agree(engine, tmp_path):
    spec = small_spec(
        model={"name": "resnet", "width": 4, "blocks": 2},
        engine={"name": engine, "precision": "bf16", "device": "cpu"},
        training=training(epochs=2),
    )
    run = ek.train(spec, tmp_path / "run", progress=False)
    evaluated = ek.evaluate_run(run.path)
    assert evaluated["test_accuracy"] == run.metrics["test_accuracy"]
    assert evaluated["test_loss"] == pytest.approx(run.metrics["test_loss"], rel=1e-5 if engine != "stacked" else 1e-2)


def test_an_ensemble_of_a_bf16_run_rounds_like_the_run_and_returns_float32(tmp_path):
    spec = small_spec(engine={"name": "sequential", "precision": "bf16", "device": "cpu"}, training=training(epochs=1))
    ensemble = ek.train(spec, tmp_path / "run", progress=False).ensemble
    inputs = torch.rand(7, 1, 8, 8)
    with torch.no_grad():
        outputs = ensemble.member_outputs(inputs)
        exact = torch.stack([member(inputs) for member in ensemble.members])
        with torch.autocast("cpu", torch.bfloat16):
            rounded = torch.stack([member(inputs) for member in ensemble.members]).float()
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, rounded)
    assert not torch.equal(outputs, exact)
