"""Monte-Carlo dropout: every pass is one thinned network, on every engine and after loading."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import ensemblekit as ek
from ensemblekit.cli import main
from ensemblekit.core.errors import SpecError, UsageError
from ensemblekit.core.objective import Objective
from ensemblekit.engines.selection import engine_class
from ensemblekit.engines.settings import EngineSettings
from ensemblekit.members.build import build_members
from ensemblekit.members.state import MemberState
from ensemblekit.members.stochastic import make_reproducible, stochastic_pass
from ensemblekit.spec.optimizers import optimizer_section
from ensemblekit.spec.sections import ENGINES

S, M, B, SHAPE, C = 5, 3, 8, (1, 8, 8), 3
MODELS = {
    "mlp": {"hidden": (16,), "dropout": 0.5},
    "resnet": {"width": 4, "blocks": 2, "dropout": 0.5},
    "mobilenet_v3_tiny": {"dropout": 0.5},
    "binary_resnet": {"width": 4, "blocks": 2},
}
SGD = optimizer_section("sgd").from_table({"name": "sgd", "lr": 0.01})


def tables(method: object = None, **changes) -> dict:
    base = {
        "data": {"name": "digits", "limit_train": 200, "limit_test": 100},
        "model": {"name": "mlp", "hidden": [16], "dropout": 0.3},
        "ensemble": {"members": 2},
        "method": method or {"name": "dropout", "passes": S},
        "training": {"epochs": 2, "batch_size": 200, "optimizer": {"name": "adabelief", "lr": 0.01}},
        "engine": {"name": "sequential", "device": "cpu"},
    }
    return base | changes


def engine(name: str, networks: list[nn.Module], model: ek.Model, passes: int | None = S):
    slots = [MemberState(network, model, member) for member, network in enumerate(networks)]
    return engine_class(name)(slots, Objective([], ek.MSE()), EngineSettings(torch.device("cpu"), SGD, passes=passes))


def members(name: str) -> tuple[list[nn.Module], ek.Model]:
    networks, model = built_members(name)
    return deepcopy(networks), model


@cache
def built_members(name: str) -> tuple[list[nn.Module], ek.Model]:
    model = ek.models()[name].load()(**MODELS[name])
    networks = build_members([model] * M, SHAPE, C, seed=0)
    if name == "binary_resnet":  # without statistics of the inputs, its binary activations are nearly all equal
        with torch.no_grad():
            for network in networks:
                for _ in range(20):
                    network(inputs(64))
    return networks, model


def inputs(batch: int = B) -> Tensor:
    return torch.randn(batch, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["mlp", "resnet", "binary_resnet"])
@pytest.mark.parametrize("way", sorted(ENGINES))
def test_a_prediction_depends_neither_on_the_other_samples_nor_on_the_order_nor_on_the_number_of_calls(way, name):
    networks, model = members(name)
    running = engine(way, networks, model)
    together = running.predict(inputs())
    assert together.shape == (S * M, B, C)
    assert torch.equal(running.predict(inputs()), together)
    # in a batch of the same size: the rounding of matrix products may depend on it
    assert torch.equal(running.predict(inputs().flip(0)), together.flip(1))
    others = torch.cat([inputs()[:1], torch.rand(B - 1, *SHAPE)])
    assert torch.equal(running.predict(others)[:, 0], together[:, 0])
    alone = torch.cat([running.predict(sample) for sample in inputs().split(1)], dim=1)
    torch.testing.assert_close(alone, together, rtol=1e-5, atol=1e-5)
    running.close()


@pytest.mark.parametrize("name", MODELS)
def test_all_engines_and_the_ensemble_make_the_same_passes_and_no_two_passes_are_equal(name):
    networks, _ = members(name)
    spec = ek.load_spec(tables(model={"name": name, **MODELS[name]}, ensemble={"members": M}))
    ensemble = ek.Ensemble(networks, spec, ek.DataInfo("classification", SHAPE, C)).eval()
    with_graph = ensemble.member_outputs(inputs()).detach()
    with torch.no_grad():
        found = {"ensemble": ensemble.member_outputs(inputs())}
    for way in ENGINES:
        running = engine(way, *members(name))
        found[way] = running.predict(inputs())
        running.close()
    for outputs in found.values():
        torch.testing.assert_close(outputs, with_graph, rtol=1e-4, atol=1e-5)
    flat = with_graph.flatten(1)
    assert all(not torch.equal(flat[i], flat[j]) for i in range(S * M) for j in range(i))


@pytest.mark.parametrize("way", sorted(ENGINES))
def test_a_pass_is_the_network_without_the_units_it_drops(way):
    networks = [nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, C)) for _ in range(M)]
    networks = [make_reproducible(network, 0, member) for member, network in enumerate(networks)]
    weights = torch.stack([network[2].weight.detach().clone() for network in networks])
    biases = torch.stack([network[2].bias.detach().clone() for network in networks])
    running = engine(way, networks, ek.models()["mlp"].load()())
    outputs = running.predict(torch.cat([torch.eye(64), torch.zeros(1, 64)])).view(S, M, 65, C)
    running.close()
    torch.testing.assert_close(outputs[:, :, 64], biases.expand(S, M, C))
    kept = (outputs[:, :, :64] - biases.unsqueeze(1)) / (
        2 * weights.mT
    )  # 0 or 1 for each unit, the same for all outputs
    torch.testing.assert_close(kept, kept.round(), rtol=0, atol=1e-3)
    assert set(kept.round().unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("way", [*sorted(ENGINES), "ensemble", "ensemble with a graph"])
def test_layers_before_the_first_stochastic_one_run_once_and_their_output_is_not_changed_by_later_layers(way):
    class Counting(nn.Flatten):
        runs = 0

        def forward(self, images: Tensor) -> Tensor:
            Counting.runs += 1
            return super().forward(images)

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, features: Tensor) -> Tensor:
            return self.dropout(features.mul_(2))

    networks = [nn.Sequential(Counting(), InPlace(), nn.Linear(64, C)) for _ in range(M)]
    networks = [make_reproducible(network, 0, member).eval() for member, network in enumerate(networks)]
    expected = []
    with torch.no_grad():
        for number in range(S):
            for network in networks:
                with stochastic_pass(network, number):
                    expected.append(network(inputs()))
    Counting.runs = 0
    if way in ENGINES:
        running = engine(way, networks, ek.models()["mlp"].load()())
        found = running.predict(inputs())
        running.close()
    else:
        ensemble = ek.Ensemble(networks, ek.load_spec(tables()), ek.DataInfo("classification", SHAPE, C)).eval()
        with torch.set_grad_enabled(way != "ensemble"):
            ensemble.member_outputs(inputs())  # the first call tries out how members are computed
            Counting.runs = 0
            found = ensemble.member_outputs(inputs()).detach()
    assert Counting.runs == (1 if way == "stacked" else M)
    torch.testing.assert_close(found, torch.stack(expected))


def test_threads_may_call_an_ensemble_at_the_same_time(tmp_path):
    networks, _ = members("mlp")
    ensemble = ek.Ensemble(networks, ek.load_spec(tables()), ek.DataInfo("classification", SHAPE, C)).eval()

    def predict(_: int) -> Tensor:
        with torch.no_grad():
            return ensemble.member_outputs(inputs())

    alone = predict(0)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(outputs, alone) for outputs in pool.map(predict, range(50)))


def test_many_passes_of_a_linear_layer_have_the_mean_and_the_variance_of_the_closed_form():
    """E h = w x + b, the weight-scaled output, and Var h = p / (1 - p) Σ_j (w_j x_j)²."""
    passes, p = 4000, 0.3
    network = make_reproducible(nn.Sequential(nn.Flatten(), nn.Dropout(p), nn.Linear(64, C)), seed=0, member=0).double()
    running = engine("stacked", [network], ek.models()["mlp"].load()(), passes)
    images = inputs(2).double()
    outputs = running.predict(images)
    running.close()
    weight, bias = (value.detach() for value in network[2].parameters())
    terms = weight * images.flatten(1).unsqueeze(1)  # (B, C, 64)
    mean, variance = terms.sum(dim=-1) + bias, p / (1 - p) * terms.square().sum(dim=-1)
    assert ((outputs.mean(dim=0) - mean).abs() < 4 * (variance / passes).sqrt()).all()
    torch.testing.assert_close(outputs.var(dim=0), variance, rtol=0.1, atol=0)


@pytest.mark.parametrize("way", [*sorted(ENGINES), "auto"])
def test_a_loaded_run_has_the_metrics_of_the_run(way, tmp_path):
    spec = tables(
        [{"name": "dropout", "passes": S}, {"name": "gncl"}],
        ensemble={"members": 4},
        engine={"name": way, "device": "cpu"},
    )
    run = ek.train(spec, tmp_path / "run", progress=False)
    assert ek.evaluate_run(run.path) == pytest.approx(run.metrics, rel=1e-5, abs=1e-6)
    ensemble = ek.load(run.path)
    with torch.no_grad():
        outputs = ensemble.member_outputs(torch.rand(6, *SHAPE))
        assert outputs.shape == (4 * S, 6, 10)
        torch.testing.assert_close(ensemble.combine(outputs), outputs.mean(dim=0))


def test_a_run_evaluated_again_is_bit_identical(tmp_path):
    run = ek.train(tables(engine={"name": "threaded", "device": "cpu"}), tmp_path / "run", progress=False)
    assert ek.evaluate_run(run.path) == run.metrics == ek.evaluate_run(run.path)


def test_passes_count_as_members_in_the_results_of_a_run(tmp_path):
    run = ek.train(tables(), tmp_path / "run", progress=False)
    rows = [(row["index"], row["pass"], row["network"]) for row in run.members]
    assert rows == [(number * 2 + network, number, network) for number in range(S) for network in range(2)]
    assert json.loads((run.path / "result.json").read_text())["members"] == run.members
    assert run.metrics["test_diversity"] > 0
    assert run.metrics["test_disagreement"] > 0
    accuracies = torch.tensor([row["accuracy"] for row in run.members])
    assert run.metrics["test_mean_member_accuracy"] == pytest.approx(accuracies.mean().item())


def test_predictions_show_the_agreement_of_the_passes(tmp_path):
    data = {"name": "table", "path": str(tmp_path / "training.csv"), "target": "y"}
    lines = [",".join([*(f"p{i}" for i in range(4)), "y"])]
    lines += [",".join([*(f"{(i * j) % 7}" for j in range(1, 5)), "ab"[i % 2]]) for i in range(40)]
    (tmp_path / "training.csv").write_text("\n".join(lines) + "\n")
    ek.train(tables(data=data, ensemble={"members": 1}), tmp_path / "rows", progress=False)
    (tmp_path / "new.csv").write_text("p0,p1,p2,p3\n1,2,3,4\n")
    command = ["predict", str(tmp_path / "rows"), str(tmp_path / "new.csv"), "--format", "json"]
    (answer,) = json.loads(CliRunner().invoke(main, command).stdout)
    assert answer["mutual_information"] > 0
    assert (answer["agreement"] * S) == pytest.approx(round(answer["agreement"] * S), abs=1e-5)


def test_one_pass_is_one_thinned_network_and_not_the_whole_one(tmp_path):
    run = ek.train(tables({"name": "dropout", "passes": 1}), tmp_path / "run", progress=False)
    assert len(run.members) == 2
    assert "pass" not in run.members[0]
    ensemble = ek.load(run.path)
    images = inputs()
    with torch.no_grad():
        thinned = ensemble.member_outputs(images)
        whole = torch.stack([member(images) for member in ensemble.members])
        assert thinned.shape == whole.shape
        assert not torch.allclose(thinned, whole, atol=1e-3)
        assert torch.equal(ensemble.member_outputs(images), thinned)
    several = ek.train(tables(), tmp_path / "several", progress=False).ensemble
    with torch.no_grad():
        assert torch.equal(several.member_outputs(images)[:2], thinned)


def test_training_is_that_of_the_network_with_dropout(tmp_path):
    from safetensors.torch import load_file

    for name, method in (("passes", None), ("plain", "independent")):
        ek.train(tables(method), tmp_path / name, progress=False)
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("passes", "plain"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_an_ensemble_in_training_makes_one_pass(tmp_path):
    ensemble = ek.train(tables(), tmp_path / "run", progress=False).ensemble.train()
    first, second = (ensemble.member_outputs(inputs()) for _ in range(2))
    assert first.shape == (2, B, 10)
    assert not torch.equal(first, second)
    assert ensemble(inputs()).shape == (B, 10)


def test_a_sum_stays_a_sum_and_a_fitted_combiner_gets_the_means_of_the_passes(tmp_path):
    dropout = {"name": "dropout", "passes": S}
    run = ek.train(tables([{"name": "boosting", "shrinkage": 0.5}, dropout]), tmp_path / "sum", progress=False)
    assert ek.evaluate_run(run.path) == pytest.approx(run.metrics, rel=1e-5, abs=1e-6)
    images = torch.rand(6, *SHAPE)
    with torch.no_grad():
        outputs = run.ensemble.member_outputs(images).view(S, 2, 6, 10)
        torch.testing.assert_close(run.ensemble(images), 0.5 * outputs.sum(dim=1).mean(dim=0))
    run = ek.train(tables(["stacking", dropout]), tmp_path / "fitted", progress=False)
    assert run.ensemble.fitted.shape == (2, 1)
    assert ek.evaluate_run(run.path) == pytest.approx(run.metrics, rel=1e-5, abs=1e-6)


def test_snapshots_make_passes_too(tmp_path):
    spec = tables([{"name": "snapshot", "at_epochs": [2]}, {"name": "dropout", "passes": S}])
    run = ek.train(spec, tmp_path / "run", progress=False)
    assert [row["frozen"] for row in run.members] == [True, False] * S
    assert ek.evaluate_run(run.path) == pytest.approx(run.metrics, rel=1e-5, abs=1e-6)


def test_a_dropout_of_zero_is_found_in_the_spec(tmp_path):
    with pytest.raises(SpecError, match=r'model\.dropout: 0, but "dropout" needs dropout in predictions'):
        ek.load_spec(tables(model={"name": "mlp"}))
    groups = [{"members": 1}, {"members": 1, "model": {"dropout": 0.0}}]
    with pytest.raises(SpecError, match=r"ensemble\.groups\.1\.model\.dropout"):
        ek.load_spec(tables(ensemble={"groups": groups}))


@pytest.mark.parametrize(
    "model",
    [
        {"name": "binary_resnet", "width": 4, "blocks": 2, "stochastic": False},
        {"name": "mlp", "hidden": [], "dropout": 0.5},
        {"name": "torchvision", "arch": "shufflenet_v2_x0_5"},
    ],
    ids=lambda model: model["name"],
)
def test_a_network_without_stochastic_layers_is_rejected_before_training(model, tmp_path):
    with pytest.raises(UsageError, match=rf'(?s)stochastic model, but "{model["name"]}".*model\.dropout') as error:
        ek.train(tables(model=model), tmp_path / "run", progress=False)
    assert error.value.exit_code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", ["sequential", "stacked"])
def test_compiled_networks_make_the_same_passes(way, tmp_path):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns about itself
        networks, model = members("mlp")
        settings = EngineSettings(torch.device("cpu"), SGD, passes=S, compile=True)
        slots = [MemberState(network, model, member) for member, network in enumerate(networks)]
        compiled = engine_class(way)(slots, Objective([], ek.MSE()), settings).predict(inputs())
    plain = engine(way, members("mlp")[0], model).predict(inputs())
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
