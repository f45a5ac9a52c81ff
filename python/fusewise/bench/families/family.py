"""What a family of operators gives to the benchmark."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..accuracy import Expected

FORWARD = "forward"
BOTH = "forward+backward"
MODES = (FORWARD, BOTH)

DTYPES = ("float32", "float16", "bfloat16", "float64")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Case:
    family: str
    name: str
    shape: tuple[int, ...]
    dtype_name: str
    layout: str = "contiguous"
    group: str | None = None
    """Cases of one group are also summed up, each `count` times."""
    count: int = 1
    extra: dict[str, int] = field(default_factory=dict, hash=False)
    """What only the family understands."""

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)

    @property
    def memory_format(self) -> torch.memory_format:
        return LAYOUTS[self.layout]


@dataclass
class Workload:
    """One case, ready to run: `function(*inputs[i], *weights)` gives the output."""

    inputs: list[tuple[Tensor, ...]]
    """One tuple for each rotating buffer."""
    gradients: list[Tensor]
    """What backward starts from, one for each buffer."""
    weights: tuple[Tensor, ...]
    functions: dict[str, Callable | str]
    """"fusewise", "eager" and the family's own baselines; a string says why one is not there."""
    forward_only: frozenset[str] = frozenset()
    """Baselines that have no gradient."""


@dataclass(frozen=True)
class Family:
    name: str
    rank: int
    """How many sizes the shape of a case has."""
    extra: tuple[str, ...]
    """What a case must say beside its shape, each a positive number."""
    outputs: tuple[str, ...]
    """Names of the output and of every gradient, inputs first, then weights."""
    build: Callable[[Case, str, int], Workload]
    """From the case, the device and the number of buffers."""
    reference: Callable[[Case, Workload], dict[str, Expected]]
    """Every one of `outputs` for the first buffer, in fp64 (fp32 for half data of large size)."""
    bytes_moved: Callable[[Case, str], int]
    """The fewest bytes that a mode must move."""
    operations: Callable[[Case, str], int]
    """The additions and multiplications of a mode."""
    checked: tuple[Case, ...]
    """What `fusewise check` runs in every dtype and layout: small, and odd where it matters."""
