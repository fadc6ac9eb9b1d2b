"""The whole ensemble as one module that can be traced: inputs as users have them, named outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ensemblekit.core.input_network import InputNetwork
from ensemblekit.core.outputs import pad
from ensemblekit.export.graph_outputs import graph_outputs
from ensemblekit.export.networks import GraphNetwork, GraphView
from ensemblekit.inference.ensemble import Ensemble


class EnsembleGraph(nn.Module):
    """Raw inputs (B, …) → outputs by name, as `graph_outputs` has them.

    `Ensemble` runs its networks in threads, on folded copies that it renews, in chunks. This module runs them one after
    the other, so that nothing but operations on tensors is left to trace; it combines by the functions of `Combiner`.

    Args:
        ensemble: the trained ensemble, on the CPU, in evaluation mode.
        preparation: prepares the inputs.
        example: prepared inputs (B, *input_shape), with which stochastic members record their random numbers.
    """

    def __init__(self, ensemble: Ensemble, preparation: InputNetwork, example: Tensor) -> None:
        super().__init__()
        self.preparation = preparation
        self.combiner, self.task, self.dtype = ensemble.combiner, ensemble.info.task, ensemble.dtype
        example = example.to(self.dtype)
        passes = ensemble.num_passes
        has_views = self.combiner.objective.members.have_views
        self.views = nn.ModuleList(
            GraphView(ensemble, plan, example) if has_views else nn.Identity() for plan in ensemble.plans
        )
        self.networks = nn.ModuleList(
            GraphNetwork(network, passes, view(example))
            for network, view in zip(ensemble.members, self.views, strict=True)
        )
        self.num_passes = passes or 1
        layout = self.combiner.objective.layout
        self.width = None if layout is None else layout.width

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        prepared = self.preparation(*inputs).to(self.dtype)
        outputs = [network(view(prepared)) for network, view in zip(self.networks, self.views, strict=True)]
        # (S, B, C) of a member, (S, K, B, C) of a family
        rows = [pad(each if each.ndim == 4 else each.unsqueeze(1), self.width) for each in outputs]
        return graph_outputs(self.combiner, self.task, torch.cat(rows, dim=1).flatten(0, 1), self.num_passes)
