"""What a family of operators gives to the benchmark."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..accuracy import Expected, Results

FORWARD = "forward"
BOTH = "forward+backward"
STEP = "train step"  # gradients to None, a loss, backward; no optimizer
MODES = (FORWARD, BOTH)

# Baselines of some families, on a GPU only.
REDUCE_OVERHEAD = "reduce-overhead"  # torch.compile(mode="reduce-overhead")
GRAPHED = "graphed"  # ours, captured in a CUDA graph as a whole

DTYPES = ("float32", "float16", "bfloat16", "float64")
TF32 = "tf32"  # float32, with torch set to use TF32 in its products
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
    extra: dict[str, int | str] = field(default_factory=dict, hash=False)
    """What only the family understands."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tf32 else getattr(torch, self.dtype_name)

    @property
    def tf32(self) -> bool:
        return self.dtype_name == TF32

    @contextlib.contextmanager
    def precision(self):
        """Torch set as the case wants it, for everything that is run on it."""
        matmul = torch.backends.cuda.matmul
        before = matmul.fp32_precision
        matmul.fp32_precision = "tf32" if self.tf32 else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before

    @property
    def memory_format(self) -> torch.memory_format:
        return LAYOUTS[self.layout]


@dataclass(frozen=True)
class Traffic:
    """The bytes that a call touches, each counted once. What a fused operator can keep on the chip,
    such as hidden activations, is not among them."""

    data: int
    """Inputs and outputs, and the gradients of all: other memory for every buffer."""
    weights: int
    """The same memory for every call."""
    again: int = 0
    """Of both, what backward reads a second time."""


@dataclass
class Workload:
    """One case, ready to run: `function(*inputs[i], *weights)` gives the output, or for a train
    step the loss, which is learned by the weights alone."""

    inputs: list[tuple[Tensor, ...]]
    """One tuple for each rotating buffer."""
    gradients: list[Tensor]
    """What backward starts from, one for each buffer."""
    weights: tuple[Tensor, ...]
    functions: dict[str, Callable | str]
    """"fusewise", "eager" and the family's own baselines; a string says why one is not there."""
    forward_only: frozenset[str] = frozenset()
    """Baselines that have no gradient."""
    unchecked: frozenset[str] = frozenset()
    """Those that compute something else, less, and are there to be compared in time alone."""


def both_modes(case: Case) -> tuple[str, ...]:
    return MODES


@dataclass(frozen=True)
class Family:
    name: str
    rank: int | None
    """How many sizes the shape of a case has; None: three or more."""
    extra: dict[str, tuple[str, ...] | None]
    """What a case must say beside its shape: one of some texts, or a positive number."""
    build: Callable[[Case, str, int], Workload]
    """From the case, the device and the number of buffers."""
    reference: Callable[[Case, Workload], dict[str, Expected]]
    """The output and every gradient, those of inputs first, then those of weights, for the first
    buffer, in fp64 (fp32 for half data of large size). Of a train step, inputs have none."""
    traffic: Callable[[Case, str], Traffic]
    """What a mode must touch."""
    operations: Callable[[Case, str], int]
    """The fewest additions and multiplications of a mode."""
    checked: tuple[Case, ...]
    """What `fusewise check` runs in every dtype and layout: small, and odd where it matters."""
    tiny: Case
    """What `fusewise bench overhead` runs: so small that a call takes the host's time alone."""
    layouts: tuple[str, ...] = ("contiguous",)
    baselines: tuple[str, ...] = ()
    """Of its own, beside those that every family has."""
    modes: Callable[[Case], tuple[str, ...]] = both_modes
    """In which a case is measured."""
    given: Callable[[Case, Workload, Results, list[Tensor]], Results] | None = None
    """What is right for one call that took decisions of its own, from what it kept for backward."""
