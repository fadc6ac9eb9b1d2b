"""Every shipped spec: documented, valid, and able to build its members and a batch."""

from __future__ import annotations

import json
import re
import tomllib

import jsonschema
import pytest
import torch
from click.testing import CliRunner
from helpers.places import ROOT
from helpers.plain_methods import plain_methods

import ensemblekit as ek
from ensemblekit.analysis.plans import base_tables, make_plan
from ensemblekit.cli import main
from ensemblekit.core.hooks import RunHooks
from ensemblekit.core.registry import discover
from ensemblekit.members.build import build_members

SPECS = sorted((ROOT / "specs").rglob("*.toml"))
SWEEPS = [path for path in SPECS if "sweep" in tomllib.loads(path.read_text())]
EMBEDDED = {"digits", "diabetes"}


def names(augmentations) -> list[str]:
    return [augmentation.name for augmentation in augmentations]


def name_of(path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SPECS, ids=name_of)
def test_every_spec_opens_with_its_purpose_command_needs_and_what_to_expect(path):
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert path.read_text().startswith("# ")
    assert comments[0].endswith(".")
    command = f"# Run:     ensemblekit {'sweep' if path in SWEEPS else 'train'} {name_of(path)}"
    assert any(line == command or (path in SWEEPS and line.startswith(f"{command} --")) for line in comments)
    assert any(line.startswith("# Needs:   ") for line in comments)
    assert any(line.startswith("# Expect:  ") for line in comments)


@pytest.mark.parametrize("path", SPECS, ids=name_of)
def test_every_spec_validates_on_the_command_line(path):
    result = CliRunner().invoke(main, ["validate", str(path)])
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("path", SWEEPS, ids=name_of)
def test_every_combination_of_a_sweep_is_valid_and_the_header_says_how_many_there_are(path):
    plan = CliRunner().invoke(main, ["validate", str(path)]).stdout
    (number,) = re.findall(r"^  runs +(\d+), all valid$", plan, flags=re.MULTILINE)
    assert re.findall(r"(\d+) runs", path.read_text()) == [number]


def test_every_spec_fits_the_schema():
    validator = jsonschema.Draft202012Validator(json.loads(CliRunner().invoke(main, ["schema"]).stdout))
    for path in SPECS:
        validator.validate(ek.load_spec(path).to_dict())


def test_every_method_has_a_spec_for_cifar100():
    covered = {ek.load_spec(path).methods[0].name for path in (ROOT / "specs" / "cifar100").glob("*.toml")}
    assert covered == set(plain_methods())


def test_the_papers_settings_are_those_of_the_paper():
    for path in (ROOT / "specs" / "cifar100").glob("*.toml"):
        spec = ek.load_spec(path)
        passes = RunHooks(spec.methods).passes(spec.ensemble.members) or 1
        assert (spec.training.epochs, spec.training.batch_size, passes * spec.ensemble.members) == (100, 128, 16)
        assert (spec.optimizer.name, spec.optimizer.lr, spec.optimizer.eps) == ("adabelief", 1e-3, 1e-12)
        assert [spec.schedule.factor(epoch, 100) for epoch in (0, 24, 25, 50, 75)] == [1, 1, 0.5, 0.25, 0.125]
        assert (names(spec.data.augment), spec.data.normalise, spec.data.padding) == (["crop", "flip"], True, 4)
        # All training images, as in the paper; only stacking needs some to fit its weights, and says so.
        assert spec.data.validation_fraction == (0.1 if path.stem == "stacking" else 0)
    fashion = ek.load_spec(ROOT / "specs" / "fashion_mnist.toml")
    assert (fashion.training.epochs, fashion.training.batch_size, fashion.optimizer.lr) == (150, 256, 1e-2)
    assert (names(fashion.data.augment), fashion.data.normalise) == (["flip"], False)


PAPER = [path for path in SPECS if path not in SWEEPS and "as in the paper" in path.read_text()]


@pytest.mark.parametrize("path", PAPER, ids=name_of)
def test_a_spec_says_what_is_given_up_for_the_papers_data_or_that_it_deviates(path):
    text = path.read_text()
    header = " ".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    if ek.load_spec(path).data.validation_fraction == 0:
        assert "training images are used, as in the paper. So there are no validation metrics" in header
        # the same with the stand-in that the header names
        assert "image_folder" not in header or "--set data.validation_fraction=0 " in header
    else:
        assert "the paper and the other specs here train on all" in header


@pytest.mark.parametrize("path", SPECS, ids=name_of)
def test_every_spec_builds_its_members_and_a_batch(path, tmp_path):
    """With class folders of the same shape standing in where the real files are absent."""
    specs = specs_of(path)
    dataset = specs[0].data
    if dataset.name not in EMBEDDED:
        dataset = stand_in(dataset, tmp_path)
    data = ek.load_data(dataset, specs[0].seed)
    for spec in specs:
        check_members(spec, data)


def specs_of(path):
    """The spec, or those of a sweep that differ in more than numbers: one for each base model and each method."""
    if path not in SWEEPS:
        return [ek.load_spec(path)]
    plan = make_plan(base_tables(path), discover())
    return list({(spec.model, tuple(m.name for m in spec.methods)): spec for spec in plan.specs.values()}.values())


def check_members(spec, data):
    """Build members for the data and compute the objective of a batch."""
    batch = next(iter(data.train.training_batches(spec.training.batch_size, spec.seed, epoch=1)))
    known = spec.data.info or data.info  # class folders say their classes only when they are read
    shape, num_outputs = data.info.input_shape, known.num_outputs
    number = min(2, len(spec.member_models))
    assert shape == known.input_shape
    with torch.no_grad():
        if isinstance(spec.model, ek.Family):
            outputs = spec.model.build_family(shape, num_outputs, number)(batch.inputs[:2])
        else:
            members = build_members(spec.member_models[:number], shape, num_outputs, spec.seed)
            outputs = torch.stack([member(batch.inputs[:2]) for member in members])
    assert outputs.shape == (number, 2, num_outputs)
    value = ek.objective(list(spec.methods), outputs, batch.targets[:2], spec.loss)
    assert value.isfinite()


def stand_in(dataset, folder):
    """The same data set's options on a few random images in class folders."""
    from PIL import Image

    channels = dataset.info.input_shape[0] if dataset.info else dataset.channels
    side = dataset.size or dataset.info.input_shape[1]
    for part in ("train", "test"):
        for label in range(2):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True)
            for number in range(3):
                pixels = torch.randint(256, (side, side, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(place / f"{number}.png")
    options = {
        key: getattr(dataset, key) for key in ("size", "crop_size", "augment", "padding", "degrees", "normalise")
    }
    image_folder = ek.datasets()["image_folder"].load()
    return image_folder(path=folder, channels=channels, validation_fraction=0, **options)


def test_the_digits_spec_has_what_its_header_says():
    spec = ek.load_spec(ROOT / "specs" / "digits.toml")
    data = ek.load_data(spec.data, spec.seed)
    member = ek.build_model(spec.model, data.info.input_shape, data.info.num_outputs)
    parameters = sum(parameter.numel() for parameter in member.parameters())
    header = (ROOT / "specs" / "digits.toml").read_text()
    assert f"{parameters:,} parameters" in header
    assert f"{len(data.train):,} training, {len(data.validation)} validation and {len(data.test)} test images" in header
