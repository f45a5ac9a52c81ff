"""Where the images come from: synthetic scenes, or folders of aligned images."""

import os
from pathlib import Path
from typing import NamedTuple

import scenes
import torch
import torch.nn.functional as F
from scenes import STREAMS
from torch import Tensor


class SceneError(Exception):
    """Something that the user can put right; printed in one line."""


class Batch(NamedTuple):
    images: list[Tensor]
    """Per stream `[N, channels, size, size]`, from 0 to 1, zero where the sample has no image."""
    absent: Tensor
    """Bool `[streams, N]`: the samples without an image."""
    labels: Tensor


class Synthetic(torch.utils.data.Dataset):
    classes = scenes.CLASSES

    def __init__(self, count: int, size: int, seed: int):
        self.images, self.labels = scenes.scenes(count, size, seed)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, indices: list[int]) -> Batch:
        absent = torch.zeros(len(STREAMS), len(indices), dtype=torch.bool)
        return Batch([image[indices] for image in self.images], absent, self.labels[indices])


class Folder(torch.utils.data.Dataset):
    """`FOLDER/CLASS/{rgb,depth,orthogonal}/NAME.png`. Images of a sample have the same NAME; their
    suffixes may differ. A sample may lack some of its images."""

    def __init__(self, folder: Path, size: int):
        self.size = size
        self.samples, labels = [], []
        self.classes = tuple(sorted(path.name for path in _entries(folder) if path.is_dir()))
        if len(self.classes) < 2:
            raise SceneError(
                f"{folder}: expected a folder for each of at least 2 classes, "
                f"found {len(self.classes)}"
            )
        for label, name in enumerate(self.classes):
            found: dict[str, dict[str, Path]] = {}
            for stream in STREAMS:
                where = folder / name / stream
                for path in sorted(_entries(where)) if where.is_dir() else ():
                    if not path.name.startswith("."):
                        found.setdefault(path.stem, {})[stream] = path
            if not found:
                wanted = ", ".join(STREAMS)
                raise SceneError(f"{folder / name}: has no images in {wanted}: put some there")
            self.samples += [paths for _, paths in sorted(found.items())]
            labels += [label] * len(found)
        self.labels = torch.tensor(labels)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, indices: list[int]) -> Batch:
        paths = [self.samples[i] for i in indices]
        images = [
            torch.stack([
                read(path[stream], channels, self.size)
                if stream in path
                else torch.zeros(channels, self.size, self.size)
                for path in paths
            ])
            for stream, channels in STREAMS.items()
        ]  # fmt: skip
        absent = torch.tensor([[stream not in path for path in paths] for stream in STREAMS])
        return Batch(images, absent, self.labels[indices])


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SceneError(
            f"{folder}: there is no such folder: --data takes a folder that holds "
            f"{{train,test}}/CLASS/{{{','.join(STREAMS)}}}/NAME.png"
        ) from error
    except OSError as error:
        raise SceneError(f"{folder}: cannot be read: {error.strerror}") from error


def read(path: Path, channels: int, size: int) -> Tensor:
    """An image of 8 or 16 bits per value as `[channels, size, size]`, from 0 to 1."""
    try:
        import numpy as np
        from PIL import Image
    except ImportError as error:
        raise SceneError("--data needs the packages pillow and numpy") from error
    try:
        with Image.open(path) as image:
            if channels == 3:
                image = image.convert("RGB")
            elif image.mode not in ("L", "I", "I;16", "I;16B", "F"):
                image = image.convert("L")
            largest = {"RGB": 255, "L": 255, "F": 1}.get(image.mode, 65535)
            values = torch.from_numpy(np.array(image, dtype=np.float32) / largest)
    except (OSError, ValueError, SyntaxError) as error:
        raise SceneError(f"{path}: cannot be read as an image: {error}") from error
    if not values.isfinite().all():
        raise SceneError(f"{path}: has values that are NaN or infinite: leave it out")
    values = values.permute(2, 0, 1) if channels == 3 else values[None]
    (resized,) = F.interpolate(values[None], (size, size), mode="bilinear", antialias=True)
    return resized


def load(options) -> tuple[torch.utils.data.Dataset, torch.utils.data.Dataset]:
    """What to train with and what to test with."""
    if options.data is None:
        seeds = 2 * options.seed, 2 * options.seed + 1
        count = max(32, options.scenes // 4)
        return Synthetic(options.scenes, options.size, seeds[0]), Synthetic(
            count, options.size, seeds[1]
        )
    train, test = (Folder(options.data / part, options.size) for part in ("train", "test"))
    if train.classes != test.classes:
        raise SceneError(
            f"{options.data}: train has the classes {', '.join(train.classes)}, "
            f"test has {', '.join(test.classes)}"
        )
    return train, test


def batches(data, batch: int, workers: int, order: Tensor | None = None, least: int = 1):
    """A loader of batches in the given order. Those of fewer than `least` samples are left out."""
    order = torch.arange(len(data)) if order is None else order
    indices = [part.tolist() for part in order.split(batch) if len(part) >= least]
    return torch.utils.data.DataLoader(
        data, batch_size=None, sampler=indices, num_workers=min(workers, os.cpu_count() or 1)
    )
