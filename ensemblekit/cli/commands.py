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

from ensemblekit.cli import bench, plugins, runs, specs, sweep
from ensemblekit.core.errors import EnsemblekitError, SpecError, UsageError, did_you_mean, explain

INTERRUPTED = 130


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
        try:
            with warnings_as_lines():
                sys.exit(super().main(args, standalone_mode=False, **extra) or 0)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(0)
        except click.ClickException as error:
            sys.exit(_report(_usage_message(error), error.exit_code))
        except (KeyboardInterrupt, click.Abort):
            sys.exit(_report("interrupted; by the user; run the command again", INTERRUPTED))
        except BrokenPipeError:  # the reader, such as head, has closed the pipe
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
            ctx.exit(_report_error(explain(error)))

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
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
        yield


def _report_error(error: EnsemblekitError) -> int:
    return _report(error.line, error.exit_code)


def _report(message: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return exit_code


def _usage_message(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "ensemblekit"
    return f"{error.format_message().rstrip('.')}; in {command}; see {command} --help"


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


for module in (runs, sweep, plugins, specs, bench):
    main.add_sections(module.COMMANDS)
