"""Handwritten digits: a small data set that is part of scikit-learn, so that a first run needs no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ensemblekit import DataError, DataInfo, ImageDataset, Splits

SIDE = 8
NUM_CLASSES = 10
TEST_EVERY = 5


class Digits(ImageDataset):
    """Handwritten digits: 8×8 pixels, 10 classes; part of scikit-learn, so nothing is downloaded.

    The grey values 0 to 16 are scaled to [0, 1]. The test split does not depend on the seed: it is every fifth sample
    of each class.
    """

    source = "Alpaydin and Kaynak 1998, Optical Recognition of Handwritten Digits (its test part), UCI; in scikit-learn"
    licence = "CC BY 4.0"
    samples = "1,442 training and 355 test images"

    @property
    def info(self) -> DataInfo:
        side = self.crop_size or self.size or SIDE
        return DataInfo("classification", (1, side, side), NUM_CLASSES)

    def load(self, seed: int) -> Splits:
        import numpy as np
        import torch

        rows = torch.from_numpy(np.loadtxt(_file(), delimiter=",", dtype=np.int64))
        images = rows[:, :-1].float().view(-1, 1, SIDE, SIDE) / 16
        classes = rows[:, -1]
        rank_in_class = torch.nn.functional.one_hot(classes).cumsum(0).gather(1, classes.unsqueeze(1)).squeeze(1)
        test = rank_in_class % TEST_EVERY == 0
        return Splits(
            train=(images[~test], classes[~test]),
            test=(images[test], classes[test]),
            info=self.info,
            classes=tuple(str(digit) for digit in range(NUM_CLASSES)),
            indices={"train": (~test).nonzero().flatten(), "test": test.nonzero().flatten()},
        )


def _file() -> Path:
    """Return the path of scikit-learn's file without importing scikit-learn, which takes as long as the training."""
    package = find_spec("sklearn")
    folders = package.submodule_search_locations if package else None
    for folder in folders or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.exists():
            return file
    raise DataError("digits.csv.gz of scikit-learn not found", 'data set "digits"', "run: pip install scikit-learn")
