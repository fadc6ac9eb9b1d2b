"""The command sweep: trains a spec with many values, in one directory."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ensemblekit.cli.completion import complete_directory, complete_setting
from ensemblekit.cli.options import json_option, plugin_option, set_option, spec_argument
from ensemblekit.core.errors import EnsemblekitError, UsageError

if TYPE_CHECKING:
    from ensemblekit.analysis.search import SearchSettings
    from ensemblekit.analysis.sweeping import SweepRequest
    from ensemblekit.analysis.sweeps import Sweep
    from ensemblekit.core.registry import Registry


@click.command()
@spec_argument
@click.option(
    "--grid",
    "grid_options",
    multiple=True,
    metavar="KEY=V1,V2,…",
    shell_complete=complete_setting,
    help="Vary a value of the spec: a list, or a range FIRST:LAST:STEP with both ends. Repeatable.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Train every combination N times, with the spec's seed and the next ones, on the same splits. Default: 1.",
)
@set_option
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    shell_complete=complete_directory,
    help="Sweep directory; a sweep of the same spec in it continues. Default: sweeps/NAME-N with a free number.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Train N runs at once, each in a process with its share of the cores. Default: 1. One run already uses all "
    "cores; more pay for networks so small that a step is mostly overhead, on many cores. With --on ray: at most N.",
)
@click.option(
    "--on",
    type=click.Choice(["ray"]),
    help="Train the runs as tasks of Ray, on the cluster of RAY_ADDRESS or else on this machine. The sweep directory "
    "must be on storage that all nodes share.",
)
@click.option("--cpus-per-run", type=click.IntRange(1), metavar="N", help="Cores of each run on Ray. Default: 1.")
@click.option(
    "--gpus-per-run",
    type=click.FloatRange(0),
    metavar="X",
    help="GPUs of each run on Ray; 0.5 lets two runs share one. Default: 1 if the cluster has GPUs, else 0.",
)
@click.option(
    "--together",
    is_flag=True,
    help="Train runs that differ only in the method's parameters or the seed at once, as one stack of networks. Saves "
    "time only for few, small members; results are equal within rounding.",
)
@click.option("--retry-failed", is_flag=True, help="Also resume runs that have failed.")
@click.option("--dry-run", is_flag=True, help="Print the runs and an estimate of the time, from a few measured steps.")
@click.option("--commands", is_flag=True, help="Print one shell command per run, for a job array, and train nothing.")
@click.option(
    "--search",
    "search_options",
    multiple=True,
    metavar="KEY=LOW..HIGH[:log]",
    shell_complete=complete_setting,
    help="Let Optuna choose the value from an interval, or from a list KEY=V1,V2,… Repeatable.",
)
@click.option("--trials", type=click.IntRange(1), metavar="N", help="Runs of a search. Default: 20.")
@click.option("--minimise", metavar="METRIC", help="Metric that decides a search. Default: validation_loss.")
@click.option("--maximise", metavar="METRIC", help="The same, if more is better: validation_accuracy.")
@plugin_option
@click.option("--quiet", is_flag=True, help="Show no progress; print only the path of the sweep.")
@json_option
def sweep(
    spec_file: Path,
    grid_options: Sequence[str],
    seeds: int | None,
    settings: Sequence[str],
    out: Path | None,
    jobs: int | None,
    on: str | None,
    cpus_per_run: int | None,
    gpus_per_run: float | None,
    together: bool,
    retry_failed: bool,
    dry_run: bool,
    commands: bool,
    search_options: Sequence[str],
    trials: int | None,
    minimise: str | None,
    maximise: str | None,
    plugin_files: Sequence[str],
    quiet: bool,
    as_json: bool,
) -> None:
    """Train a spec with every combination of some values.

    SPEC is a TOML file, the name of a shipped spec, or the directory of a sweep to continue. What varies is said by
    --grid and --seeds, or by the section [sweep] of the spec. All combinations are validated before the first run.

    The sweep directory has an ordinary run directory for each run, and results.csv with a row for each. Stopped at
    any moment and called again, finished runs are kept and unfinished ones resumed. A run that fails is listed with
    its error, and the others go on; the exit code is then 1.

    \b
    ensemblekit sweep digits --grid method.lambda=0:1:0.25 --grid model.dropout=0,0.2 --seeds 3
    ensemblekit sweep digits --search method.lambda=0..1 --search training.optimizer.lr=1e-4..1e-1:log --trials 20
    RAY_ADDRESS=auto ensemblekit sweep digits --grid method.lambda=0:1:0.1 --seeds 5 --on ray --out /shared/sweep
    """
    from ensemblekit.analysis.ray_cluster import share_of
    from ensemblekit.analysis.search import run_request
    from ensemblekit.analysis.sweep_runner import continue_command
    from ensemblekit.api import RunTraining
    from ensemblekit.core.registry import discover
    from ensemblekit.display.sweep_table import choose_sweep_display

    request = _request(spec_file, grid_options, seeds, settings, out)
    search = _search(search_options, trials, minimise, maximise, request.directory)
    share = share_of(on, cpus_per_run, gpus_per_run)
    registry = discover(plugin_files)
    if dry_run:
        _dry_run(request, registry, jobs or 1, as_json, search, together)
        return
    if commands:
        if search is not None:
            raise UsageError("a search has no commands: each trial depends on those before it", "--commands")
        _print_commands(request, registry, plugin_files)
        return
    with closing(choose_sweep_display(quiet or as_json)) as display:
        training = RunTraining(registry)
        files = list(plugin_files)
        result = run_request(request, registry, training, display, jobs, files, retry_failed, search, share, together)
    _print_result(result, quiet, as_json, continue_command(str(result.path), files, share, together))


def _request(
    spec_file: Path, grid_options: Sequence[str], seeds: int | None, settings: Sequence[str], out: Path | None
) -> SweepRequest:
    from ensemblekit.analysis.grids import parse_grid
    from ensemblekit.analysis.sweeping import SweepRequest
    from ensemblekit.spec.shipped import find_spec
    from ensemblekit.spec.tables import parse_override

    grid: dict[str, list[Any]] = {}
    for option in grid_options:
        key, values = parse_grid(option)
        if key in grid:
            raise UsageError(f'"{key}" is given twice', "--grid", "give all its values in one option")
        grid[key] = values
    path = spec_file if os.path.isdir(spec_file) else find_spec(spec_file)
    overrides = dict(parse_override(setting) for setting in settings)
    return SweepRequest(path, overrides, grid, seeds, None, out, path.stem)


def _search(
    options: Sequence[str], trials: int | None, minimise: str | None, maximise: str | None, directory: Path | None
) -> SearchSettings | None:
    from ensemblekit.analysis.search import SearchSettings, check_settings, settings_of
    from ensemblekit.analysis.search_space import parse_space
    from ensemblekit.analysis.sweeps import SweepDirectory, is_sweep

    if minimise and maximise:
        raise UsageError("a search has one metric", "--maximise", "leave out --minimise or --maximise")
    if not options:
        begun = settings_of(SweepDirectory.open(directory)) if directory and is_sweep(directory) else None
        if (begun is None and trials) or minimise or maximise:
            raise UsageError("there is no --search", "--trials, --minimise", "write --search KEY=LOW..HIGH")
        return replace(begun, trials=trials) if begun and trials else begun
    space = dict(parse_space(option) for option in options)
    settings = SearchSettings(space, trials or 20, maximise or minimise or "validation_loss", bool(maximise))
    check_settings(settings)
    return settings


def _dry_run(
    request: SweepRequest,
    registry: Registry,
    jobs: int,
    as_json: bool,
    search: SearchSettings | None,
    together: bool,
) -> None:
    """Print the runs and an estimate of their time; nothing is written."""
    from ensemblekit.analysis.estimates import estimate
    from ensemblekit.analysis.sweep_runner import LastData
    from ensemblekit.analysis.sweeps import SweepDirectory, check_extends, is_sweep
    from ensemblekit.analysis.together import divide
    from ensemblekit.display.console import Printer

    plan = request.plan(registry)
    status = {run.name: "planned" for run in plan.runs}
    if request.directory is not None and is_sweep(request.directory):
        directory = SweepDirectory.open(request.directory)
        check_extends(directory, plan, search.table() if search else {})
        status = {run.name: directory.read_run(run).status for run in plan.runs}
    left = [name for name in plan.specs if status[name] in ("planned", "interrupted")]
    data = LastData()
    seconds, kinds = estimate((plan.specs[name] for name in left), data.load)
    division = divide([run for run in plan.runs if run.name in left], plan.specs, data.load) if together else None
    seconds = seconds * search.trials if search else seconds / min(jobs, max(len(left), 1))
    printer = Printer()
    if as_json:
        runs = [
            {"name": run.name, "variant": run.variant, **run.overrides, "seed": run.seed, "status": status[run.name]}
            for run in plan.runs
        ]
        notes = [*plan.notes, *(division.lines() if division else ())]
        printer.json({"runs": runs, "estimated_seconds": seconds, "notes": notes})
        return
    for note in plan.notes:
        printer.text(f"note: {note}")
    printer.table(("run", "status", "epochs"), [_dry_row(run.name, status, plan.specs) for run in plan.runs])
    what = f"at most {search.trials} trials" if search else f"{len(left)} of {len(plan.runs)} runs"
    measured = f"steps of {kinds} kind{'s' * (kinds != 1)} of run"
    printer.text()
    for line in division.lines() if division else ():
        printer.text(line)
    printer.text(f"{what} are left, about {timedelta(seconds=round(seconds))}: an estimate from measured {measured}")


def _dry_row(name: str, status: dict[str, str], specs: Any) -> tuple[str, str, str]:
    return name, status[name], str(specs[name].training.epochs)


def _print_commands(request: SweepRequest, registry: Registry, plugin_files: Sequence[str]) -> None:
    """Make the sweep directory and print a command for each run that is only planned."""
    from ensemblekit.analysis.grids import inline_toml
    from ensemblekit.analysis.sweep_runner import continue_command
    from ensemblekit.analysis.sweeping import claimed_sweep
    from ensemblekit.display.console import Printer

    printer = Printer()
    with claimed_sweep(request, registry) as (directory, plan):
        sweep = directory.read()
        directory.write_results(sweep.runs)
        base = directory.write_spec()
        planned = {run.name for run in sweep.with_status("planned")}
        for run in plan.runs:
            if run.name not in planned:
                continue
            parts = ["ensemblekit", "train", str(base)]
            for key, value in run.all_overrides.items():
                parts += ["--set", f"{key}={inline_toml(value)}"]
            for file in plugin_files:
                parts += ["--plugin", file]
            printer.verbatim(shlex.join([*parts, "--out", str(directory.run_path(run.name))]))
    command = continue_command(str(directory.path), plugin_files)
    click.echo(f"afterwards, to collect the results and to run what is missing: {command}", err=True)


def _print_result(result: Sweep, quiet: bool, as_json: bool, command: str) -> None:
    """Print the closing table; an error with exit code 1, and the command to continue, if a run has failed."""
    from ensemblekit.display.console import Printer
    from ensemblekit.display.numbers import number
    from ensemblekit.display.sweep_table import COLUMNS, best_of, result_rows

    printer = Printer()
    if as_json:
        from ensemblekit.runs.sealing import finite

        printer.json({"path": str(result.path), "runs": finite(result.table())})
    elif quiet:
        printer.verbatim(str(result.path))
    else:
        printer.text()
        printer.table(COLUMNS, result_rows(result.runs))
        printer.text()
        if (best := best_of(result.runs)) is not None:
            loss = number(best.metrics["validation_loss"])
            printer.text(f"lowest validation loss: {best.name}, {loss}")
        printer.text(f"the sweep is in {result.path}; results.csv has all metrics")
    failed = result.with_status("failed", "damaged")
    if failed:
        what = f"{len(failed)} of {len(result.runs)} runs failed or are damaged, the first: {failed[0].name}"
        fix = f"after fixing the cause: {command} --retry-failed"
        raise EnsemblekitError(f"{what} ({failed[0].error.rstrip('.')})", str(result.path), fix)


COMMANDS = {"Train": (sweep,)}
