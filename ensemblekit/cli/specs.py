"""The commands about specs: validate, schema, specs."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

import click

from ensemblekit.cli.completion import complete_shipped_spec
from ensemblekit.cli.options import json_option, plugin_option, set_option, spec_argument, writing_to
from ensemblekit.core.errors import EnsemblekitError, Problem, SpecError, UsageError, did_you_mean

name_argument = click.argument("name", metavar="NAME", shell_complete=complete_shipped_spec)


@click.command()
@spec_argument
@set_option
@plugin_option
@json_option
def validate(spec_file: Path, settings: Sequence[str], plugin_files: Sequence[str], as_json: bool) -> None:
    """Check a spec without loading data.

    Shows the plan of the run, or every problem of the spec, each with its key, its source and a fix.

    SPEC is a TOML file, or the name of a shipped spec. A value of --set is read as TOML; anything that is not valid
    TOML is taken as a string.
    """
    from ensemblekit.analysis.plans import make_plan
    from ensemblekit.core.registry import discover
    from ensemblekit.display.console import Printer
    from ensemblekit.spec.overview import spec_notes, spec_overview
    from ensemblekit.spec.reader import load_spec
    from ensemblekit.spec.shipped import find_spec
    from ensemblekit.spec.tables import parse_override

    printer = Printer()
    try:
        overrides = dict(parse_override(setting) for setting in settings)
        path, registry = find_spec(spec_file), discover(plugin_files)
        spec = load_spec(path, overrides, registry)
        plan = None if spec.sweep is None else make_plan(spec.to_dict(), registry, str(path))
    except SpecError as error:
        if as_json:
            printer.json({"valid": False, "problems": [_problem_facts(problem, error) for problem in error.problems]})
        raise
    if as_json:
        printer.json({"valid": True, "spec": spec.to_dict(), "notes": spec_notes(spec)})
        return
    rows = (
        [] if plan is None else [("  runs", f"{len(plan.runs)}, all valid"), *(("  note", text) for text in plan.notes)]
    )
    printer.table(("plan", ""), [*spec_overview(spec), *rows])


def _problem_facts(problem: Problem, error: SpecError) -> dict[str, str]:
    source = problem.source or error.source
    return {"path": problem.path, "what": problem.what, "fix": problem.fix, "source": source}


@click.command()
@plugin_option
@click.option("--json", is_flag=True, expose_value=False, help="Accepted for consistency; the output is always JSON.")
def schema(plugin_files: Sequence[str]) -> None:
    """Print the JSON Schema of specs, for completion in an editor.

    It covers all installed plugins. Save it, and name the file in the first line of a spec:
    #:schema ensemblekit.spec.schema.json
    """
    from ensemblekit.core.registry import discover
    from ensemblekit.core.streams import report
    from ensemblekit.display.console import Printer
    from ensemblekit.spec.schema import spec_schema

    def warn(error: EnsemblekitError) -> None:
        report(f"warning: {error.line}")

    Printer().json(spec_schema(discover(plugin_files), on_broken=warn))


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def specs(ctx: click.Context, as_json: bool) -> None:
    """List the shipped specs, show one, or copy one to start from.

    Without a command it lists them. `ensemblekit train NAME` trains a shipped spec as it is, `ensemblekit sweep NAME`
    one with a section [sweep].
    """
    if ctx.invoked_subcommand is not None:
        return
    from ensemblekit.display.console import Printer
    from ensemblekit.spec.shipped import describe_spec, shipped_specs

    rows = [{"name": name, **describe_spec(path)} for name, path in shipped_specs().items()]
    printer = Printer()
    if as_json:
        printer.json(rows)
        return
    cells = [(row["name"], row["purpose"], f"{row['data']}, {row['method']}, {row['model']}") for row in rows]
    printer.table(("name", "purpose", "data, method, model"), cells)


@specs.command()
@name_argument
def show(name: str) -> None:
    """Print a shipped spec."""
    from ensemblekit.display.console import Printer

    Printer().document(_shipped(name).read_text(encoding="utf-8"))


@specs.command()
@name_argument
@click.option("--output", metavar="FILE", type=click.Path(path_type=Path), help="File to write. Default: NAME.toml.")
@json_option
def copy(name: str, output: Path | None, as_json: bool) -> None:
    """Write a shipped spec to a file of your own. An existing file is never overwritten."""
    from ensemblekit.display.console import Printer

    source = _shipped(name)
    path = output or Path(source.name)
    text = source.read_text(encoding="utf-8")
    verb = "sweep" if "sweep" in tomllib.loads(text) else "train"
    # The header of a spec has the command that trains it; in the copy it names the copy.
    text = text.replace(f"{verb} specs/{name}.toml", f"{verb} {path}")
    with writing_to(path):
        try:
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
        except FileExistsError:
            raise UsageError("the file already exists", str(path), "name another file with --output") from None
    command = f"ensemblekit {verb} {shlex.quote(str(path))}"
    printer = Printer()
    if as_json:
        printer.json({"path": str(path), "next": command})
        return
    printer.verbatim(f"wrote {path}")
    printer.verbatim(f"next:\n  {command}")


def _shipped(name: str) -> Path:
    from ensemblekit.spec.shipped import shipped_specs

    known = shipped_specs()
    if name not in known:
        fix = f"{did_you_mean(name, known)} ensemblekit specs lists the shipped specs".strip()
        raise UsageError(f'no shipped spec "{name}"', fix=fix)
    return known[name]


COMMANDS = {"Specs": (validate, schema, specs)}
