"""CutMix: a rectangle of each image comes from another one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from pydantic import Field

from ensemblekit import BatchAugmentation, DataInfo, Problem
from ensemblekit_mixes.pairs import random_partners, sample_shares

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from ensemblekit import Spec


class Cutmix(BatchAugmentation):
    """Replaces a random rectangle of each image by that of another image of its batch."""

    paper = "Yun et al. 2019, CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features"
    formula = "x = x_a outside a rectangle of area 1 - s, x_b inside,  s ~ Beta(alpha, alpha)"

    alpha: float = Field(1.0, gt=0, description="parameter of the distribution of the shares; 1 is uniform")

    def sample(self, num_samples: int, generator: Generator) -> Tensor:
        """Sample partners, shares, and the centres of the rectangles, (num_samples, 4)."""
        partners, rows, columns = torch.rand(3, num_samples, generator=generator)
        return torch.stack([partners, sample_shares(num_samples, self.alpha, generator), rows, columns], dim=1)

    def apply(self, inputs: Tensor, sampled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        uniform, share, rows, columns = sampled.unbind(dim=1)
        partner = random_partners(uniform)
        height, width = inputs.shape[-2:]
        side = (1 - share).sqrt()
        inside_rows = _interval(rows, side, height)
        inside_columns = _interval(columns, side, width)
        inside = (inside_rows.unsqueeze(2) & inside_columns.unsqueeze(1)).unsqueeze(1)
        # the part of a rectangle that is outside the image does not count
        covered = inside_rows.sum(dim=1) * inside_columns.sum(dim=1) / (height * width)
        return inputs[partner].where(inside, inputs), partner, 1 - covered

    def check_data(self, spec: Spec, info: DataInfo) -> Iterable[Problem]:
        if len(info.input_shape) != 3:
            what = f'"{self.name}" cuts rectangles out of images, but "{spec.data.name}" has {info.form}'
            yield Problem("", what, 'use mix = "mixup"')


def _interval(centre: Tensor, side: Tensor, size: int) -> Tensor:
    """Which of `size` pixels are in an interval, (B, size), from its relative centre and length, both (B,)."""
    middle, half = (centre * size).floor(), ((side * size).floor() / 2).floor()
    pixels = torch.arange(size, device=centre.device)
    return (pixels >= (middle - half).unsqueeze(1)) & (pixels < (middle + half).unsqueeze(1))
