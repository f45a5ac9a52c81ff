"""The interface between an operator family and the benchmark."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..accuracy import Expected, Results

FORWARD = "forward"
BOTH = "forward+backward"
STEP = "train step"  # gradients set to None, loss, backward; no optimizer
MODES = (FORWARD, BOTH)

# Baselines that only some families have, on a GPU only.
REDUCE_OVERHEAD = "reduce-overhead"  # torch.compile(mode="reduce-overhead")
GRAPHED = "graphed"  # ours, captured as a whole in a CUDA graph

DTYPES = ("float32", "float16", "bfloat16", "float64")
TF32 = "tf32"  # float32 data, with torch set to use TF32 in its GEMMs
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Case:
    family: str
    name: str
    shape: tuple[int, ...]
    dtype_name: str
    layout: str = "contiguous"
    group: str | None = None
    """Cases of one group are also summed, each counted `count` times."""
    count: int = 1
    extra: dict[str, int | str] = field(default_factory=dict, hash=False)
    """Parameters that only the family knows."""
    models: dict[str, int] = field(default_factory=dict, hash=False)
    """How often each model has this layer."""
    held_out: bool = False
    """Kept out of any fit of the choice between kernels, to see how the choice does elsewhere."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.tf32 else getattr(torch, self.dtype_name)

    @property
    def tf32(self) -> bool:
        return self.dtype_name == TF32

    @contextlib.contextmanager
    def precision(self):
        """Sets torch's TF32 switch as the case requires, for everything that runs on it."""
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
    """The bytes that a call touches, each counted once.

    Hidden activations and whatever else a fused operator can keep on the chip are not included.
    """

    data: int
    """Inputs, outputs and all gradients. Every buffer has its own memory for them."""
    weights: int
    """Weights, which every call reads from the same memory."""
    again: int = 0
    """The part of `data` and `weights` that backward reads a second time."""


@dataclass
class Workload:
    """One case, ready to run. `function(*inputs[i], *weights)` returns the output.

    For a train step it returns the loss, and only the weights get gradients.
    """

    inputs: list[tuple[Tensor, ...]]
    """One tuple per rotating buffer."""
    gradients: list[Tensor]
    """The output's gradient, from which backward starts; one per buffer."""
    weights: tuple[Tensor, ...]
    functions: dict[str, Callable | str]
    """"fusewise", "eager" and the family's own baselines. A string says why one is missing."""
    forward_only: frozenset[str] = frozenset()
    """Baselines without a backward."""
    unchecked: frozenset[str] = frozenset()
    """Baselines that compute something else, and less. They are timed but not checked."""


def both_modes(case: Case) -> tuple[str, ...]:
    return MODES


@dataclass(frozen=True)
class Family:
    name: str
    rank: int | None
    """How many sizes the shape of a case has. None: three or more."""
    extra: dict[str, tuple[str, ...] | None]
    """Further fields of a case: one of these strings each, or for None a positive number."""
    build: Callable[[Case, str, int], Workload]
    """Makes the workload from the case, the device and the number of buffers."""
    reference: Callable[[Case, Workload], dict[str, Expected]]
    """The output and all gradients on the first buffer: those of the inputs, then of the weights.

    In fp64; large half-precision data in fp32. In a train step the inputs have no gradients.
    """
    traffic: Callable[[Case, str], Traffic]
    """The bytes that a mode has to touch."""
    operations: Callable[[Case, str], int]
    """The fewest additions and multiplications that a mode needs."""
    checked: tuple[Case, ...]
    """The cases of `fusewise check`, run in every dtype and layout: small, with some odd sizes."""
    tiny: Case
    """The case of `fusewise bench overhead`: so small that only host time matters."""
    optional: tuple[str, ...] = ()
    """The fields of `extra` that a case may leave out."""
    layouts: tuple[str, ...] = ("contiguous",)
    baselines: tuple[str, ...] = ()
    """Its own baselines, in addition to those of all families."""
    modes: Callable[[Case], tuple[str, ...]] = both_modes
    """The modes in which a case is measured."""
    eager_rounds_between: bool = False
    """Whether eager rounds an intermediate result before relu. Then relu may decide otherwise than
    with exact arithmetic, which is no mistake of eager's."""
    given: Callable[[Case, Workload, Results, list[Tensor]], Results] | None = None
    """Adapts the expected results to a call's own decisions at relu's kink.

    It reads these from the tensors that the call saved for backward.
    """
