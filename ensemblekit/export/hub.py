"""The format hub: a folder with weights, configuration and model card, as model hubs take it. Nothing is uploaded."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from ensemblekit.core.errors import RunError, UsageError
from ensemblekit.core.files import atomic_write
from ensemblekit.core.plugin import Plugin
from ensemblekit.export.formats import Exported, ExportRequest
from ensemblekit.inference.kept_calibration import KeptCalibration
from ensemblekit.inference.kept_outputs import RunLoader
from ensemblekit.inference.loading import load_ensemble
from ensemblekit.runs.atomic import write_errors
from ensemblekit.runs.directory import RunDirectory
from ensemblekit.runs.model_folder import write_model_folder
from ensemblekit.runs.run import Run, read_run
from ensemblekit.spec.sections import Spec


def write_hub(request: ExportRequest) -> Exported:
    """Write the model folder of a run; it appears once it is complete and was loaded.

    Raises:
        UsageError: a network of the run needs files that are not in its directory.
        RunError: the folder exists and is not empty, or cannot be written; or the run is damaged.
    """
    # Jinja2 and matplotlib, which come with the card, take a second to import: other formats do not have to wait
    from ensemblekit.export.model_card import model_card, plugin_files, usage

    output = request.output
    _check_free(output)
    directory = RunDirectory.open(request.run)
    run = read_run(directory, request.registry, RunLoader(directory, request.registry))
    model = directory.read_metadata()
    _check_complete(run.spec, model["members"])
    kept = KeptCalibration.read(directory, run.spec.loss)
    names = _names_of_paths(run)
    tables, environment = _renamed(tomllib.loads(directory.spec_toml), names), _renamed(run.environment, names)
    spec_toml = tomli_w.dumps(tables) if names else directory.spec_toml
    shown = replace(run, environment=environment)
    card = model_card(shown, model, kept, spec_toml, names, request.licence, request.data)
    with write_errors(output), atomic_write(output) as staged:
        write_model_folder(staged, directory, environment, spec_toml, kept.to_json(), card)
        load_ensemble(staged, request.registry)
        files = {file.name: file.stat().st_size for file in staged.iterdir()}
    notes = [f"paths are shortened to names: {', '.join(sorted(set(names.values())))}"] if names else []
    notes += [f"{file} is not part of the folder: publish it as well" for file in plugin_files(shown)]
    snippet = usage(shown, model, str(output))
    return Exported(output, "hub", sum(files.values()), snippet, {"files": sorted(files)}, tuple(notes))


def _check_free(output: Path) -> None:
    """Raise a `RunError` if the folder exists and is not empty: a card may have been edited."""
    with write_errors(output):
        if os.path.lexists(output) and (not output.is_dir() or os.listdir(output)):
            what = "the folder is not empty" if output.is_dir() else "not a folder"
            raise RunError(what, str(output), "choose another --output, or remove it first", path=str(output))


def _check_complete(spec: Spec, members: list[int]) -> None:
    """Raise a `UsageError` if a network that predicts reads files when it is built."""
    for plan in spec.networks:
        if plan.index in members:
            models = _with_inner(plan.group.model)
            for key, path in (each for model in models for each in _own_paths(model)):
                what = f'the model "{plan.group.model.name}" reads files that a folder cannot hold ({key} = {path})'
                raise UsageError(what, "--format hub", "export a run whose models need no other files")


def _names_of_paths(run: Run) -> dict[str, str]:
    """Return the names of files by their absolute paths on this machine, which are nobody's business.

    Predictions do not depend on them: a model folder has the preparation of new files.
    """
    paths = [path for _, plugin in run.spec.plugins() for _, path in _own_paths(plugin)]
    paths += [Path(str(plugin["package"])) for plugin in run.environment.get("plugins", [])]
    return {str(path): path.name for path in paths if path.is_absolute()}


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def _own_paths(plugin: Plugin) -> Iterator[tuple[str, Path]]:
    values: dict[str, Any] = {name: getattr(plugin, name) for name in type(plugin).model_fields}
    return ((name, value) for name, value in values.items() if isinstance(value, Path))


def _with_inner(plugin: Plugin) -> Iterator[Plugin]:
    yield plugin
    for _, inner in plugin.inner_plugins():
        yield from _with_inner(inner)
