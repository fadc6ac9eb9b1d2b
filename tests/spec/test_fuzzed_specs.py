"""Whatever a spec holds, reading it ends in a spec or in a readable error, and touches nothing else."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from random import Random

import tomli_w
from helpers.specs import FULL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ensemblekit.core.errors import SpecError, UsageError
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.sections import Spec
from ensemblekit.spec.tables import parse_override

PATHS = [
    "seed", "data", "data.name", "data.spread", "model", "model.bias", "ensemble", "ensemble.members", "method",
    "method.0", "method.0.weights", "method.0.fraction", "method.1.name", "method.1.lambda", "method.1.mode",
    "method.1.lamda", "training", "training.epochs", "training.loss", "training.optimizer", "training.optimizer.lr",
    "training.optimizer.betas", "training.schedule.every", "training.schedule.name", "engine.device", "engine.name",
    "extra",
]  # fmt: skip
WORDS = st.sampled_from(
    [
        "gncl",
        "gncll",
        "snapshot",
        "exact",
        "mse",
        "nll",
        "sgd",
        "adamw",
        "cosine",
        "",
        "..",
        "../x",
        "os.system",
        "cuda:1",
        "0.1",
    ]
)
SCALARS = st.one_of(
    WORDS,
    st.text(max_size=8),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.none(),
    st.sampled_from([0, 1, 0.5, -1, 2**63, 2**64, 10**400, 1e308]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "lambda", "k", "lr", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)
STARTS = [
    FULL,
    {"data": "blobs", "model": "linear"},
    {
        "seed": 7,
        "data": {"name": "digits", "validation_fraction": 0.1},
        "model": {"name": "mlp", "hidden": [8, 8], "dropout": 0.2},
        "ensemble": {"groups": [{"members": 2}, {"members": 1, "model": {"hidden": [4]}}]},
        "method": [{"name": "bagging", "weights": "bootstrap"}, "stacking"],
        "training": {
            "epochs": 3,
            "loss": {"name": "cross_entropy"},
            "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
            "schedule": {"name": "multistep", "after": [1, 2], "factor": 0.1},
            "patience": 2,
            "keep": "best",
        },
        "engine": {"name": "sequential", "device": "cpu", "precision": "float32"},
        "extensions": [{"name": "tensorboard"}],
    },
    {
        "data": {"name": "table", "path": "x.csv", "target": "y"},
        "model": {"name": "resnet"},
        "method": {"name": "snapshot", "cycles": 2},
    },
    {
        "data": "cifar100",
        "model": {"name": "torchvision", "arch": "resnet18"},
        "method": {"name": "gncl", "mode": "exact"},
    },
]
# ENSEMBLEKIT_FUZZED_SPECS=5000 tries as many; the default keeps the suite short
NUM_CASES = int(os.environ.get("ENSEMBLEKIT_FUZZED_SPECS", "300"))
CASES = settings(max_examples=NUM_CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def read(tables, overrides, registry) -> Spec | None:
    try:
        return load_spec(tables, overrides, registry)
    except SpecError as error:
        refusal = error
    assert refusal.exit_code == 2
    assert refusal.problems
    for problem in refusal.problems:
        assert problem.what
        assert len(str(problem)) < 2_000
    return None


@CASES
@given(overrides=st.dictionaries(st.sampled_from(PATHS), VALUES, max_size=4))
def test_any_values_in_a_spec_give_a_spec_that_survives_toml_or_a_readable_error(registry, overrides):
    before = deepcopy(FULL)
    spec = read(FULL, overrides, registry)
    assert before == FULL
    if spec is not None:
        assert load_spec(tomllib.loads(spec.to_toml()), None, registry) == spec


PARTS = [
    "seed", "data", "model", "ensemble", "groups", "method", "training", "loss", "optimizer", "schedule", "engine",
    "extensions", "name", "lambda", "members", "lr", "epochs", "device", "0", "1", "-1", "99", "é", "x y", "",
]  # fmt: skip
KEYS = st.lists(st.sampled_from(PARTS) | st.text(max_size=5), min_size=1, max_size=5).map(".".join)
TEXTS = st.builds("{}".format, SCALARS) | st.sampled_from(
    ["[1, 2]", '{name = "gncl"}', "{x.y = 1}", "[[]]", "{}", "[", "1979-05-27", "nan"]
)


@CASES
@given(settings=st.lists(st.tuples(KEYS, TEXTS), max_size=4))
def test_any_overrides_give_a_spec_or_an_error_with_its_source(registry, settings):
    try:
        overrides = dict(parse_override(f"{key}={text}") for key, text in settings)
    except UsageError:
        return
    spec = read(FULL, overrides, registry)
    assert spec is None or load_spec(tomllib.loads(spec.to_toml()), None, registry) == spec


@CASES
@given(random=st.randoms(use_true_random=False), values=st.lists(VALUES, min_size=4, max_size=4))
def test_any_mutation_of_a_valid_spec_gives_a_spec_or_a_readable_error(registry, random, values):
    tables = deepcopy(random.choice(STARTS))
    for value in values[: random.randint(1, 4)]:
        mutate(tables, random, value)
    spec = read(tables, None, registry)
    assert spec is None or load_spec(tomllib.loads(spec.to_toml()), None, registry) == spec


def mutate(tables, random: Random, value) -> None:
    """Change one thing: remove, rename, replace, nest, copy or exchange values anywhere in the tables."""
    places = list(locations(tables))
    if not places:
        return
    table, key = random.choice(places)
    other_table, other_key = random.choice(places)
    match random.choice(["remove", "rename", "replace", "list", "table", "unwrap", "copy", "exchange"]):
        case "remove":
            table.pop(key)
        case "rename" if isinstance(table, dict):
            table[misspelt(str(key), random)] = table.pop(key)
        case "replace":
            table[key] = value
        case "list":
            table[key] = [table[key]]
        case "table":
            table[key] = {"name": table[key]}
        case "unwrap" if isinstance(table[key], dict):
            table[key] = table[key].get("name")
        case "copy":
            table[key] = deepcopy(other_table[other_key])
        case "exchange":
            first, second = deepcopy(table[key]), deepcopy(other_table[other_key])
            other_table[other_key] = first
            if key in (table if isinstance(table, dict) else range(len(table))):
                table[key] = second


def locations(tables) -> Iterator[tuple[dict | list, str | int]]:
    """Every value in the tables, as its container and its key."""
    for key, value in list(tables.items()) if isinstance(tables, dict) else list(enumerate(tables)):
        yield tables, key
        if isinstance(value, dict | list):
            yield from locations(value)


def misspelt(key: str, random: Random) -> str:
    at = random.randrange(len(key) + 1)
    return random.choice([key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key.upper(), key[::-1], f"{key}.{key}"])


@CASES
@given(data=st.data())
def test_any_damage_to_a_spec_file_gives_a_spec_or_a_readable_error(registry, tmp_path_factory, data):
    text = tomli_w.dumps(FULL)
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 12))
    inserted = data.draw(st.text(alphabet=st.sampled_from("[]{}=.\"'#,\n\\ 0aé\x00"), max_size=6))
    file = tmp_path_factory.getbasetemp() / "damaged.toml"
    file.write_text(text[:start] + inserted + text[start + length :], encoding="utf-8", newline="")
    spec = read(file, None, registry)
    assert spec is None or load_spec(tomllib.loads(spec.to_toml()), None, registry) == spec


@settings(max_examples=NUM_CASES, deadline=None, database=None)
@given(text=st.text(max_size=20) | st.builds("{}={}".format, st.sampled_from(PATHS), st.text(max_size=12)))
def test_any_setting_is_parsed_or_refused(text):
    try:
        path, _ = parse_override(text)
    except UsageError as error:
        path = error.where
    assert path
