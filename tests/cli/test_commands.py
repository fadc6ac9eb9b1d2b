"""The command line, through click's runner and as a real process."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import jsonschema
import pytest
from helpers.commands import last_error, run
from helpers.places import TOY_PLUGINS
from helpers.plain_methods import plain_methods

import ensemblekit as ek
from ensemblekit.cli import main
from ensemblekit.cli.commands import warnings_as_lines
from ensemblekit.core.registry import Registry, discover
from ensemblekit.display.console import Printer
from ensemblekit.display.plugin_pages import print_page
from ensemblekit.spec.keys import SECTIONS
from ensemblekit.spec.optimizers import optimizer_classes
from ensemblekit.spec.sections import ENTRIES

TOYS = ("--plugin", str(TOY_PLUGINS))
GOOD = """\
seed = 1
[data]
name = "blobs"
[model]
name = "linear"
[method]
name = "gncl"
lambda = 0.6
"""


@pytest.fixture
def spec(tmp_path) -> Path:
    file = tmp_path / "spec.toml"
    file.write_text(GOOD)
    return file


def test_list_shows_every_kind_with_descriptions():
    result = run("list", *TOYS)
    assert result.exit_code == 0
    for text in (
        "methods",
        "models",
        "datasets",
        "losses",
        "gncl",
        "One linear layer.",
        "Gaussian blobs.",
        "cross_entropy",
    ):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("kind", "present", "absent"),
    [("methods", "gncl", "blobs"), ("datasets", "blobs", "gncl"), ("losses", "mse", "gncl")],
)
def test_list_of_one_kind_shows_only_that(kind, present, absent):
    names = [entry["name"] for entry in json.loads(run("list", kind, *TOYS, "--json").stdout)]
    assert present in names
    assert absent not in names


def test_list_of_a_kind_that_has_none_says_so(monkeypatch):
    monkeypatch.setattr("ensemblekit.core.registry.discover", lambda files: Registry([]))
    assert run("list", "extensions").stdout == "no extensions are installed\n"


@pytest.mark.parametrize("name", [info.name for info in discover([TOY_PLUGINS])])
def test_every_plugin_has_a_complete_page(name, capsys):
    page = json.loads(run("inspect", name, *TOYS, "--json").stdout)
    assert page["description"].endswith(".")
    assert page["package"]
    for parameter in page["parameters"]:
        assert parameter["description"], f"{name}.{parameter['name']} is not described"
        assert parameter["type"]
        assert parameter["allowed"]
    if page["kind"] == "method":
        assert page["formula"]
        assert page["paper"] or page["package"] != "ensemblekit"
    print_page(Printer(), page)
    text = capsys.readouterr().out
    assert page["description"] in text
    assert page["snippet"] in text


@pytest.mark.parametrize("name", plain_methods())
def test_the_snippet_of_every_method_is_ready_to_paste(name, tmp_path):
    snippet = json.loads(run("inspect", name, "--json").stdout)["snippet"]
    file = tmp_path / "spec.toml"
    file.write_text(f'[data]\nname = "blobs"\n[model]\nname = "linear"\n[training]\nepochs = 90\n{snippet}\n')
    result = run("validate", str(file), *TOYS)
    assert result.exit_code == 0, result.stderr


def test_inspect_explains_a_method():
    text = run("inspect", "gncl").stdout
    for part in (
        "Interpolates between independent (lambda = 0) and end-to-end (lambda = 1) training.",
        "upper: lambda l(f, y) + ((1 - lambda) / M) sum_i l(h_i, y)",
        "Buschjäger et al. 2020",
        "ensemble_loss, member_loss",
        f"ensemblekit {ek.__version__}",
        "number ≥ 0",
        '[method]\nname = "gncl"',
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("inspect", "gnkl"), ('no plugin "gnkl"', 'did you mean "gncl"?', "ensemblekit list")),
        (("lst",), ('no command "lst"', 'did you mean "list"?', "ensemblekit --help")),
        (("list", "methodz"), ("'methodz' is not one of", "ensemblekit list --help")),
        (("inspect",), ("Missing argument '[KIND:]NAME|SECTION'", "ensemblekit inspect --help")),
        (("list", "--jsn"), ("No such option", "ensemblekit list --help")),
        (("list", "--debug"), ("--debug stands before the command", "ensemblekit --debug list …")),
        (("train", "digits", "--epochs", "3"), ("No such option '--epochs'", "--set training.epochs=VALUE")),
        (("train", "digits", "--batch-size=3"), ("No such option '--batch-size'", "--set training.batch_size=VALUE")),
        (("sweep", "digits", "--lr", "1"), ("No such option '--lr'", "--set training.optimizer.lr=VALUE")),
        (("train", "digits", "--outt", "x"), ("No such option '--outt'", "ensemblekit train --help")),
        (("train", "digits", "--set", "training.epochs", "=", "3"), ("no spaces around =",)),
        (("inspect", "modl:gncl"), ('"modl" is not a kind of plugin', 'did you mean "model"?')),
        (("inspect", "trainin"), ('no plugin "trainin"', 'did you mean "training"?')),
        (("inspect", "optimizer:adm"), ('there is no optimizer "adm"', 'did you mean "adam"?')),
        (("inspect", "method:gnkl"), ('no plugin "method:gnkl"', 'did you mean "gncl"?')),
        (("specs", "cpy"), ("No such command 'cpy'", "ensemblekit specs --help")),
        (("list", "--plugin", "nothing.py"), ("no such file", "nothing.py")),
    ],
)
def test_a_wrong_call_ends_with_one_line_that_says_how_to_fix_it(arguments, parts):
    result = run(*arguments)
    assert result.exit_code == 2
    assert last_error(result).startswith("error: ")
    for part in parts:
        assert part in last_error(result)
    assert "Traceback" not in result.stderr


def test_a_name_of_several_kinds_asks_which(tmp_path):
    file = tmp_path / "twins.py"
    file.write_text(
        'from ensemblekit import MSE, Method\nclass Twin(Method):\n    """A method."""\n'
        'def make():\n    class Twin(MSE):\n        """A loss."""\n    return Twin\nOther = make()\n'
    )
    result = run("inspect", "twin", "--plugin", str(file))
    assert (result.exit_code, "add the kind: method:twin or --kind method" in last_error(result)) == (2, True)
    for arguments in (("twin", "--kind", "loss"), ("loss:twin",)):
        assert run("inspect", *arguments, "--plugin", str(file)).stdout.startswith("twin (loss)\nA loss.")


BROKEN_DATASETS = """\
from ensemblekit import Dataset

class Good(Dataset):
    \"\"\"Works.\"\"\"
    samples = 3
    def load(self, seed): ...

class BadInfo(Good):
    \"\"\"Its info raises.\"\"\"
    @property
    def info(self):
        raise RuntimeError("no\\x1b[31m info")

class BadForm(Good):
    \"\"\"Its info is not one.\"\"\"
    @property
    def info(self):
        return 3

class BadPlaces(Good):
    \"\"\"Its places end the program.\"\"\"
    def places(self):
        raise SystemExit(3)

class BadDefault(Good):
    \"\"\"Cannot be made.\"\"\"
    def model_post_init(self, context):
        raise OSError("no such place")
"""


def test_a_broken_data_set_is_listed_with_its_error_beside_the_others(tmp_path):
    file = tmp_path / "broken_datasets.py"
    file.write_text(BROKEN_DATASETS)
    result = run("list", "datasets", "--plugin", str(file))
    assert result.exit_code == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "Works." in lines["good"]
    assert "digits" in lines
    assert r"broken: a plugin failed with RuntimeError: no\x1b[31m info" in lines["bad_info"]
    assert "AttributeError" in lines["bad_form"]
    assert "SystemExit: 3" in lines["bad_places"]
    assert "no such place" in lines["bad_default"]
    listed = {
        entry["name"]: entry["error"]
        for entry in json.loads(run("list", "datasets", "--plugin", str(file), "--json").stdout)
    }
    assert (listed["good"], "RuntimeError" in listed["bad_info"]) == (None, True)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_of_a_spec_has_a_page_with_toml_to_paste(section, spec):
    page = json.loads(run("inspect", section, "--json").stdout)
    assert page["description"].endswith(".")
    assert page["parameters"] or page["names"]
    for parameter in page["parameters"]:
        assert parameter["description"]
        assert parameter["allowed"]
    pasted = tomllib.loads(page["snippet"].replace('"…"', '"gncl"'))
    assert section.partition(".")[0] in pasted
    assert page["snippet"] in run("inspect", section).stdout
    if section in (
        "seed",
        "ensemble",
        "training",
        "training.optimizer",
        "training.schedule",
        "training.loss",
        "engine",
    ):
        tables = {"data": "blobs", "model": "linear"} | pasted
        assert ek.load_spec(tables, plugins=[TOY_PLUGINS]) == ek.load_spec(
            {"data": "blobs", "model": "linear"}, plugins=[TOY_PLUGINS]
        )


def test_the_sections_that_are_completed_are_those_of_a_spec():
    assert sorted(SECTIONS) == sorted(entry.path for entry in ENTRIES.values())


@pytest.mark.parametrize(
    "name", [*(f"optimizer:{name}" for name in optimizer_classes()), "schedule:step", "schedule:cosine"]
)
def test_every_optimizer_and_schedule_has_a_page(name):
    result = run("inspect", name)
    assert result.exit_code == 0, result.stderr
    kind, _, name = name.partition(":")
    assert result.stdout.startswith(f"{name} ({kind})\n")
    assert f'name = "{name}"' in result.stdout


def test_inspect_of_training_explains_its_keys():
    text = re.sub(" +", " ", run("inspect", "training").stdout)
    for part in (
        "batch_size integer 128 integer ≥ 1 samples in one step, B",
        "ensemblekit inspect training.optimizer",
        'optimizer = "adabelief"',
    ):
        assert part in text


def test_plugins_shows_packages_versions_and_what_each_adds():
    packages = {package["package"]: package for package in json.loads(run("plugins", *TOYS, "--json").stdout)}
    assert packages["ensemblekit"]["version"] == ek.__version__
    assert "gncl" in packages["ensemblekit"]["adds"]["method"]
    assert packages[str(TOY_PLUGINS)]["adds"]["model"] == ["linear", "noisy"]
    assert "ensemblekit" in run("plugins").stdout


def test_validate_shows_the_plan(spec):
    text = run(
        "validate", str(spec), *TOYS, "--set", "training.epochs=3", "--set", "training.optimizer.name=sgd"
    ).stdout
    for part in (
        'gncl (mode = "upper", lambda = 0.6)',
        "lambda l(f, y)",
        "3 epochs, batch size 128",
        "sgd (lr = 0.001",
    ):
        assert part in text


def test_validate_as_json_is_the_resolved_spec(spec):
    result = json.loads(run("validate", str(spec), *TOYS, "--json").stdout)
    assert result["valid"] is True
    assert result["spec"]["method"] == {"name": "gncl", "mode": "upper", "lambda": 0.6}
    assert result["spec"] == ek.load_spec(spec, plugins=[TOY_PLUGINS]).to_dict()


def test_validate_lists_every_problem_and_ends_with_one_line(spec):
    spec.write_text(GOOD.replace("lambda", "lamda").replace("seed = 1", "seed = -1"))
    result = run("validate", str(spec), *TOYS)
    assert result.exit_code == 2
    assert 'method.lamda: unknown key; did you mean "lambda"?' in result.stderr
    assert "seed: -1 is not a seed" in result.stderr
    assert last_error(result) == f"error: 2 problems in the spec; {spec}: seed, method.lamda; each is listed above"
    assert result.stdout == ""
    report = run("validate", str(spec), *TOYS, "--json")
    assert report.exit_code == 2
    assert {problem["path"] for problem in json.loads(report.stdout)["problems"]} == {"seed", "method.lamda"}


def test_validate_creates_nothing(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("validate", str(spec), *TOYS)
    run("validate", str(spec), *TOYS, "--set", "seed=oops")
    assert list(tmp_path.iterdir()) == [spec]


def test_debug_shows_the_traceback(spec):
    result = run("--debug", "validate", str(spec))  # without the toy plugins
    assert "Traceback" in result.stderr
    assert last_error(result).startswith("error: ")


def test_schema_accepts_valid_specs_and_rejects_wrong_ones(spec):
    schema = json.loads(run("schema", *TOYS).stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    good = ek.load_spec(spec, plugins=[TOY_PLUGINS]).to_dict()
    validator.validate(good)
    validator.validate({**good, "method": ["bagging", {"name": "gncl"}]})
    validator.validate({**good, "training": {"optimizer": {"lr": 0.5}}})
    for wrong in (
        {**good, "sed": 1},
        {**good, "method": {"name": "gncl", "lamda": 1}},
        {**good, "method": {"name": "gncl", "lambda": -1}},
        {**good, "method": "gnkl"},
        {**good, "training": {"loss": "mse2"}},
        {**good, "training": {"optimizer": {"momentum": 0.5}}},
        {**good, "training": {"optimizer": {"name": "sgd", "betas": [0.9, 0.9]}}},
        {"model": good["model"]},
    ):
        assert list(validator.iter_errors(wrong)), wrong


def test_help_shows_every_command_in_a_group():
    text = run("--help").stdout
    titles = ["Train:", "Look at results:", "Use a trained ensemble:", "Plugins:", "Specs:", "Data:", "Speed:"]
    assert [line for line in text.splitlines() if line in titles] == titles
    grouped = [command.name for commands in main.sections.values() for command in commands]
    assert sorted(grouped) == sorted(main.commands)
    assert "_ENSEMBLEKIT_COMPLETE=bash_source" in text
    assert "..." not in text.partition("Train:")[2]  # no summary is too long for its line


def test_warnings_are_one_line_each_and_nothing_is_left_of_that_afterwards(capsys):
    before = warnings.showwarning
    with warnings_as_lines():
        warnings.simplefilter("always")
        warnings.warn("mind the gap", stacklevel=1)
    assert capsys.readouterr().err == "warning: mind the gap\n"
    assert warnings.showwarning is before


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_has_help(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert len(main.commands[command].help) > 40
    for parameter in main.commands[command].params:
        assert getattr(parameter, "help", None) or parameter.param_type_name == "argument"


def test_help_and_import_need_no_torch_pydantic_or_rich():
    code = (
        "import sys, ensemblekit, ensemblekit.cli\n"
        "try: ensemblekit.cli.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "slow = {'torch', 'pydantic', 'rich', 'pluggy', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_installed_command_and_the_module_are_the_same_program():
    script = Path(sys.executable).parent / "ensemblekit"
    first = subprocess.run([script, "list"], capture_output=True, text=True, check=True)
    second = subprocess.run([sys.executable, "-m", "ensemblekit", "list"], capture_output=True, text=True, check=True)
    assert first.stdout == second.stdout
    version = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.strip() == ek.__version__


def test_a_pipe_gets_plain_text_and_a_terminal_gets_colours_unless_asked_not_to():
    piped = subprocess.run(
        [sys.executable, "-m", "ensemblekit", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert "\x1b[" not in piped
    assert "─" not in piped
    assert "\x1b[" in on_a_terminal({"TERM": "xterm-256color"})
    plain = on_a_terminal({"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert "─" in plain
    assert "\x1b[3" not in plain


def on_a_terminal(environment: dict[str, str]) -> str:
    """What `ensemblekit list losses` writes to a terminal."""
    controller, terminal = pty.openpty()
    variables = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "ensemblekit", "list", "losses"]
    subprocess.run(command, stdout=terminal, env=variables | environment, check=True)
    os.close(terminal)
    output = b""
    while True:
        try:
            part = os.read(controller, 4096)
        except OSError:  # Linux reports the closed terminal this way
            break
        if not part:
            break
        output += part
    os.close(controller)
    return output.decode()
