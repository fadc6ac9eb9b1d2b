"""The base class of image data sets: the parameters that they share."""

from __future__ import annotations

from pydantic import Field

from ensemblekit.core.dataset import Dataset
from ensemblekit.data.augmentation import Augmentations


class ImageDataset(Dataset):
    """A data set of images, (channels, height, width) each.

    `load` returns them as stored: uint8, scaled to [0, 1] batch by batch, or floating. Resizing, cropping, augmentation
    and normalisation are done by `ensemblekit.load_data`.
    """

    padding: int = Field(4, ge=0, description="zeros added on each side before a random crop of the image's size")
    degrees: float = Field(15.0, ge=0, le=180, description="largest angle of a random rotation, in degrees")
    size: int | None = Field(None, ge=1, description="side that images are resized and centre-cropped to when read")
    crop_size: int | None = Field(
        None, ge=1, description="side of the network's input: centre crops, or random crops in training with crop"
    )
    augment: Augmentations = ()
    normalise: bool = Field(False, description="subtract the channels' means and divide by their standard deviations")
