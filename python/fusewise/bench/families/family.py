"""What a family of operators gives to the benchmark."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..accuracy import Expected
from ..cases import Case

FORWARD = "forward"
BOTH = "forward+backward"
MODES = (FORWARD, BOTH)


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
    outputs: tuple[str, ...]
    """Names of the output and of every gradient, inputs first, then weights."""
    build: Callable[[Case, str, int], Workload]
    """From the case, the device and the number of buffers."""
    reference: Callable[[Case, Workload], dict[str, Expected]]
    """Every one of `outputs` for the first buffer, in fp64 (fp32 for half data of large size)."""
    bytes_moved: Callable[[Case, str], int]
    """The fewest bytes that a mode must move: the floor."""
