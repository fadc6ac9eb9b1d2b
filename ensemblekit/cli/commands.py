"""The top-level command: which verbs there are, and how errors and warnings are reported.

Commands import late, so that `ensemblekit --help` needs neither torch nor pydantic.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from ensemblekit.cli import (
    bench,
    cache,
    calibration,
    compare,
    distil,
    export,
    plugins,
    predict,
    report,
    run_list,
    runs,
    select,
    serve,
    specs,
    sweep,
)
from ensemblekit.cli.limits import guard_torch
from ensemblekit.core.errors import EnsemblekitError, PeerError, SpecError, UsageError, did_you_mean, explain
from ensemblekit.core.streams import (
    ReaderGone,
    discard_unwritten,
    output_error,
    prepare_streams,
    reader_is_gone,
)
from ensemblekit.core.streams import report as report_line
from ensemblekit.ranks.launch import check_starts_alone, is_told_elsewhere

INTERRUPTED = 130
COMPUTING = (
    "train",
    "resume",
    "evaluate",
    "predict",
    "calibrate",
    "conform",
    "select",
    "distil",
    "export",
    "sweep",
    "compare",
    "report",
    "check",
    "bench",
)
"""The commands for which freed memory is kept: the process is theirs alone."""
ON_SEVERAL_RANKS = ("train", "resume")
"""The commands that torchrun may start several processes of."""


class Commands(click.Group):
    """A group of verbs in titled sections whose every failure ends with `error: what; where; how to fix`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sections: dict[str, list[click.Command]] = {}

    def add_sections(self, sections: Mapping[str, Sequence[click.Command]]) -> None:
        """Register commands under the titles that `--help` shows them by."""
        for title, commands in sections.items():
            self.sections.setdefault(title, []).extend(commands)
            for command in commands:
                self.add_command(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for name in self.commands)
        for title, commands in self.sections.items():
            with formatter.section(title):
                limit = formatter.width - 6 - width
                rows = [(str(command.name).ljust(width), command.get_short_help_str(limit)) for command in commands]
                formatter.write_dl(rows)

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        prepare_streams()
        guard_torch()
        try:
            with warnings_as_lines():
                code = self._exit_code(args, **extra)
        finally:
            discard_unwritten()
        sys.exit(code)

    def _exit_code(self, args: Sequence[str] | None, **extra: Any) -> int:
        """Run a command; every failure is reported, and only its exit code is left of it."""
        try:
            try:
                return super().main(args, standalone_mode=False, **extra) or 0
            except click.exceptions.NoArgsIsHelpError as error:
                click.echo(error.format_message())
                return 0
        except click.ClickException as error:
            return error.exit_code if is_told_elsewhere() else _report(_usage_message(error), error.exit_code)
        except (KeyboardInterrupt, click.Abort):
            return _report("interrupted; ensemblekit; run the command again", INTERRUPTED)
        except ReaderGone:
            return 0
        except OSError as error:  # from click, which prints help and version
            return _report_failed_output(error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, ReaderGone):
            raise
        except (KeyboardInterrupt, click.Abort):
            command = f"ensemblekit {ctx.invoked_subcommand or ''}".strip()
            ctx.exit(_report(f"interrupted; {command}; run the command again", INTERRUPTED))
        except (Exception, SystemExit) as error:  # a plugin may raise anything
            if ctx.params.get("debug"):
                for line in traceback.format_exc().splitlines():
                    report_line(line)
            if isinstance(error, OSError) and _is_about_output(error):
                ctx.exit(_report_failed_output(error))
            ctx.exit(_report_error(error if isinstance(error, EnsemblekitError) else explain(error)))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            near = did_you_mean(args[0], self.list_commands(ctx))
            fix = f"{near} ensemblekit --help lists all commands".strip()
            raise UsageError(f'no command "{args[0]}"', fix=fix)
        return super().resolve_command(ctx, args)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print Python's warnings as one line `warning: …` each; afterwards they are shown as before."""
    with warnings.catch_warnings():  # which restores the function that shows them, too
        warnings.showwarning = lambda message, *_: report_line(f"warning: {message}")
        yield


def _report_error(error: EnsemblekitError) -> int:
    if isinstance(error, PeerError) and error.is_silent:
        return error.exit_code
    if isinstance(error, SpecError) and len(error.problems) > 1:
        for problem in error.problems:
            report_line(f"  {problem}")
    for detail in error.first_details:
        report_line(f"  {detail}")
    return _report(error.line, error.exit_code)


def _report(message: str, exit_code: int) -> int:
    report_line(f"error: {message}")
    return exit_code


def _report_failed_output(error: OSError) -> int:
    failure = output_error(error)
    return _report_error(failure) if isinstance(failure, EnsemblekitError) else 0


def _is_about_output(error: OSError) -> bool:
    """Whether it was raised by a write to standard output: by click, which prints help, or without a reader."""
    if isinstance(error, BrokenPipeError):
        return reader_is_gone()
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("click.")


def _usage_message(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "ensemblekit"
    if isinstance(error, click.NoSuchOption) and error.option_name == "--debug":
        return f"--debug stands before the command; in {command}; {command.replace(' ', ' --debug ', 1)} …"
    hint = _setting_hint(error, context)
    if hint:
        return f"{error.message.rstrip('.')}; in {command}; {hint}"  # without click's guesses
    return f"{error.format_message().rstrip('.')}; in {command}; see {command} --help"


def _setting_hint(error: click.ClickException, context: click.Context | None) -> str:
    """Say how to set a key of the spec that was written as an option or with spaces; empty if none was."""
    if context is None or not any(parameter.name == "settings" for parameter in context.command.params):
        return ""
    if isinstance(error, click.NoSuchOption):
        keys = _keys_called(error.option_name.lstrip("-").replace("-", "_"))
        return f"set it in the spec: {' or '.join(f'--set {key}=VALUE' for key in keys)}" if keys else ""
    if isinstance(error, click.UsageError) and "unexpected extra argument" in error.message and "(=" in error.message:
        return "write no spaces around =, for example: --set training.epochs=3"
    return ""


def _keys_called(name: str) -> list[str]:
    """The dotted keys of a spec whose last part is this name; none for "name", which every plugin has."""
    from ensemblekit.core.registry import discover
    from ensemblekit.spec.keys import spec_keys

    return [key for key in spec_keys({}, discover()) if key.rpartition(".")[2] == name != "name"]


EPILOG = """\
\b
Tab completion of commands, plugins, specs and keys: add this line to ~/.bashrc
  eval "$(_ENSEMBLEKIT_COMPLETE=bash_source ensemblekit)"
or to ~/.zshrc with zsh_source in place of bash_source.
"""


@click.group(
    "ensemblekit",
    cls=Commands,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="ensemblekit", message="%(version)s")
def main(debug: bool) -> None:
    """Train ensembles of neural networks. Methods, models and data sets are plugins.

    \b
    Start with:
      ensemblekit train digits         train a shipped spec, in seconds
      ensemblekit specs copy digits    copy it to digits.toml, to change it
      ensemblekit list                 show the installed plugins
      ensemblekit inspect gncl         explain one of them
    """
    command = click.get_current_context().invoked_subcommand
    if command not in ON_SEVERAL_RANKS:
        check_starts_alone(str(command))
    if command in COMPUTING:
        from ensemblekit.core.memory import keep_freed_memory
        from ensemblekit.core.waiting import limit_spinning

        keep_freed_memory()
        limit_spinning()


for module in (
    runs,
    predict,
    calibration,
    select,
    distil,
    export,
    serve,
    sweep,
    run_list,
    compare,
    report,
    plugins,
    specs,
    cache,
    bench,
):
    main.add_sections(module.COMMANDS)
