"""Short runs of the recipes of the cookbook, and their plugins."""

from __future__ import annotations

import torch
from torch.nn.utils import parameters_to_vector

import ensemblekit as ek
from ensemblekit.core.registry import load_file
from helpers.places import ROOT

COOKBOOK = ROOT / "docs" / "cookbook"
MLP = {"name": "mlp", "hidden": [8], "batch_norm": False}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.0}
DIGITS = {"name": "digits", "limit_train": 120, "limit_test": 60}
TABLES = {"epochs": 2, "batch_size": 40, "optimizer": SGD}


def plugin(recipe, name, **parameters):
    """A plugin of a recipe by its name, with these parameters."""
    (info,) = [info for info in load_file(COOKBOOK / f"{recipe}.py") if info.name == name]
    return info.load()(**parameters)


def train(recipe, path, training=None, progress=False, **tables):
    """A short run on digits with a recipe; None as its name: without one."""
    spec = {
        "data": DIGITS,
        "model": MLP,
        "ensemble": {"members": 2},
        "engine": {"name": "sequential", "device": "cpu"},
        "training": TABLES | (training or {}),
    }
    plugins = [] if recipe is None else [COOKBOOK / f"{recipe}.py"]
    return ek.train(spec | tables, path, progress=progress, plugins=plugins)


def load(recipe, run):
    return ek.load(run.path, plugins=[COOKBOOK / f"{recipe}.py"])


def data_of(run, split="test"):
    return next(getattr(ek.load_data(run.spec.data, run.spec.seed), split).batches(10_000))


def weights_of(ensemble):
    return torch.stack([parameters_to_vector(member.parameters()).detach() for member in ensemble.members])
