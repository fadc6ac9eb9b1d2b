"""Discovery of plugins, with packages that are really built and installed, broken and clashing ones among them."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers.places import PACKAGES, TOY_PLUGINS

from ensemblekit.cli import main
from ensemblekit.core.errors import PluginError, UsageError
from ensemblekit.core.registry import discover, load_file

SPEC = """
[data]
name = "blobs"
[model]
name = "linear"
[method]
name = "{method}"
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """A throwaway target with the example packages installed by pip."""
    sources = shutil.copytree(PACKAGES, tmp_path_factory.mktemp("sources") / "packages")
    target = tmp_path_factory.mktemp("site")
    packages = [str(path) for path in sorted(sources.iterdir()) if path.name != "clash"]
    _install(target, packages)
    return target


@pytest.fixture(scope="session")
def clashing_site(site, tmp_path_factory) -> Path:
    """The same with a package whose names are taken."""
    source = shutil.copytree(PACKAGES / "clash", tmp_path_factory.mktemp("sources") / "clash")
    target = tmp_path_factory.mktemp("site")
    shutil.copytree(site, target, dirs_exist_ok=True)
    _install(target, [str(source)])
    return target


def _install(target: Path, packages: list[str]) -> None:
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(target), *packages], check=True)


@pytest.fixture
def installed(site, monkeypatch):
    """The example packages are on the path of this process, and forgotten afterwards."""
    yield from _on_path(site, monkeypatch)


@pytest.fixture
def clashing(clashing_site, monkeypatch):
    """The same with the clashing package."""
    yield from _on_path(clashing_site, monkeypatch)


def _on_path(target, monkeypatch):
    monkeypatch.syspath_prepend(target)
    yield
    for name in [name for name in sys.modules if name.startswith("ekexample")]:
        del sys.modules[name]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def validate(tmp_path: Path, method: str) -> Result:
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC.format(method=method))
    return run("validate", str(spec), "--plugin", str(TOY_PLUGINS))


def test_a_third_partys_method_is_listed_inspected_and_validated_like_a_built_in_one(installed, tmp_path):
    listed = {entry["name"]: entry for entry in json.loads(run("list", "methods", "--json").stdout)}
    assert listed["softmin"]["description"] == "Members of little loss on a sample learn most from it."
    assert listed["softmin"]["package"] == "ekexample-softmin"
    page = json.loads(run("inspect", "softmin", "--json").stdout)
    assert page["version"] == "1.2.3"
    assert page["hooks"] == ["member_loss"]
    assert page["parameters"][0]["name"] == "temperature"
    assert validate(tmp_path, "softmin").exit_code == 0


def test_listing_names_imports_no_plugin_and_no_torch(site):
    code = (
        "import sys, ensemblekit.cli\n"
        "try: ensemblekit.cli.main(['list', '--json'])\n"
        "except SystemExit: pass\n"
        "loaded = [name for name in sys.modules if name.startswith(('torch', 'ekexample', 'ensemblekit_'))]\n"
        "assert not loaded, loaded\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("arguments", [("--help",), ("list",), ("plugins",), ("schema",), ("inspect", "gncl")])
def test_broken_plugins_break_nothing_else(installed, arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_plugins_shows_the_reason_of_each_broken_plugin(installed):
    result = run("plugins")
    assert result.exit_code == 0
    reasons = result.stderr
    assert 'method "wrecked" cannot be imported: RuntimeError: a dependency is too old' in reasons
    assert 'method "quitter" cannot be imported: SystemExit: go away' in reasons
    assert 'method "vanished" cannot be imported: ModuleNotFoundError' in reasons
    assert 'plugin "hookless": there is no hook "member_los"' in reasons
    assert 'method "impostor" is not a class of that kind' in reasons
    assert "softmin" in result.stdout
    packages = {package["package"]: package for package in json.loads(run("plugins", "--json").stdout)}
    assert set(packages["ekexample-broken"]["broken"]) == {
        "method wrecked", "method vanished", "method hookless", "method impostor"
    }  # fmt: skip
    assert packages["ekexample-softmin"]["adds"] == {"method": ["softmin"]}
    assert not packages["ensemblekit"]["broken"]


@pytest.mark.parametrize(("method", "reason"), [("wrecked", "a dependency is too old"), ("quitter", "go away")])
def test_a_spec_that_needs_a_broken_plugin_ends_with_its_error(installed, tmp_path, method, reason):
    result = validate(tmp_path, method)
    assert result.exit_code == 4
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: method.name:")
    assert reason in last
    assert "pip uninstall ekexample-" in last


def test_two_plugins_of_one_name_are_an_error_that_names_both_packages(clashing, tmp_path):
    for method, packages in {
        "softmin": "ekexample-clash, ekexample-softmin",
        "gncl": "ekexample-clash, ensemblekit",
    }.items():
        result = validate(tmp_path, method)
        assert result.exit_code == 4
        assert f"packages {packages}" in result.stderr
    assert run("inspect", "gncl").exit_code == 4
    assert run("list").exit_code == 0
    assert validate(tmp_path, "ncl").exit_code == 0


def test_a_plugin_that_is_not_installed_names_the_package_to_install(registry):
    with pytest.raises(PluginError, match="pip install ekexample-softmin") as error:
        registry.get("method", "softmin", package="ekexample-softmin")
    assert "not a registered method" in str(error.value)
    assert error.value.exit_code == 4


def test_a_misspelt_name_gets_the_nearest_one_and_the_command_that_lists_them(registry):
    with pytest.raises(PluginError, match=r'did you mean "gncl"\? ensemblekit list methods'):
        registry.get("method", "gnkl")


@pytest.mark.parametrize("name", ["os.system", "../../etc/passwd", "ensemblekit_methods.gncl:GNCL", "a b"])
def test_an_import_path_is_no_plugin_name(registry, name):
    with pytest.raises(PluginError, match="not a path or an import"):
        registry.get("method", name)


def test_the_classes_of_a_local_file_are_plugins_for_one_command(registry):
    assert (
        registry.plugins("method")["soft_min"].description == "Members of little loss on a sample learn most from it."
    )
    assert registry.plugins("model")["linear"].load().__name__ == "Linear"
    assert "soft_min" not in discover().plugins("method")


def test_a_local_file_cannot_take_the_place_of_an_installed_plugin(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text('from ensemblekit import Method\nclass GNCL(Method):\n    """Mine."""\n')
    with pytest.raises(PluginError, match=f"packages {file}, ensemblekit"):
        discover([file]).get("method", "gncl").load()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise ValueError('oops')", "ValueError: oops"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def f(:", "SyntaxError"),
        ("x = 1", "no plugin class"),
        (
            "from ensemblekit import Method\nclass A(Method):\n    name: str = 'x'",
            'cannot have a parameter called "name"',
        ),
    ],
)
def test_a_local_file_that_is_no_plugin_is_a_plugin_error(tmp_path, text, reason):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(PluginError, match=reason) as error:
        discover([file])
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("name", "what"), [("missing.py", "no such file"), ("notes.txt", "not a Python file"), (".", "not a Python file")]
)
def test_what_is_no_python_file_is_a_usage_error(tmp_path, name, what):
    (tmp_path / "notes.txt").write_text("x = 1")
    with pytest.raises(UsageError, match=what):
        discover([tmp_path / name])


FAULTY = {
    "staticmethod": (
        "Method",
        "@hookimpl\n    @staticmethod\n    def combine(outputs): ...",
        "is a staticmethod, which",
    ),
    "classmethod": ("Method", "@hookimpl\n    @classmethod\n    def combine(cls, outputs): ...", "is a classmethod"),
    "unmarked": ("Method", "@staticmethod\n    def combine(outputs): ...", "has the name of a hook"),
    "no self": ("Method", "@hookimpl\n    def combine(outputs): ...", r"write def combine\(self"),
    "no build": ("Model", "width: int = 3", r"does not define build\(\)"),
    "other arguments": ("Model", "def build(self, shape): ...", r"write def build\(self, input_shape, num_outputs\)"),
    "init": ("Method", "def __init__(self): ...", "declare its parameters as fields"),
    "no property": ("Dataset", "def load(self, seed): ...\n    def info(self): ...", "put @property on it"),
    "syntax": ("Method", "def (:", r"SyntaxError: invalid syntax, line 3 of .*faulty\.py"),
}


@pytest.mark.parametrize(("base", "body", "said"), FAULTY.values(), ids=FAULTY)
def test_a_mistake_in_a_class_is_found_when_it_is_loaded(tmp_path, base, body, said):
    (tmp_path / "faulty.py").write_text(
        f"from ensemblekit import {base}, hookimpl\nclass Faulty({base}):\n    {body}\n"
    )
    with pytest.raises(PluginError, match=said) as error:
        discover([tmp_path / "faulty.py"])
    assert "\n" not in error.value.line


def test_an_abstract_base_of_other_classes_in_a_file_is_no_plugin(tmp_path):
    (tmp_path / "two.py").write_text(
        "from ensemblekit import Model\nclass Base(Model):\n    width: int = 3\n"
        "class Wide(Base):\n    def build(self, input_shape, num_outputs): ...\n"
    )
    assert [info.name for info in load_file(tmp_path / "two.py")] == ["wide"]


def test_the_file_of_an_installed_plugin_stands_in_for_it_and_another_of_its_name_does_not(tmp_path):
    file = Path(inspect.getfile(discover().get("method", "gncl").load()))
    assert discover([file]).get("method", "gncl").package == str(file)
    (tmp_path / "own.py").write_text("from ensemblekit import Method\nclass Gncl(Method):\n    ...\n")
    clash = discover([tmp_path / "own.py"]).get("method", "gncl")
    with pytest.raises(PluginError, match=r"(?s)2 plugins are registered .* give the class in .*own\.py another name"):
        clash.load()


def test_a_plugin_file_that_imports_its_neighbour_is_told_how(tmp_path):
    folder = tmp_path / "my plugins"
    (folder / "parts").mkdir(parents=True)
    (folder / "formulas.py").write_text("WEIGHT = 1.0\n")
    file = folder / "mine.py"
    for imported, beside in {"formulas": "formulas.py", "parts.losses": "parts"}.items():
        file.write_text(f"import {imported}\n")
        with pytest.raises(PluginError) as error:
            discover([file])
        assert f"{beside} lies beside it" in error.value.fix
        assert f"PYTHONPATH='{folder}'" in error.value.fix
        assert "ensemblekit new NAME" in error.value.fix
    file.write_text("import a_package_that_is_nowhere\n")
    with pytest.raises(PluginError) as error:
        discover([file])
    assert error.value.fix == "fix the file"


def test_with_its_folder_on_the_path_a_plugin_file_imports_its_neighbour(tmp_path):
    (tmp_path / "strengths.py").write_text("STRENGTH = 0.25\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "import strengths\nfrom ensemblekit import Method\n\n"
        "class Mine(Method):\n    'A method.'\n    strength: float = strengths.STRENGTH\n"
    )
    command = [sys.executable, "-m", "ensemblekit", "inspect", "mine", "--plugin", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert "strength = 0.25" in shown
