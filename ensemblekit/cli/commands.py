"""The command line: thin. It parses, calls, prints; what it prints is made elsewhere.

Imports happen inside the commands, so that `ensemblekit --help` needs neither torch nor pydantic.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ensemblekit.cli import bench as cli_bench
from ensemblekit.cli import check as cli_check
from ensemblekit.cli import new as cli_new
from ensemblekit.cli import runs as cli_training
from ensemblekit.cli.options import json_option, plugin_option, set_option
from ensemblekit.core.errors import EnsemblekitError, PluginError, SpecError, UsageError, did_you_mean
from ensemblekit.core.faults import explained

if TYPE_CHECKING:
    from ensemblekit.core.plugin import Dataset
    from ensemblekit.core.registry import PluginInfo, Registry

KINDS = {"methods": "method", "models": "model", "datasets": "dataset", "losses": "loss", "extensions": "extension"}
INTERRUPTED = 130


class _Commands(click.Group):
    """A group whose every failure ends with one line `error: what; where; how to fix` and the right exit code."""

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_: _warn(message)
                sys.exit(super().main(args, standalone_mode=False, **extra) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(0)
        except click.ClickException as error:
            sys.exit(_report(_usage_message(error), error.exit_code))
        except (KeyboardInterrupt, click.Abort):
            sys.exit(_report("interrupted; by the user; run the same command again", INTERRUPTED))
        except BrokenPipeError:  # the reader, such as head, has seen enough
            sys.stderr.close()
            sys.exit(0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EnsemblekitError as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            if isinstance(error, SpecError) and len(error.problems) > 1:
                for problem in error.problems:
                    print(f"  {problem}", file=sys.stderr)
            ctx.exit(_report_error(error))
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise
        except (Exception, SystemExit) as error:  # a plugin may raise anything
            if ctx.params.get("debug"):
                traceback.print_exc()
            ctx.exit(_report_error(explained(error)))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            near = did_you_mean(args[0], self.list_commands(ctx))
            fix = f"{near} ensemblekit --help lists all commands".strip()
            raise UsageError(f'no command "{args[0]}"', fix=fix)
        return super().resolve_command(ctx, args)


def _report_error(error: EnsemblekitError) -> int:
    return _report("; ".join(part for part in (error.what, error.where, error.fix) if part), error.exit_code)


def _report(message: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return exit_code


def _warn(message: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _usage_message(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "ensemblekit"
    return f"{error.format_message().rstrip('.')}; in {command}; {command} --help shows what it takes"


@click.group("ensemblekit", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="ensemblekit", message="%(version)s")
def main(debug: bool) -> None:
    """Train ensembles of neural networks with methods, models and data sets that are plugins.

    \b
    Start with:
      ensemblekit list                 what is installed
      ensemblekit inspect gncl         one method, explained
      ensemblekit validate spec.toml   what a spec would run, or all that is wrong with it
      ensemblekit train spec.toml      run it
    """


for command in (*cli_training.COMMANDS, cli_bench.bench, cli_new.new, *cli_check.COMMANDS):
    main.add_command(command)


@main.command("list")
@click.argument("kind", required=False, type=click.Choice(list(KINDS)))
@plugin_option
@json_option
def list_plugins(kind: str | None, plugin_files: Sequence[str], as_json: bool) -> None:
    """List the installed methods, models, data sets, losses and extensions.

    Nothing is imported, so this is fast and works when a plugin is broken; `ensemblekit plugins` imports
    them all and says which ones are. Only `list datasets` looks into its plugins, to say what is present.
    """
    from ensemblekit.core.registry import discover
    from ensemblekit.display.console import Printer

    registry = discover(plugin_files)
    printer = Printer()
    shown = [kind] if kind else list(KINDS)
    summary = _dataset_summary if kind == "datasets" else _summary
    found = {plural: [summary(info) for info in registry.plugins(KINDS[plural]).values()] for plural in shown}
    if as_json:
        printer.json(found[kind] if kind else found)
        return
    for plural, summaries in found.items():
        if kind and not summaries:
            printer.text(f"no {plural} are installed")
        if kind is None and summaries:
            printer.heading(plural)
        if kind == "datasets":
            from ensemblekit.core.description import dataset_row

            printer.table(
                ("name", "description", "samples", "shape", "outputs", "present"),
                [dataset_row(entry) for entry in summaries],
            )
        else:
            rows = [
                (entry["name"], entry["description"], f"{entry['package']} {entry['version']}") for entry in summaries
            ]
            printer.table(("name", "description", "package"), rows)
        if kind is None and summaries:
            printer.text()


def _summary(info: PluginInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "kind": info.kind,
        "description": "registered twice: see ensemblekit plugins" if info.rivals else info.description,
        "package": info.package,
        "version": info.version,
    }


def _dataset_summary(info: PluginInfo) -> dict[str, Any]:
    from ensemblekit.core.description import dataset_facts

    try:
        return {**_summary(info), **dataset_facts(cast("type[Dataset]", info.load())), "error": None}
    except PluginError as error:
        return {**_summary(info), "error": str(error)}


@main.command("inspect")
@click.argument("name")
@click.option(
    "--kind", type=click.Choice(list(KINDS.values())), help="Which, if plugins of several kinds share the name."
)
@plugin_option
@json_option
def inspect_plugin(name: str, kind: str | None, plugin_files: Sequence[str], as_json: bool) -> None:
    """Explain one plugin: description, formula, parameters, hooks, origin and a TOML snippet to paste."""
    from ensemblekit.core.description import page_facts, plugin_page
    from ensemblekit.core.registry import discover
    from ensemblekit.display.console import Printer

    info = _find_one(discover(plugin_files), name, kind)
    page = plugin_page(info)
    if page["kind"] == "model":
        from ensemblekit.engines.capabilities import default_paths

        page["paths"] = default_paths(info.load())
    printer = Printer()
    if as_json:
        printer.json(page)
        return
    printer.heading(f"{page['name']} ({page['kind']})")
    printer.text(page["description"])
    if page["details"]:
        printer.text(page["details"])
    printer.text()
    for label, fact in page_facts(page):
        for index, line in enumerate(fact.splitlines()):
            printer.text(f"{label if index == 0 else '':<11}{line}")
    printer.text()
    rows = [
        (field["name"], field["type"], _default(field), field["allowed"], field["description"])
        for field in page["parameters"]
    ]
    printer.table(("parameter", "type", "default", "allowed", "meaning"), rows)
    if page["snippet"]:
        printer.text()
        printer.verbatim(page["snippet"])


def _default(field: dict[str, Any]) -> str:
    from ensemblekit.core.parameters import toml_value

    if field["required"]:
        return "required"
    return "" if field["default"] is None else toml_value(field["default"])


def _find_one(registry: Registry, name: str, kind: str | None) -> PluginInfo:
    found = [info for info in registry.find(name) if kind in (None, info.kind)]
    if len(found) == 1:
        return found[0]
    if found:
        kinds = ", ".join(info.kind for info in found)
        raise UsageError(f'"{name}" is the name of several plugins', f"kinds: {kinds}", f"add --kind {found[0].kind}")
    near = did_you_mean(name, [info.name for info in registry])
    raise UsageError(f'no plugin "{name}"', fix=f"{near} ensemblekit list shows all that are installed".strip())


@main.command()
@plugin_option
@json_option
def plugins(plugin_files: Sequence[str], as_json: bool) -> None:
    """Show the installed plugin packages, what each adds, and which plugins are broken and why.

    Imports every plugin.
    """
    from ensemblekit.core.registry import discover
    from ensemblekit.display.console import Printer

    registry = discover(plugin_files)
    packages: dict[str, dict[str, Any]] = {}
    for info in registry:
        package = packages.setdefault(
            info.package, {"package": info.package, "version": info.version, "adds": {}, "broken": {}}
        )
        error = info.error
        if error:
            package["broken"][f"{info.kind} {info.name}"] = error
        else:
            package["adds"].setdefault(info.kind, []).append(info.name)
    printer = Printer()
    if as_json:
        printer.json(list(packages.values()))
        return
    rows = [
        (package["package"], package["version"], kind, ", ".join(names))
        for package in packages.values()
        for kind, names in package["adds"].items()
    ]
    printer.table(("package", "version", "kind", "adds"), rows)
    for package in packages.values():
        for error in package["broken"].values():
            _warn(error)


@main.command()
@click.argument("spec_file", metavar="SPEC", type=click.Path(path_type=Path))
@set_option
@plugin_option
@json_option
def validate(spec_file: Path, settings: Sequence[str], plugin_files: Sequence[str], as_json: bool) -> None:
    """Check a spec without loading data: show what it would run, or everything that is wrong with it.

    A value of --set is read as TOML; what is no TOML value (a bare word, a path) is a string.
    """
    from ensemblekit.core.description import spec_overview
    from ensemblekit.core.registry import discover
    from ensemblekit.display.console import Printer
    from ensemblekit.spec.reader import load_spec
    from ensemblekit.spec.tables import parse_override

    printer = Printer()
    try:
        overrides = dict(parse_override(setting) for setting in settings)
        spec = load_spec(spec_file, overrides, discover(plugin_files))
    except SpecError as error:
        if as_json:
            problems = [{"path": problem.path, "what": problem.what, "fix": problem.fix} for problem in error.problems]
            printer.json({"valid": False, "problems": problems})
        raise
    if as_json:
        printer.json({"valid": True, "spec": spec.to_dict()})
        return
    printer.table(("what will run", ""), spec_overview(spec))


@main.command()
@plugin_option
@click.option("--json", is_flag=True, expose_value=False, help="Print JSON; there is no other form.")
def schema(plugin_files: Sequence[str]) -> None:
    """Print the JSON Schema of a spec with all installed plugins, for completion in an editor.

    Save it and name it in the spec's first line: #:schema ensemblekit.spec.schema.json
    """
    from ensemblekit.core.registry import discover
    from ensemblekit.display.console import Printer
    from ensemblekit.spec.schema import spec_schema

    Printer().json(spec_schema(discover(plugin_files), on_broken=_warn))
