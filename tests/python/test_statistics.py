"""Verdicts on known distributions: no figure here comes from a clock."""

import random

import pytest

from fusewise.bench.statistics import ratio_of_sums, summary

# As many samples as a quick row has, with noise of the size that a quiet machine shows.
SAMPLES, NOISE, TRIALS = 15, 0.02, 200


def draw(rng, centre, spread=NOISE, stray=0.1):
    """Times around `centre`; as on a machine, now and then one that something else delayed."""
    return [
        centre * (1 + rng.gauss(0, spread)) * (1.5 if rng.random() < stray else 1)
        for _ in range(SAMPLES)
    ]


def verdicts(difference):
    rng = random.Random(7)
    pairs = ((draw(rng, 100 * difference), draw(rng, 100)) for _ in range(TRIALS))
    return [ratio_of_sums([(1, baseline, ours)]).verdict for baseline, ours in pairs]


def test_no_difference_is_the_same_at_the_stated_rate():
    """95 %; of 200 trials fewer than 181 would come by chance once in a thousand times."""
    assert verdicts(1.0).count("same") >= 181


@pytest.mark.parametrize("difference, verdict", [(1.05, "faster"), (1 / 1.05, "slower")])
def test_a_difference_of_five_percent_is_found(difference, verdict):
    found = verdicts(difference)
    assert found.count(verdict) >= 0.9 * TRIALS
    assert found.count("slower" if verdict == "faster" else "faster") == 0


@pytest.mark.parametrize(
    ("baseline", "ours", "verdict"),
    [
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2], "faster"),
        ([1.0, 1.1, 1.2], [2.0, 2.1, 2.2], "slower"),
        ([1.0, 1.5, 2.0], [1.1, 1.4, 1.9], "same"),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], "same"),
    ],
)
def test_verdicts(baseline, ours, verdict):
    ratio = ratio_of_sums([(1, baseline, ours)])
    assert ratio.verdict == verdict
    assert ratio.low <= ratio.value <= ratio.high


def test_sums_weigh_every_case_by_its_count():
    ratio = ratio_of_sums([(3, [2.0] * 5, [1.0] * 5), (1, [2.0] * 5, [5.0] * 5)])
    assert ratio.value == pytest.approx((3 * 2 + 2) / (3 * 1 + 5))


def test_a_summary_has_median_and_quartiles():
    found = summary([5.0, 1.0, 4.0, 2.0, 3.0])
    assert found["median"] == 3
    assert found["quartiles"] == [1.5, 4.5]


def test_the_interval_of_a_known_sample():
    """Of 1, 2, ..., 29: the median of a resample is below 10 with 1.6 % and at most 10 with 4.2 %,
    by the binomial distribution, so 10 is where 2.5 % are reached, and 20 from above. An interval
    of 90 % would begin at 11, one of 97.5 % at 9."""
    sample = [float(i) for i in range(1, 30)]
    ratio = ratio_of_sums([(1, sample, [1.0] * 5)])
    assert (ratio.low, ratio.value, ratio.high) == (10, 15, 20)
    ratio = ratio_of_sums([(1, [1.0] * 5, sample)])
    assert (1 / ratio.low, 1 / ratio.value, 1 / ratio.high) == pytest.approx((20, 15, 10))
