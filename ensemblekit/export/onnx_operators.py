"""Translations to ONNX of operations that torch's exporter does not know: distances, places in sorted numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return a function of ONNX's operators for each operation of torch."""
    from onnxscript import opset18

    op: Any = opset18  # its annotations are those of a script, and these functions are traced

    def distances(left: Any, right: Any, p: float, compute_mode: int | None = None) -> Any:
        """Compute the distances (B, N) of rows (B, D) and (N, D) in the norm p."""
        differences = op.Abs(op.Sub(op.Unsqueeze(left, op.Constant(value_ints=[1])), right))
        last = op.Constant(value_ints=[2])
        if p == 1:
            return op.ReduceSum(differences, last, keepdims=0)
        if p == math.inf:
            return op.ReduceMax(differences, last, keepdims=0)
        if p == 2:
            return op.Sqrt(op.ReduceSum(op.Mul(differences, differences), last, keepdims=0))
        power = op.CastLike(op.Constant(value_float=p), differences)
        total = op.ReduceSum(op.Pow(differences, power), last, keepdims=0)
        return op.Pow(total, op.Div(op.CastLike(op.Constant(value_float=1.0), total), power))

    def insertion(
        ordered: Any,
        values: Any,
        out_int32: bool = False,
        right: bool = False,
        side: str | None = None,
        sorter: Any = None,
    ) -> Any:
        """Count for each value the ordered numbers (N,) below it: the index where it is inserted on the left."""
        if right or side == "right" or sorter is not None:
            raise NotImplementedError("torch.searchsorted is translated for side='left' and no sorter")
        below = op.Less(ordered, op.Unsqueeze(values, op.Constant(value_ints=[-1])))
        return op.ReduceSum(op.Cast(below, to=7), op.Constant(value_ints=[-1]), keepdims=0)  # 7: int64

    aten = torch.ops.aten
    return {aten._cdist_forward.default: distances, aten.searchsorted.Tensor: insertion}
