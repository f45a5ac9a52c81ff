"""Computes shares, idle time and Amdahl's bounds from the recorded pieces of time."""

from collections import defaultdict
from dataclasses import dataclass, field

from torch import nn

from ..bench.floor import Ceilings
from ..bench.statistics import median
from ..nn._checks import activation_of, plain_linear
from ..nn._others import stack_parts
from .kinds import KINDS, LAYOUT, short_name
from .record import Piece, Work

# Wrappers, which nobody would replace by something faster.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LAUNCH_BOUND = 0.2  # a step with at least this share of idle time


@dataclass(frozen=True)
class Gaps:
    """The times in which the GPU was idle, per recorded step."""

    count: float
    median_us: float
    largest_us: float


@dataclass(frozen=True)
class ModuleKind:
    """All modules of one class, including the modules inside them; times in µs per step."""

    name: str
    calls: int
    us: float
    share: float
    """Share of the time of all operators or kernels."""
    floor_us: float
    module: nn.Module
    """An example."""

    @property
    def to_floor(self) -> float:
        """How many times as fast this part would be if it reached its floor."""
        return max(1.0, self.us / self.floor_us) if self.floor_us else 1.0


@dataclass(frozen=True)
class Fusable:
    """Activations after linear layers that a fusewise operator computes together with the GEMM."""

    operator: str
    name: str
    """Of the modules that the operator would replace."""
    calls: int
    share: float
    """The activations' share of the time of all operators or kernels."""


@dataclass(frozen=True)
class Profile:
    command: str
    environment: dict
    model: str
    device: str
    train: bool
    amp: bool
    channels_last: bool
    ceilings: Ceilings
    dtype: str
    wall_us: float
    """Wall time of a step, without the profiler."""
    wall_spread: tuple[float, float]
    work_us: float
    """The part of a step in which a kernel (CUDA) or an operator (CPU) runs."""
    launches: float
    """Kernels or operators per step."""
    kinds: dict[str, float]
    """µs per step."""
    conversions: dict[str, tuple[float, float]]
    """Layout conversions by name: count and µs per step."""
    modules: list[ModuleKind]
    outside_us: float
    """The part of work_us that belongs to no module."""
    gaps: Gaps | None
    trace: dict = field(repr=False)
    fusable: list[Fusable] = field(default_factory=list)

    @property
    def idle(self) -> float:
        """The share of the wall time in which no kernel or operator runs."""
        return max(0.0, 1 - self.work_us / self.wall_us)


def amdahl(share: float, faster: float) -> float:
    """The speed-up of the whole if a share of it gets `faster` times as fast (Amdahl's law)."""
    left = 1 - share + share / faster
    return 1 / left if left > 0 else float("inf")


def kinds(pieces: list[Piece]) -> dict[str, float]:
    """µs per kind. Here and below, `pieces` are those of one step."""
    found = dict.fromkeys(KINDS, 0.0)
    for piece in pieces:
        found[piece.kind] += piece.us
    return {kind: us for kind, us in found.items() if us}


def conversions(pieces: list[Piece], steps: int) -> dict[str, tuple[float, float]]:
    """By name: the count per step, from `steps` recorded steps, and the time."""
    found: dict[str, tuple[float, float]] = {}
    for piece in pieces:
        if piece.kind == LAYOUT:
            name = short_name(piece.name)
            count, us = found.get(name, (0.0, 0.0))
            found[name] = (count + piece.counts / steps, us + piece.us)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def module_kinds(
    model: nn.Module,
    pieces: list[Piece],
    work: dict[str, Work],
    ceilings: Ceilings,
    dtype: str,
) -> list[ModuleKind]:
    """By class, the longest first. The model itself is only listed if it has no submodules. A class
    nested in itself counts once."""
    modules = dict(model.named_modules())
    total = sum(piece.us for piece in pieces)
    times: dict[type, float] = defaultdict(float)
    for piece in pieces:
        for kind in {type(modules[name]) for name in piece.modules}:
            times[kind] += piece.us
    found = []
    for kind, us in times.items():
        if kind in _CONTAINERS or (kind is type(model) and len(modules) > 1):
            continue
        own = [name for name, module in modules.items() if type(module) is kind and name in work]
        outermost = [name for name in own if not _inside(name, kind, modules)]
        floor = sum(
            ceilings.floor(work[name].bytes, work[name].operations, dtype)["us"]
            for name in outermost
        )
        calls = sum(work[name].calls for name in own)
        example = modules[own[0]]
        found.append(ModuleKind(kind.__name__, calls, us, us / total, floor, example))
    return sorted(found, key=lambda kind: -kind.us)


def fusable(
    model: nn.Module, pieces: list[Piece], behind: list[tuple[str, str, float]]
) -> list[Fusable]:
    """The fusable activations that `record.behind_linears` found, the longest first."""
    modules = dict(model.named_modules())
    total = sum(piece.us for piece in pieces)
    times: dict[str, float] = defaultdict(float)
    for piece in pieces:
        for name in set(piece.modules):
            times[name] += piece.us
    found: dict[tuple[str, str], list[float]] = {}
    for linear, name, share in behind:
        if kind := _operator_for(linear, name, modules):
            found.setdefault(kind, []).append(times[name] * share)
    made = [Fusable(*kind, len(each), sum(each) / total) for kind, each in found.items()]
    return sorted(made, key=lambda each: -each.share)


def _operator_for(
    linear: str, behind: str, modules: dict[str, nn.Module]
) -> tuple[str, str] | None:
    """The operator for a linear layer and the module after it, and the name of what it replaces."""
    try:
        plain_linear(linear, modules[linear])
        if activation_of(behind, modules[behind]) == "identity":
            return None
    except (TypeError, ValueError):
        return None
    around = linear.rpartition(".")[0]
    if around == behind.rpartition(".")[0]:
        try:
            stack_parts(modules[around])
            return "fusewise.nn.MLP.from_sequential", type(modules[around]).__name__
        except (TypeError, ValueError):
            pass
    name = f"Linear and {type(modules[behind]).__name__}"
    return "fusewise.nn.LinearAct.from_linear", name


def _inside(name: str, kind: type, modules: dict[str, nn.Module]) -> bool:
    while name:
        name = name.rpartition(".")[0]
        if type(modules[name]) is kind:
            return True
    return False


def gaps(busy: list[tuple[float, float]], steps: int) -> Gaps | None:
    found = [start - end for (_, end), (start, _) in zip(busy, busy[1:], strict=False)]
    if not found:
        return None
    return Gaps(len(found) / steps, median(found), max(found))
