"""Medians, spread, and bootstrap intervals that decide whether a difference is significant."""

import random
from dataclasses import dataclass
from statistics import median, quantiles

_RESAMPLES = 1000


def summary(samples: list[float]) -> dict:
    """Median and quartiles, and all samples, so that runs can be compared later."""
    low, _, high = quantiles(samples, n=4)
    return {
        "median": median(samples),
        "quartiles": [low, high],
        "samples": [round(sample, 4) for sample in samples],
    }


@dataclass(frozen=True)
class Ratio:
    """The baseline's time divided by ours: above 1, ours is faster."""

    value: float
    low: float
    high: float
    """`low` and `high` bound the 95 % interval."""

    @property
    def verdict(self) -> str:
        """Faster or slower only if the whole interval lies on one side of 1; otherwise the same."""
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "same"

    def as_dict(self) -> dict:
        return {
            "ratio": self.value,
            "interval": [self.low, self.high],
            "verdict": self.verdict,
        }


def ratio_of_sums(terms: list[tuple[int, list[float], list[float]]]) -> Ratio:
    """Ratio of Σ count · median(baseline) to Σ count · median(ours), with a bootstrap interval.

    Each term is (count, samples of the baseline, samples of ours); one term gives a plain ratio.
    """
    rng = random.Random(0)  # fixed seed: the same samples always give the same verdict

    def ratio(pick) -> float:
        baseline = sum(count * median(pick(theirs)) for count, theirs, _ in terms)
        return baseline / sum(count * median(pick(ours)) for count, _, ours in terms)

    resampled = sorted(ratio(lambda s: rng.choices(s, k=len(s))) for _ in range(_RESAMPLES))
    edge = _RESAMPLES // 40
    return Ratio(ratio(lambda s: s), resampled[edge], resampled[-edge - 1])
