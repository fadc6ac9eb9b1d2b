"""Augmentation of batches equals torchvision's of single images, in its results and in its distribution."""

from __future__ import annotations

import pytest
import torch
from helpers.images import random_images
from pydantic import Field, ValidationError
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as torchvision_functional

import ensemblekit as ek
from ensemblekit import Augmentation, DataInfo, ImageDataset, Splits, load_data
from ensemblekit.core.errors import SpecError
from ensemblekit.core.registry import discover
from ensemblekit.data.augmentation import AUGMENTATIONS, Crop, Flip, Rotate
from ensemblekit.spec.reader import load_spec
from ensemblekit.spec.schema import spec_schema


class Images(ImageDataset):
    """Random images."""

    def load(self, seed: int) -> Splits:
        part = (random_images(40, 1, 4, 4), torch.arange(40) % 2)
        return Splits(part, part, DataInfo("classification", (1, 4, 4), 2))


class Invert(Augmentation):
    """Inverts each image with some probability."""

    probability: float = Field(0.5, ge=0, le=1, description="share of the images that are inverted")

    def sample(self, num_images: int, generator: torch.Generator) -> Tensor:
        return torch.rand(num_images, generator=generator) < self.probability

    def apply(self, images: Tensor, sampled: Tensor) -> Tensor:
        return torch.where(sampled[:, None, None, None], 255 - images, images)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def crop(stored: tuple[int, int], size: tuple[int, int], padding: int = 0) -> Crop:
    return Crop().for_images(Images(padding=padding), stored, size)


def rotate(degrees: float) -> Rotate:
    return Rotate().for_images(Images(degrees=degrees), (9, 9), (9, 9))


FLIP = Flip()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("size", "padding"), [((32, 20), 4), ((16, 9), 0), ((32, 20), 0)])
def test_crop_equals_torchvisions_pad_and_crop(dtype: torch.dtype, size: tuple[int, int], padding: int) -> None:
    images = random_images(50, 3, 32, 20, dtype=dtype)
    augmentation = crop((32, 20), size, padding)
    offsets = augmentation.sample(50, generator())
    expected = torch.stack(
        [
            torchvision_functional.crop(torchvision_functional.pad(image, [padding]), *offset, *size)
            for image, offset in zip(images, offsets.tolist(), strict=True)
        ]
    )
    assert torch.equal(augmentation.apply(images, offsets), expected)


def test_images_larger_than_the_crop_are_not_padded() -> None:
    assert crop((32, 20), (16, 9), padding=4).sample(1000, generator()).amax(dim=0).tolist() == [16, 11]


def test_crop_accepts_images_that_are_not_contiguous() -> None:
    images = random_images(8, 3, 16, 16).to(memory_format=torch.channels_last)
    augmentation = crop((16, 16), (12, 12))
    offsets = augmentation.sample(8, generator())
    assert torch.equal(augmentation.apply(images, offsets), augmentation.apply(images.contiguous(), offsets))


def test_flip_mirrors_only_the_chosen_images() -> None:
    images, mask = random_images(20, 3, 8, 6), FLIP.sample(20, generator())
    expected = [
        torchvision_functional.horizontal_flip(image) if chosen else image
        for image, chosen in zip(images, mask, strict=True)
    ]
    assert torch.equal(FLIP.apply(images, mask), torch.stack(expected))


@pytest.mark.parametrize("shape", [(20, 3, 32, 32), (20, 1, 9, 14)])
def test_rotate_equals_torchvisions_bilinear_rotation_with_zeros_outside(shape: tuple[int, ...]) -> None:
    images, angles = random_images(*shape), rotate(180).sample(shape[0], generator()).double()
    expected = [
        torchvision_functional.rotate(image, float(angle), InterpolationMode.BILINEAR)
        for image, angle in zip(images, angles, strict=True)
    ]
    assert torch.equal(rotate(180).apply(images, angles), torch.stack(expected))


def test_rotate_by_a_right_angle_is_counter_clockwise() -> None:
    images = random_images(3, 1, 8, 8, dtype=torch.float32)
    rotated = rotate(90).apply(images, torch.full((3,), 90.0, dtype=torch.float64))
    torch.testing.assert_close(rotated, images.rot90(dims=(-2, -1)), atol=1e-5, rtol=0)


def same_distribution(ours: Tensor, theirs: Tensor) -> bool:
    """Chi-square test of two samples of the same size, at about five standard deviations."""
    freedom = len(ours) - 1
    statistic = ((ours - theirs).square() / (ours + theirs)).sum()
    return bool(statistic < freedom + 5 * (2 * freedom) ** 0.5)


def test_offsets_of_crops_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    # the middle of the crop tells its offsets: a pixel's value is five times its row plus its column
    image = (5 * torch.arange(5).unsqueeze(1) + torch.arange(5)).unsqueeze(0)
    random_crop = v2.RandomCrop(5, padding=2)
    theirs = torch.tensor([int(random_crop(image)[0, 2, 2]) for _ in range(2000)])
    augmentation = crop((5, 5), (5, 5), padding=2)
    ours = augmentation.apply(image.expand(2000, 1, 5, 5), augmentation.sample(2000, generator()))[:, 0, 2, 2]
    assert same_distribution(ours.bincount(minlength=25), theirs.bincount(minlength=25))


def test_flips_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    image = torch.tensor([[[0, 1]]])
    theirs = torch.tensor([int(v2.RandomHorizontalFlip()(image)[0, 0, 0]) for _ in range(2000)])
    ours = FLIP.sample(2000, generator()).long()
    assert same_distribution(ours.bincount(minlength=2), theirs.bincount(minlength=2))


def test_angles_are_distributed_as_torchvisions() -> None:
    torch.manual_seed(0)
    transform = v2.RandomRotation(30)
    theirs = torch.tensor([transform.make_params([])["angle"] for _ in range(2000)])
    ours = rotate(30).sample(2000, generator())
    assert same_distribution(ours.histc(12, -30, 30), theirs.histc(12, -30, 30))


def test_a_new_augmentation_is_one_class() -> None:
    dataset = Images(validation_fraction=0, augment=(Invert(),))
    batch = next(load_data(dataset, 0).train.training_batches(40, 0, 0))
    stored = random_images(40, 1, 4, 4)[batch.index]
    kept, inverted = (
        (batch.inputs == images * torch.tensor(1 / 255)).all(dim=(1, 2, 3)) for images in (stored, 255 - stored)
    )
    assert bool((kept ^ inverted).all())
    assert 8 < int(inverted.sum()) < 32


def names(dataset: ImageDataset) -> list[str]:
    return [augmentation.name for augmentation in dataset.augment]


def test_augmentations_are_named_in_python_as_in_a_spec() -> None:
    assert names(Images(augment=tuple(AUGMENTATIONS))) == list(AUGMENTATIONS)
    assert Images(augment=[{"name": "crop", "padding": 2}]).augment[0].padding == 2
    with pytest.raises(ValidationError, match=r'"flop" is not a registered augmentation.*did you mean "flip"'):
        Images(augment=("flop",))


def digits(augment: list[object], **settings: object) -> ek.Spec:
    tables = {"data": {"name": "digits", "augment": augment, **settings}, "model": {"name": "mlp"}}
    return load_spec(tables, None, discover().with_classes([Invert]))


def test_a_spec_names_augmentations_of_plugins_with_their_parameters() -> None:
    spec = digits(["crop", {"name": "invert", "probability": 0.25}, {"name": "rotate", "degrees": 3}])
    assert names(spec.data) == ["crop", "invert", "rotate"]
    assert spec.data.augment[1] == Invert(probability=0.25).named("invert")
    written = spec.to_dict()
    assert written["data"]["augment"] == [
        "crop",
        {"name": "invert", "probability": 0.25},
        {"name": "rotate", "degrees": 3.0},
    ]
    assert load_spec(written, None, discover().with_classes([Invert])) == spec
    assert dict(spec.plugins())["data.augment.1"] is spec.data.augment[1]


def test_parameters_of_an_augmentation_come_before_those_of_the_data_set() -> None:
    old = load_data(digits(["rotate"], degrees=90.0).data, 0).train.transform
    new = load_data(digits([{"name": "rotate", "degrees": 90.0}], degrees=1.0).data, 0).train.transform
    (left,), (right,) = old.sample(50, generator()), new.sample(50, generator())
    assert torch.equal(left, right)
    assert float(left.abs().max()) > 45
    plain = crop((8, 8), (8, 8), padding=3)
    own = Crop(padding=3).for_images(Images(padding=1), (8, 8), (8, 8))
    assert torch.equal(plain.sample(50, generator()), own.sample(50, generator()))


@pytest.mark.parametrize(
    ("augment", "path", "what"),
    [
        (["flop"], "data.augment.0.name", '"flop" is not a registered augmentation'),
        (["crop", {"name": "invert", "probability": 2}], "data.augment.1.probability", "less than or equal to 1"),
        ([{"padding": 2}], "data.augment.0.name", "missing"),
    ],
)
def test_mistakes_in_augmentations_are_named(augment: list[object], path: str, what: str) -> None:
    with pytest.raises(SpecError) as caught:
        digits(augment)
    assert {problem.path: problem.what for problem in caught.value.problems}.keys() == {path}
    assert what in caught.value.problems[0].what


def test_the_schema_has_the_installed_augmentations() -> None:
    schema = spec_schema(discover().with_classes([Invert]), pytest.fail)
    assert "invert" in str(schema["$defs"]["augmentation"])
    (digits_schema,) = [
        table
        for table in schema["properties"]["data"]["oneOf"]
        if table.get("properties", {}).get("name") == {"const": "digits"}
    ]
    assert digits_schema["properties"]["augment"]["items"] == {"$ref": "#/$defs/augmentation"}


def test_default_augmentations_do_not_count_as_set_by_the_spec() -> None:
    tables = {"data": {"name": "fashion_mnist"}, "model": {"name": "mlp"}}
    default, explicit = (load_spec(tables, changes, discover()) for changes in ({}, {"data.augment": ["flip"]}))
    assert default.data.augment == explicit.data.augment
    assert "augment" not in default.data.model_fields_set
    assert "augment" in explicit.data.model_fields_set
