"""Embeddings of categories: a table lookup for each column, on every engine, in every file of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ensemblekit as ek
from ensemblekit.core.errors import RunError
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.testing.toy_run import trained_weights

BLOCKS = ((2, 3), (6, 5))
"""Inputs 0, 1 and 5 are numbers; 2 to 4 and 6 to 10 are categories; 11 is a number."""


def inputs() -> tuple[Tensor, list[Tensor]]:
    """Twenty samples with two columns of categories, and the categories; the last sample has unknown ones."""
    random = torch.Generator().manual_seed(0)
    batch = torch.randn(20, 12, generator=random)
    chosen = [torch.randint(size, (20,), generator=random) for _, size in BLOCKS]
    for (first, size), categories in zip(BLOCKS, chosen, strict=True):
        batch[:, first : first + size] = functional.one_hot(categories, size)
        batch[-1, first : first + size] = 0
    return batch, chosen


def test_an_embedding_is_a_lookup_and_other_inputs_stay_in_their_order():
    network = ek.build_model({"name": "mlp", "embedding": 2}, (12,), 4, categories=BLOCKS)
    batch, chosen = inputs()
    layer = network[1]
    tables = [nn.functional.embedding(index, matrix) for index, matrix in zip(chosen, layer.matrices, strict=True)]
    expected = torch.cat([batch[:, :2], tables[0], batch[:, 5:6], tables[1], batch[:, 11:]], dim=1)
    expected[-1, [2, 3, 5, 6]] = 0
    torch.testing.assert_close(layer(batch), expected)
    assert network[2].in_features == layer.size == 8


@pytest.mark.parametrize(("embedding", "sizes"), [("auto", [2, 3]), (4, [3, 4]), (1, [1, 1])])
def test_an_embedding_is_never_larger_than_the_number_of_categories(embedding, sizes):
    network = ek.build_model({"name": "mlp", "embedding": embedding}, (12,), 4, categories=BLOCKS)
    assert [matrix.shape[1] for matrix in network[1].matrices] == sizes


def test_without_embedding_or_without_categories_the_network_is_the_plain_one():
    plain = ek.build_model("mlp", (12,), 4)
    for spec, categories in (("mlp", BLOCKS), ({"name": "mlp", "embedding": 3}, ())):
        network = ek.build_model(spec, (12,), 4, categories=categories)
        assert str(network) == str(plain)
        assert all(torch.equal(a, b) for a, b in zip(network.parameters(), plain.parameters(), strict=True))
    with pytest.raises(ek.EnsemblekitError, match="embedding"):
        ek.build_model({"name": "mlp", "embedding": 0}, (12,), 4)


@pytest.mark.parametrize("name", ["tabm", "multi_head"])
def test_families_embed_categories_once_for_all_members(name):
    model: dict[str, Any] = {"name": "mlp", "hidden": [6], "embedding": 2}
    model = {"name": name, "model": model} if name == "multi_head" else {"name": name, "hidden": [6], "embedding": 2}
    plugin = ek.load_spec({"data": "digits", "model": model, "ensemble": {"members": 3}}).model
    network = plugin.build_family_for((12,), 4, 3, BLOCKS).eval()
    shapes = [tuple(tensor.shape) for name, tensor in network.named_parameters() if "matrices" in name]
    assert shapes == [(3, 2), (5, 2)]
    assert network(inputs()[0]).shape == (3, 20, 4)


NUM_ROWS = 120


def frame() -> pandas.DataFrame:
    random = np.random.default_rng(1)
    effect = dict(zip("abcdef", [-2.0, -1.0, 0.0, 0.5, 1.0, 2.0], strict=True))
    letters, sizes = random.choice(list(effect), NUM_ROWS), random.normal(size=NUM_ROWS)
    score = np.array([effect[letter] for letter in letters]) + sizes
    colours = random.choice(["red", "green", None], NUM_ROWS)
    return pandas.DataFrame(
        {"letter": letters, "size": sizes, "colour": colours, "label": np.where(score > 0, "up", "down")}
    )


def spec(engine: str, **model: Any) -> dict[str, Any]:
    return {
        "data": {"target": "label"},
        "model": {"name": "mlp", "hidden": [8], "embedding": 2, **model},
        "ensemble": {"members": 2},
        "training": {"epochs": 2, "batch_size": 32, "optimizer": {"name": "sgd", "lr": 0.1}},
        "engine": {"name": engine, "device": "cpu"},
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, ek.Run]:
    folder = tmp_path_factory.mktemp("embedded")
    return {
        engine: ek.train(spec(engine), folder / engine, progress=False, data=frame())
        for engine in ("sequential", "stacked")
    }


def test_the_stacked_engine_trains_the_same_embeddings(trained):
    expected = trained_weights(trained["sequential"].path)
    embedded = [name for name in expected if "matrices" in name]
    assert len(embedded) == 4
    weights = trained_weights(trained["stacked"].path)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)
    fresh = ek.build_model(spec("stacked")["model"], (10,), 2, categories=((1, 3), (4, 6)))
    assert not torch.equal(fresh[1].matrices[0], expected[embedded[0]])  # they have learnt


def test_a_loaded_run_has_its_embeddings_and_predicts_as_it_was_trained(trained):
    run = trained["sequential"]
    ensemble = ek.load(run.path)
    assert ensemble.info.categories == ((1, 6), (7, 3))
    assert ek.evaluate_run(run.path, data=frame())["test_accuracy"] == pytest.approx(
        np.mean(ensemble.predict(frame()) == frame()["label"].to_numpy())
    )
    exported = torch.export.export(ensemble.members[0], (torch.zeros(3, 10),))
    batch = ensemble.as_inputs(frame()[:3], torch.device("cpu"))
    torch.testing.assert_close(exported.module()(batch), ensemble.members[0](batch))


def test_a_selection_keeps_the_embeddings(trained, tmp_path):
    ek.select(trained["sequential"].path, members=1, out=tmp_path / "one")
    assert ek.load(tmp_path / "one").predict(frame()[:5]).shape == (5,)


@pytest.mark.parametrize("blocks", [[[0, 3], [2, 4]], [[1, 90]], [["0", 3]], [[-1, 3]], [[0, 0]], [[0]], 3])
def test_damaged_blocks_of_categories_are_no_traceback(trained, blocks, monkeypatch):
    read = RunDirectory.read_model
    monkeypatch.setattr(
        RunDirectory, "read_model", lambda self: (lambda t, m: (t, {**m, "categories": blocks}))(*read(self))
    )
    with pytest.raises(RunError, match=r"model\.json"):
        ek.load(Path(trained["sequential"].path))
