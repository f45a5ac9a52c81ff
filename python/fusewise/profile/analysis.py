"""From pieces of time to shares, idle time, and what a faster part would do for the whole."""

from collections import defaultdict
from dataclasses import dataclass, field

from torch import nn

from ..bench.floor import Ceilings
from ..bench.statistics import median
from ..nn._checks import activation_of, plain_linear
from ..nn._others import stack_parts
from .kinds import KINDS, LAYOUT, short_name
from .record import Piece, Work

# Wrappers that nobody would replace by something faster.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
LAUNCH_BOUND = 0.2  # so much idle time of a step, or more


@dataclass(frozen=True)
class Gaps:
    """Where the GPU had nothing to do, in a step of the recording."""

    count: float
    median_us: float
    largest_us: float


@dataclass(frozen=True)
class ModuleKind:
    """All modules of one class, their inner ones included; times in µs a step."""

    name: str
    calls: int
    us: float
    share: float
    """Of the time of all operators or kernels."""
    floor_us: float
    module: nn.Module
    """One of them."""

    @property
    def to_floor(self) -> float:
        """How many times as fast this part would be at its floor."""
        return max(1.0, self.us / self.floor_us) if self.floor_us else 1.0


@dataclass(frozen=True)
class Fusable:
    """Activations behind linear layers that an operator of ours computes with the product."""

    operator: str
    name: str
    """Of what it would replace."""
    calls: int
    share: float
    """Of the activations, of the time of all operators or kernels."""


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
    """A step as a user waits for it, without the profiler."""
    wall_spread: tuple[float, float]
    work_us: float
    """In which a kernel (CUDA) or an operator (CPU) ran, in a step."""
    launches: float
    """Kernels or operators in a step."""
    kinds: dict[str, float]
    """µs a step."""
    conversions: dict[str, tuple[float, float]]
    """Layout conversions by name: how many a step, and µs."""
    modules: list[ModuleKind]
    outside_us: float
    """Of work_us, what belongs to no module."""
    gaps: Gaps | None
    trace: dict = field(repr=False)
    fusable: list[Fusable] = field(default_factory=list)

    @property
    def idle(self) -> float:
        """The share of the wall time in which no kernel, or no operator, ran."""
        return max(0.0, 1 - self.work_us / self.wall_us)


def amdahl(share: float, faster: float) -> float:
    """How many times as fast the whole gets when a share of it gets `faster` times as fast."""
    left = 1 - share + share / faster
    return 1 / left if left > 0 else float("inf")


def kinds(pieces: list[Piece]) -> dict[str, float]:
    """Pieces, here and below: of one step all together."""
    found = dict.fromkeys(KINDS, 0.0)
    for piece in pieces:
        found[piece.kind] += piece.us
    return {kind: us for kind, us in found.items() if us}


def conversions(pieces: list[Piece], steps: int) -> dict[str, tuple[float, float]]:
    """By name, how many there are in one of `steps` that were recorded, and their time."""
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
    """By class, the longest first; the model itself only where it has no parts. A class inside
    itself counts once."""
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
    """From what `record.behind_linears` found; the longest first."""
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
    """The operator for a linear layer and what is behind it, and the name of what it replaces."""
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
