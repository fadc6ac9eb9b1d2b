"""The traced graph of an ensemble gives what the ensemble gives, for every kind of model and batches of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ensemblekit as ek
from ensemblekit.core.dataset import DataInfo
from ensemblekit.core.errors import NumericError, PluginError, UsageError
from ensemblekit.export.input_networks import NumberInputs
from ensemblekit.export.samples import Samples
from ensemblekit.export.tracing import check_exportable, trace_ensemble
from ensemblekit.export.verification import verify
from ensemblekit.inference.ensemble import Ensemble
from ensemblekit.members.build import build_network
from ensemblekit.members.layout import output_layout

SHAPE, CLASSES = (1, 8, 8), 3
SMALL = {"width": 2, "blocks": 1}
MODELS: dict[str, dict[str, Any]] = {
    "resnet": SMALL,
    "binary_resnet": SMALL,
    "mlp": {"hidden": [4]},
    "tabm": {"hidden": [4]},
    "batch_ensemble_resnet": SMALL,
    "packed_resnet": {**SMALL, "width": 4},
    "multi_head": {"model": {"name": "mlp", "hidden": [4]}, "features": 4},
    "sklearn": {"estimator": "decision_tree"},
}
"""Built-in models with sizes that take no time; the contract of each traces its network for one batch size."""


def ensemble_of(model: Any, shape: tuple[int, ...] = SHAPE, members: int = 2, **sections: Any) -> Ensemble:
    """An ensemble that was not trained, with running statistics of batch norm that are not those of new layers."""
    as_table = {"model": model} if isinstance(model, dict) else {}
    spec = ek.load_spec(
        {"ensemble": {"members": members}, **as_table, **sections},
        model=None if as_table else model,
        in_memory=True,
    )
    info = DataInfo("classification", shape, CLASSES)
    networks = [build_network(plan, output_layout(spec, info), info, seed=0) for plan in spec.networks]
    torch.manual_seed(0)
    for layer in (layer for network in networks for layer in network.modules()):
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return Ensemble(networks, spec, info).eval()


def assert_graph_equals(ensemble: Ensemble, inputs: torch.Tensor) -> None:
    program, _ = trace_ensemble(ensemble, NumberInputs(ensemble.info.input_shape, "float32"))
    graph = program.module()
    for size in (1, 2, len(inputs)):
        outputs = graph(inputs[:size])
        torch.testing.assert_close(outputs["probabilities"], ensemble.predict_proba(inputs[:size]))
        torch.testing.assert_close(outputs["member_outputs"], ensemble.member_outputs(inputs[:size]))


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_has_the_outputs_of_the_ensemble_for_any_batch_size(name):
    assert_graph_equals(ensemble_of({"name": name, **MODELS[name]}), torch.randn(5, *SHAPE))


def test_a_graph_repeats_the_stochastic_passes_of_the_original():
    ensemble = ensemble_of({"name": "mlp", "hidden": [6], "dropout": 0.5}, method={"name": "dropout", "passes": 3})
    inputs = torch.randn(5, *SHAPE)
    assert_graph_equals(ensemble, inputs)
    first, second = ensemble.member_outputs(inputs)[[0, 2]]  # of the same network
    assert not torch.allclose(first, second)


def test_a_graph_shows_each_member_its_own_inputs():
    class OwnPixels(ek.Method):
        """Hides some pixels."""

        @ek.hookimpl
        def member_inputs(self, inputs, uniform):
            return inputs * (uniform(inputs[0].numel(), fixed=True) < 0.5).view(-1, 1, *inputs.shape[1:])

    ensemble = ensemble_of({"name": "mlp", "hidden": [4]})
    spec = ek.load_spec(
        {"model": {"name": "mlp", "hidden": [4]}, "ensemble": {"members": 2}, "method": "own_pixels"},
        plugins=[OwnPixels],
        in_memory=True,
    )
    assert_graph_equals(Ensemble(list(ensemble.members), spec, ensemble.info).eval(), torch.randn(5, *SHAPE))


def test_a_network_that_takes_the_batch_size_for_a_constant_is_refused_with_the_reason():
    class Constant(nn.Linear):
        def __init__(self, num_outputs):
            super().__init__(4, num_outputs)

        def forward(self, inputs):
            return super().forward(inputs).expand(len(inputs), -1) + torch.zeros(len(inputs), 1)

    with pytest.raises(PluginError, match="the size of the batch becomes a constant") as caught:
        trace_ensemble(ensemble_of(Constant, (4,)), NumberInputs((4,), "float32"))
    assert "x.shape[0]" in caught.value.fix


def test_a_model_says_why_it_cannot_be_exported():
    class Stubborn(ek.Model):
        """A linear layer."""

        def build(self, input_shape, num_outputs):
            return nn.Linear(input_shape[0], num_outputs)

        def unsupported(self):
            return {"export": "it asks the weather"}

    with pytest.raises(UsageError, match='"stubborn" cannot be exported: it asks the weather'):
        check_exportable(ensemble_of(Stubborn(), (4,)))


class Sign(nn.Module):
    """A threshold at 0, where rounding decides."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CLASSES))

    def forward(self, inputs):
        return torch.where(inputs >= 0, 1.0, -1.0) * self.weight


def sign_samples() -> tuple[Ensemble, Samples]:
    inputs = torch.tensor([[0.0], [1.0], [-1.0]])
    return ensemble_of(Sign, (1,), members=1), Samples(NumberInputs((1,), "float32"), (inputs,), inputs)


def shifted(ensemble: Ensemble, samples: Samples, shift: float):
    """Runs the graph as if a runtime rounded inputs in another way."""
    graph = trace_ensemble(ensemble, samples.network)[0].module()
    return lambda inputs: graph(inputs[0] + shift)


def test_samples_for_which_rounding_decides_are_left_out_and_counted():
    ensemble, samples = sign_samples()
    agreement = verify(ensemble, samples, shifted(ensemble, samples, -1e-7), "graph")
    assert agreement.num_unstable == 1
    assert agreement.largest == 0


def test_a_difference_that_is_more_than_rounding_is_an_error():
    ensemble, samples = sign_samples()
    with pytest.raises(NumericError, match="the output member_outputs of the graph differs from the original by 2"):
        verify(ensemble, samples, shifted(ensemble, samples, -1.5), "graph")
