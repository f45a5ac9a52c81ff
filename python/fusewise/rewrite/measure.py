"""Times of modules and models: interleaved samples, and what follows from them."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import ceil

import torch
from torch import Tensor, nn

from .._capturing import WaitsForTheGpu, waiting_is_an_error
from .._torch_private import tree_leaves
from ..bench.floor import cache_bytes
from ..bench.measure import Call, GraphTimer, LoopTimer, interleave, peak_bytes
from ..bench.statistics import Ratio, median, ratio_of_sums
from ..bench.tasks import Effort
from .setting import Setting

# Whole models differ by less than their parts, which takes more samples to see.
# On a GPU there are two clocks, and the first of them is steady.
_SLOT_EFFORT = {"cpu": Effort(15, 0.15), "cuda": Effort(15, 0.08)}
_MODEL_EFFORT = {"cpu": Effort(41, 4.0), "cuda": Effort(41, 2.0)}
_MOST_BUFFERS = 16
_MOST_GRAPH_CALLS, _GRAPH_US = 20, 20e3  # a graph has so many calls, or takes so long
_MOST_BYTES = 1 << 28

GPU, WALL = "gpu", "wall"


@dataclass(frozen=True)
class Times:
    """The samples of one contender, in µs per call, by clock."""

    samples: dict[str, list[float]]
    peak_bytes: int | None = None
    """Peak GPU memory of a call; None on a CPU."""

    def median(self, clock: str) -> float:
        return median(self.samples[clock])


@dataclass(frozen=True)
class Comparison:
    """Times before and after, over several calls of several shapes."""

    terms: list[tuple[int, Times, Times]] = field(default_factory=list)
    """For each shape: the number of calls, and the times of one call before and after."""
    _ratios: dict[str, Ratio] = field(default_factory=dict, compare=False)

    @property
    def clocks(self) -> list[str]:
        """Those that all shapes were measured with."""
        runs = [times.samples for _, old, new in self.terms for times in (old, new)]
        return [clock for clock in (GPU, WALL) if all(clock in samples for samples in runs)]

    def ratio(self, clock: str) -> Ratio:
        """Above 1, the fused modules are faster."""
        if clock not in self._ratios:
            self._ratios[clock] = ratio_of_sums(
                [(count, old.samples[clock], new.samples[clock]) for count, old, new in self.terms]
            )
        return self._ratios[clock]

    def us(self, clock: str) -> tuple[float, float]:
        """All calls together, before and after."""
        old = sum(count * before.median(clock) for count, before, _ in self.terms)
        return old, sum(count * after.median(clock) for count, _, after in self.terms)

    def is_faster(self, clocks: tuple[str, ...], least: float = 1.0) -> bool:
        """By the first clock; by the others it must not be slower."""
        known = [clock for clock in clocks if clock in self.clocks] or self.clocks
        first, *others = (self.ratio(clock) for clock in known)
        gains = first.verdict == "faster" and first.value >= least
        return gains and all(ratio.verdict != "slower" for ratio in others)


def deciding_clocks(device: str, graph: bool) -> tuple[str, ...]:
    """The clocks that decide, the most important one first."""
    if device == "cpu":
        return (WALL,)
    return (GPU,) if graph else (GPU, WALL)


def sample_slot(modules: dict[str, nn.Module], inputs: tuple, setting: Setting) -> dict[str, Times]:
    """Times of modules on inputs of the model, forward or forward and backward."""
    rotating = [inputs]
    nbytes = sum(t.nbytes for t in inputs if isinstance(t, Tensor)) or 1
    wanted = -(-3 * cache_bytes(setting.device) // nbytes)
    for _ in range(min(wanted, _MOST_BUFFERS, max(1, _MOST_BYTES // nbytes)) - 1):
        rotating.append(tuple(t.clone() if isinstance(t, Tensor) else t for t in inputs))
    calls = {name: _slot_call(module, rotating, setting) for name, module in modules.items()}
    with setting.off().autocast():  # once; around each call it would count in all times
        return sample(calls, len(rotating), setting.device, _SLOT_EFFORT[setting.device])


def _slot_call(module: nn.Module, rotating: list[tuple], setting: Setting) -> Call:
    cast = setting.autocast if setting.dtype else contextlib.nullcontext
    if not setting.training:

        def forward(i: int):
            with torch.no_grad(), cast():
                return module(*rotating[i])

        return forward
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    leaves = [tuple(map(_leaf, inputs)) for inputs in rotating]
    wanted = [[value for value in each if _learns(value)] for each in leaves]
    gradients: list[Tensor] = []

    def step(i: int):
        with torch.enable_grad(), cast():
            y = module(*leaves[i])
        outputs = (
            [y] if isinstance(y, Tensor) else [each for each in tree_leaves(y) if _learns(each)]
        )
        if not gradients:
            gradients.extend(torch.ones_like(each) for each in outputs)
        learn = [*wanted[i], *learned]
        return outputs, torch.autograd.grad(outputs, learn, gradients, allow_unused=True)

    return step


def _leaf(value):
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value


def _learns(value) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def model_call(model: nn.Module, setting: Setting) -> Call:
    """A step: forward or, in training, forward and backward."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    starts: list[Tensor] = []

    def step(_: int):
        outputs = setting.outputs(model, setting.training)
        if not setting.training:
            return outputs
        if not starts:
            starts.extend(torch.ones_like(output) for output in outputs)
        return torch.autograd.grad(outputs, learned, starts, allow_unused=True)

    return step


def sample_models(
    models: dict[str, nn.Module], setting: Setting, captured: bool = False
) -> dict[str, Times]:
    """Times of a step of each model. `captured`: some are CUDA graphs already, which cannot be
    captured again, so that only wall time compares them."""
    calls = {name: model_call(model, setting) for name, model in models.items()}
    effort = replace(_MODEL_EFFORT[setting.device], gpu=not captured)
    return sample(calls, 1, setting.device, effort)


def sample(calls: dict[str, Call], buffers: int, device: str, effort: Effort) -> dict[str, Times]:
    """Interleaved samples of all calls: wall time and, on a GPU, peak memory and, if all of them
    can be captured, GPU time."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
    peaks: dict[str, int | None] = dict.fromkeys(calls)

    def take(clock: str, timers: dict[str, Callable[[], float]]) -> None:
        for name, samples in interleave(timers, effort.rounds, effort.budget).items():
            found[name][clock] = samples

    take(WALL, {name: LoopTimer(call, buffers, device) for name, call in calls.items()})
    if device == "cuda":
        for name, call in calls.items():
            peaks[name] = peak_bytes(call)
        torch.cuda.empty_cache()
        if effort.gpu and not any(map(_waits_for_the_gpu, calls.values())):
            shortest = min(median(times[WALL]) for times in found.values())
            count = min(_MOST_GRAPH_CALLS, ceil(_GRAPH_US / shortest))
            try:
                graphs = {name: GraphTimer(call, buffers, count) for name, call in calls.items()}
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # it cannot be captured; wall time then decides alone
                graphs = {}
            take(GPU, graphs)
    return {name: Times(samples, peaks[name]) for name, samples in found.items()}


def _waits_for_the_gpu(call: Call) -> bool:
    """Whether a call makes the host wait, which a graph cannot capture. A capture that fails may
    leave torch's allocator in a bad state."""
    try:
        with waiting_is_an_error():
            call(0)
    except WaitsForTheGpu:
        return True
    return False
