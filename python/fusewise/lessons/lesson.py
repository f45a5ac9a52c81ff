"""The parts that every lesson consists of."""

from collections.abc import Callable
from dataclasses import dataclass

from ..bench.measure import GraphTimer, LoopTimer, interleave
from ..bench.statistics import Ratio, median, ratio_of_sums
from ..report import Table

Samples = dict[str, list[float]]
"""Times in µs per call, by name."""


@dataclass(frozen=True)
class Finding:
    table: Table
    lines: list[str]
    """The conclusion from the figures, in words."""
    seen: bool
    """Whether these samples show the effect that the lesson is about."""


@dataclass(frozen=True)
class Lesson:
    title: str
    measure: Callable[[str], Samples]
    """Measures on a device."""
    conclude: Callable[[Samples, str], Finding]
    """Takes only the samples and the device, so that it can be tested without measuring."""


def sample(calls: dict[str, Callable[[], object]], device: str) -> Samples:
    """Interleaved samples: GPU time on a GPU, wall time on a CPU."""

    def timer(call):
        def indexed(_):
            return call()

        return GraphTimer(indexed, 1) if device == "cuda" else LoopTimer(indexed, 1, device)

    return interleave({name: timer(call) for name, call in calls.items()}, 15, 1.0)


def ratio(samples: Samples, slow: str, fast: str) -> Ratio:
    """The time of `slow` divided by the time of `fast`."""
    return ratio_of_sums([(1, samples[slow], samples[fast])])


def table(title: str, samples: Samples, unit: str = "", work: float = 0) -> Table:
    """One row per name: the median and, in `unit`, how much of `work` is done per µs."""
    medians = {name: median(times) for name, times in samples.items()}
    rows = [
        [name, f"{us:.0f}" if us >= 1000 else f"{us:.3g}", *([f"{work / us:.3g}"] if unit else [])]
        for name, us in medians.items()
    ]
    return Table(title, ["", "µs a call", *([unit] if unit else [])], rows)


def interval(found: Ratio) -> str:
    return f"{found.value:.2f} times (95 % interval {found.low:.2f} to {found.high:.2f})"
