"""Diabetes progression: a small regression data set that is part of scikit-learn."""

from __future__ import annotations

from ensemblekit import DataInfo, Dataset, Splits

TEST_EVERY = 5


class Diabetes(Dataset):
    """Regression of disease progression from 10 measurements of 442 patients; part of scikit-learn.

    The test split does not depend on the seed: it is every fifth patient. Inputs and targets are standardised by the
    other patients, including those that are held out for validation.
    """

    source = "Efron et al. 2004, Least Angle Regression; in scikit-learn"
    licence = "none stated"
    samples = "354 training and 88 test patients"

    @property
    def info(self) -> DataInfo:
        return DataInfo("regression", (10,), 1)

    def load(self, seed: int) -> Splits:
        import numpy as np
        import torch
        from sklearn.datasets import load_diabetes
        from sklearn.preprocessing import StandardScaler

        inputs, progression = load_diabetes(return_X_y=True, scaled=False)
        targets = progression.reshape(-1, 1)
        test = np.arange(len(inputs)) % TEST_EVERY == TEST_EVERY - 1
        scaled = [
            torch.from_numpy(StandardScaler().fit(values[~test]).transform(values)).float()
            for values in (inputs, targets)
        ]
        train_split, test_split = ((scaled[0][rows], scaled[1][rows]) for rows in (~test, test))
        indices = {"train": torch.from_numpy(np.flatnonzero(~test)), "test": torch.from_numpy(np.flatnonzero(test))}
        return Splits(train=train_split, test=test_split, info=self.info, indices=indices)
