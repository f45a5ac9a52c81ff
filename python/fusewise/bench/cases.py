"""Cases as data: which shapes are measured, and in which sets."""

import json
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch

# In an installed package the cases lie beside this file, in a source tree under benchmarks/.
_FOLDERS = (Path(__file__).parent / "cases", Path(__file__).parents[3] / "benchmarks" / "cases")


class UsageError(Exception):
    """What was asked for cannot be done; the message is one line for the user."""


@dataclass(frozen=True)
class Case:
    family: str
    name: str
    shape: tuple[int, ...]
    dtype_name: str
    group: str | None = None
    """Cases of one group are also summed up, each `count` times."""
    count: int = 1
    extra: dict = field(default_factory=dict, hash=False)
    """What only the family understands."""

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)


def select(family: str, device: str, size: str, pattern: str | None) -> list[Case]:
    """The cases of one set, those whose name contains or matches `pattern`."""
    folder = next(folder for folder in _FOLDERS if folder.is_dir())
    data = json.loads((folder / f"{family}.json").read_text())
    wanted = data["sets"][device][size]
    return [
        _case(family, entry)
        for entry in data["cases"]
        if any(fnmatch(entry["name"], glob) for glob in wanted)
        and (pattern is None or pattern in entry["name"] or fnmatch(entry["name"], pattern))
    ]


def _case(family: str, entry: dict) -> Case:
    entry = dict(entry)
    return Case(
        family=family,
        name=entry.pop("name"),
        shape=tuple(entry.pop("shape")),
        dtype_name=entry.pop("dtype"),
        group=entry.pop("group", None),
        count=entry.pop("count", 1),
        extra=entry,
    )
