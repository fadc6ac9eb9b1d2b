"""What nobody foresaw ends in one line too: memory that runs out, a plugin that raises or exits, a file of odd form."""

from __future__ import annotations

import json
import os
import pwd
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial

import pytest
from click.testing import CliRunner, Result
from helpers.run_edits import edit_json

from ensemblekit.bench.subprocesses import SubprocessContestant
from ensemblekit.cli import main
from ensemblekit.core.errors import EnsemblekitError, ResourceError, explain, is_out_of_memory

SPEC = """
[data]
name = "digits"
limit_train = 60
limit_test = 20
[model]
name = "mlp"
hidden = [4]
[ensemble]
members = 2
[training]
epochs = 1
[engine]
name = "sequential"
device = "cpu"
"""
HEAD = "from ensemblekit import DataInfo, Dataset, Extension, Method, Model, Problem, Splits, hookimpl\nimport torch\n"
METHOD = HEAD + 'class Bad(Method):\n    """Fails."""\n    @hookimpl\n    def {}\n'
LOSS = "member_loss(self, outputs):\n        "


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path / "spec.toml"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("text", "setting", "parts"),
    [
        (
            METHOD.format(LOSS + "raise KeyError('lost')"),
            "method",
            ("KeyError: 'lost'", "member_loss() in", "bad.py, line 7"),
        ),
        (METHOD.format(LOSS + "raise SystemExit(0)"), "method", ("SystemExit: 0", "member_loss() in")),
        (METHOD.format(LOSS + "return outputs.detach().mean(-1)"), "method", ("nothing can be learned", "detach()")),
        (
            METHOD.format("learning_rate(self, base):\n        return -base"),
            "method",
            ("returned -0.001", "at least 0"),
        ),
        (
            METHOD.format("select_members(self, outputs):\n        return outputs.argmin(0)[:, 0]"),
            "method",
            ("int64", "a boolean or floating-point mask"),
        ),
        (
            HEAD + "class Bad(Method):\n    def check_spec(self, spec): ...\n",
            "method",
            ("check_spec()", "yield Problem(…)"),
        ),
        (
            HEAD + "class Bad(Method):\n    def required_members(self):\n        return 2.5\n",
            "method",
            ("2.5", "return an int"),
        ),
        (
            HEAD + "class Bad(Model):\n    def build(self, input_shape, num_outputs):\n"
            "        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_outputs))\n"
            "    def unsupported(self):\n        return ['vmap']\n",
            "model",
            ("unsupported() returned a list", "return a dict"),
        ),
        (
            HEAD + "class Bad(Dataset):\n    def load(self, seed):\n        return torch.zeros(3), torch.zeros(3)\n",
            "data",
            ("load() returned a tuple", "Splits"),
        ),
        (
            HEAD + "class Bad(Dataset):\n    @property\n    def info(self):\n"
            "        return DataInfo('classification', (1, 8, 8), 3)\n    def load(self, seed):\n"
            "        pair = (torch.zeros(9, 1, 8, 8), torch.arange(9))\n"
            "        return Splits(pair, pair, DataInfo('classification', (1, 8, 8), 9))\n",
            "data",
            ("9 classes", "3 classes", "make both equal"),
        ),
    ],
    ids=range(10),
)
def test_whatever_a_plugin_does_is_one_line_that_names_the_place(spec, text, setting, parts):
    (spec.parent / "bad.py").write_text(text)
    override = f'{setting}={{name="bad"}}'
    result = run("train", str(spec), "--plugin", "bad.py", "--set", override, "--out", "run", "--quiet")
    assert result.exit_code == 4, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


def test_debug_shows_the_traceback(spec):
    (spec.parent / "bad.py").write_text(METHOD.format(LOSS + "raise KeyError('lost')"))
    result = run("--debug", "train", str(spec), "--plugin", "bad.py", "--set", "method=bad", "--out", "run", "--quiet")
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_what_no_plugin_has_done_is_told_apart():
    try:
        json.loads("{")
    except ValueError as error:
        told = explain(error)
    assert type(told) is EnsemblekitError
    assert told.exit_code == 1
    assert "please report it" in told.fix


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"), True),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_memory_that_ran_out_is_known_in_every_form(error, ran_out):
    assert is_out_of_memory(error) == ran_out
    assert isinstance(explain(error), ResourceError) == ran_out


def test_a_run_that_does_not_fit_into_memory_says_what_to_lower(spec):
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))
    wide = ["--set", "model.hidden=[60000, 60000]", "--set", "model.batch_norm=false"]
    command = [sys.executable, "-m", "ensemblekit", "train", str(spec), "--out", "run", "--quiet", *wide]
    result = subprocess.run(command, preexec_fn=limit, text=True, capture_output=True)
    assert result.returncode == 7, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: out of memory")
    assert "training.batch_size" in line


@pytest.mark.parametrize(
    ("file", "change", "verb"),
    [
        ("model.json", lambda table: table["metadata"].pop("task"), "evaluate"),
        ("environment.json", lambda table: table.update(plugins=["x"]), "evaluate"),
        ("result.json", lambda table: table.update(metrics=[1]), "resume"),
    ],
    ids=["model", "environment", "result"],
)
def test_a_file_of_a_run_that_has_another_form_is_named(spec, file, change, verb):
    assert run("train", str(spec), "--out", "run", "--quiet").exit_code == 0
    edit_json(spec.parent / "run" / file, change)
    result = run(verb, "run")
    assert result.exit_code == 5, result.stderr
    assert "damaged: unexpected structure" in result.stderr.splitlines()[-1]
    assert file in result.stderr


def test_a_batch_of_one_sample_is_refused_where_batch_norm_is(spec):
    result = run("train", str(spec), "--set", "training.batch_size=1", "--out", "run")
    assert result.exit_code == 2
    assert "batch norm cannot be trained on a batch of a single sample; training.batch_size" in result.stderr
    plain = ["--set", "training.batch_size=1", "--set", "model.batch_norm=false", "--quiet"]
    assert run("train", str(spec), *plain, "--out", "run").exit_code == 0


def test_a_model_that_cannot_take_bf16_is_not_given_it(spec):
    (spec.parent / "own.py").write_text(
        HEAD + "from ensemblekit_models.mlp import MLP\nclass Exact(MLP):\n    '''Exact.'''\n"
        "    def unsupported(self):\n        return {'autocast': 'its sums overflow'}\n"
    )
    own = ["--plugin", "own.py", "--set", "model=exact", "--set", "engine.precision=bf16", "--out", "run"]
    result = run("train", str(spec), *own)
    assert result.exit_code == 2
    assert "its sums overflow; engine.precision" in result.stderr


def test_without_arguments_it_shows_its_help():
    result = run()
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ensemblekit")


@pytest.mark.parametrize("device", ["meta", "gpu", "cuda:x"])
def test_a_device_that_is_none_is_refused_with_all_that_are(spec, device):
    result = run("train", str(spec), "--device", device)
    assert result.exit_code == 2
    assert "auto, cpu, mps, cuda or cuda:N" in result.stderr


def test_without_a_home_data_sets_are_still_listed(monkeypatch):
    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "ENSEMBLEKIT_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    result = run("list", "datasets")
    assert result.exit_code == 0, result.stderr
    assert "cifar100" in result.stdout


class Contestant:
    """Does something in a process of its own."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self) -> int:
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "be interrupted":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        return 7


def test_a_contestant_that_is_killed_is_an_error_and_one_that_gets_ctrl_c_goes_on():
    with ExitStack() as stack:
        assert stack.enter_context(SubprocessContestant(partial(Contestant, "be interrupted")))() == 7
        killed = stack.enter_context(SubprocessContestant(partial(Contestant, "die")))
        for _ in range(2):
            with pytest.raises(ResourceError, match="ended with code -9"):
                killed()


def test_bench_leaves_an_older_file_until_it_has_a_newer_one(tmp_path):
    older = tmp_path / "older.csv"
    older.write_text("old")
    assert run("bench", "--only", "nothing", "--output", str(older)).exit_code == 2
    assert older.read_text() == "old"


def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_computed(spec, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    result = run("train", str(spec), "--out", "deep/run")
    assert result.exit_code == 5
    assert "error: cannot write; deep/run" in result.stderr
    assert result.stdout == ""


def test_a_hook_that_gives_nan_is_named_with_the_step(spec):
    (spec.parent / "bad.py").write_text(METHOD.format(LOSS + "return outputs.mean(-1) * float('nan')"))
    result = run("train", str(spec), "--plugin", "bad.py", "--set", "method=bad", "--out", "run", "--quiet")
    assert result.exit_code == 6
    assert 'plugin "bad": hook "member_loss"' in result.stderr
    assert "at epoch 1, step 1; run keeps the checkpoint of epoch 0; check its formula" in result.stderr


@pytest.mark.parametrize("text", ["{name=", ""])
def test_an_option_is_blamed_by_its_own_name(spec, text):
    result = run("evaluate", "run", "--data", text)
    assert result.exit_code == 2
    assert "; --data; write a name, or a table" in result.stderr
