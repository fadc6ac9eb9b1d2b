"""Whatever a spec holds, reading it ends in a spec or in a readable error, and touches nothing else."""

from __future__ import annotations

import os
import tomllib
from copy import deepcopy

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
