"""Options that several commands share."""

from __future__ import annotations

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
plugin_option = click.option(
    "--plugin",
    "plugin_files",
    multiple=True,
    metavar="FILE",
    help="Also use the plugin classes of this Python file (SoftMin becomes soft_min). Repeatable.",
)
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a value, as in --set training.epochs=3. Repeatable.",
)
quiet_option = click.option("--quiet", is_flag=True, help="Show no progress; print only where the run is.")
