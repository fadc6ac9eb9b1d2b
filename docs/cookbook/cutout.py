"""An augmentation: cutout

A square of each training image is set to zero, at a random position that may lie partly outside the image, so that
networks do not rely on a single detail: x ⊙ (1 - m), with m the mask of the square. `sample` gives the random numbers
of an epoch, `apply` uses those of a batch on its device. DeVries and Taylor 2017, Improved Regularization of
Convolutional Neural Networks with Cutout.

```toml
[data]
augment = [{ name = "cutout", size = 3 }]
```
"""

from __future__ import annotations

import torch
from pydantic import Field

from ensemblekit import Augmentation


class Cutout(Augmentation):
    """Sets a random square of each image to zero."""

    paper = "DeVries and Taylor 2017, Improved Regularization of Convolutional Neural Networks with Cutout"
    formula = "x ⊙ (1 - m), m = 1 in a square around a random pixel"

    size: int = Field(8, ge=1, description="side of the square in pixels")

    def sample(self, num_images, generator):
        return torch.rand(num_images, 2, generator=generator)  # the centre, as shares of height and width

    def apply(self, images, sampled):
        inside = []
        for length, share in zip(images.shape[-2:], sampled.unbind(dim=1), strict=True):
            first = (share * length).floor().unsqueeze(1) - self.size // 2
            pixels = torch.arange(length, device=images.device)
            inside.append((pixels >= first) & (pixels < first + self.size))  # (B, length)
        rows, columns = inside
        square = rows.unsqueeze(2) & columns.unsqueeze(1)
        return images.masked_fill(square.unsqueeze(1), 0)
