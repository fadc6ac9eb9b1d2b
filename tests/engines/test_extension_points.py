"""What plugins can do beyond losses: every engine agrees, trained ensembles load, and runs resume bit-identically."""

from __future__ import annotations

import pytest
import torch
from helpers.extending_plugins import CASES, PLUGINS
from helpers.small_runs import Crash, CrashAfter, CrashOnSave, assert_same_run, small_spec, training

import ensemblekit as ek

ENGINES = ("sequential", "threaded", "stacked")


every_case = pytest.mark.parametrize("case", CASES)


def spec_of(case: str, **changes):
    spec = small_spec(training=training(epochs=2), **CASES[case]) | changes
    if spec["model"]["name"] in ("heads", "features"):
        spec["data"] = {"name": "digits", "limit_train": 200, "limit_test": 100}
    return spec


def train(spec, path, progress=False):
    return ek.train(spec, out=path, progress=progress, plugins=PLUGINS)


@every_case
def test_all_engines_agree(case, tmp_path):
    results = {}
    for engine in ENGINES:
        run = train(spec_of(case, engine={"name": engine, "device": "cpu"}), tmp_path / engine)
        results[engine] = run.outputs("test").outputs
    for engine in ENGINES[1:]:
        torch.testing.assert_close(results[engine], results["sequential"], rtol=1e-3, atol=2e-4)


@every_case
def test_a_loaded_ensemble_predicts_what_the_run_has_kept(case, tmp_path):
    run = train(spec_of(case), tmp_path / "run")
    kept, ensemble = run.outputs("test"), ek.load(tmp_path / "run", plugins=PLUGINS)
    inputs = torch.cat([batch.inputs for batch in ek.load_data(run.spec.data, 0).test.batches(50)])
    torch.testing.assert_close(ensemble.member_outputs(inputs), kept.outputs, rtol=1e-4, atol=1e-5)
    accuracy = float((ensemble.predict_proba(inputs).argmax(dim=-1) == kept.targets).float().mean())
    assert accuracy == pytest.approx(run.metrics["test_accuracy"])
    found = ek.evaluate_run(tmp_path / "run", plugins=PLUGINS)
    assert found["test_loss"] == pytest.approx(run.metrics["test_loss"], rel=1e-4)
    combined = run.combiner().probabilities(kept.outputs) if case != "gate" else None
    assert combined is None or combined.shape == (100, 10)


@every_case
@pytest.mark.parametrize("where", ["epoch", "step"])
def test_a_resumed_run_is_bit_identical(case, where, tmp_path):
    spec = spec_of(case)
    train(spec, tmp_path / "whole")
    crash = CrashOnSave(1) if where == "epoch" else CrashAfter(2, 2)
    spec["training"] = spec["training"] | {"checkpoint_every_minutes": 1e-9}
    with pytest.raises(Crash):
        train(spec, tmp_path / "part", progress=crash)
    ek.resume(tmp_path / "part", plugins=PLUGINS, progress=False)
    assert_same_run(tmp_path / "whole", tmp_path / "part")
