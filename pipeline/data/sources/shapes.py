"""Drawn images of one shape each, with exact masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ul2q.pipeline.data.sources.image_masks import IMAGENET_MEAN, IMAGENET_STD
from ul2q.pipeline.data.sources.source import DataSource, Request

if TYPE_CHECKING:
    from ul2q.pipeline.data.raw_parts import RawData


def read(_: str, __: Request) -> RawData:
    """Return 600 images [3, 64, 64], values 0..255, the same every time: 60 for validation, 60 for test."""
    import numpy as np

    from ul2q.pipeline.data.drawn_shapes import draw_all
    from ul2q.pipeline.data.preprocess import Preprocess
    from ul2q.pipeline.data.raw_parts import Arrays, RawData, RawMasks, RawPart

    images, masks = draw_all()
    part = RawPart(
        (Arrays(images, "shapes"),), masks=RawMasks(Arrays(masks.astype(np.uint8), "shapes: masks"), top=1)
    )
    preprocess = Preprocess(scale=1 / 255, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    return RawData(part, augmentation="flip", preprocess=preprocess)


SOURCE = DataSource("shapes", "600 drawn shapes with masks, 64x64", read)
