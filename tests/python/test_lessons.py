"""Each lesson concludes what its samples say, and says so where the effect is not there."""

from pathlib import Path

import pytest
import torch

from fusewise import cli, lessons
from fusewise.bench.families.linear_act import naive_linear_relu
from fusewise.bench.naive import naive_library
from fusewise.lessons import LESSONS, amdahl, packing

ROOT = Path(__file__).parents[2]


def times(**medians):
    return {name: [us * (1 + 0.001 * i) for i in range(5)] for name, us in medians.items()}


def conclude(name, device, *medians):
    """From the medians of what the lesson times, in its order."""
    module = LESSONS[name]
    named = {
        "asynchronous": ("timed without waiting", "timed to its end"),
        "naive-gemm": ("a loop per output", "the vendor's product, then relu", "fusewise"),
        "amdahl": (amdahl._PART, amdahl._FAST_PART, amdahl._WHOLE, amdahl._FAST_WHOLE),
        "layout": ("NCHW (contiguous)", "NHWC (channels_last)"),
        "packing": (packing._LIST, packing._PACKED, packing._GROUPED),
        "cold-cache": ("one buffer over and over", "buffers in turn, 3 times the cache"),
    }[name]
    return module.conclude(times(**dict(zip(named, medians, strict=True))), device)


@pytest.mark.parametrize(
    "name, where, medians, seen, said",
    [
        ("asynchronous", "cpu", (10, 10), False, "On a CPU this mistake is not possible"),
        ("naive-gemm", "cpu", (700, 10, 9), True, "The loop takes 70.00 times"),
        ("naive-gemm", "cpu", (10, 10, 10), False, "not faster here"),
        (
            "amdahl",
            "cpu",
            (40, 10, 100, 70),
            True,
            "predicts 1.43 times for the whole, and 1.67 times if",
        ),
        ("amdahl", "cpu", (40, 20, 100, 25), False, "something else changed too"),
        ("layout", "cuda", (20, 10), True, "In NCHW it takes 2.00 times"),
        ("layout", "cpu", (10, 10), False, "This machine does not show the effect"),
        ("layout", "cpu", (10, 20), False, "NCHW takes less time"),
        ("packing", "cpu", (10, 15, 12), True, "do not make up for the copies"),
        ("packing", "cpu", (10, 15, 5), True, "stays packed and is never copied"),
        ("packing", "cpu", (10, 10, 12), False, "This machine does not show the effect"),
        ("cold-cache", "cpu", (10, 40), True, "From memory it takes 4.00 times"),
        ("cold-cache", "cpu", (10, 10), False, "This machine does not show the effect"),
    ],
)
def test_conclusions(name, where, medians, seen, said):
    found = conclude(name, where, *medians)
    assert found.seen == seen
    assert said in " ".join(found.lines)


def test_without_waiting_a_gpu_looks_fast():
    found = conclude("asynchronous", "cuda", 5, 500)
    assert found.seen and "100.00 times" in found.lines[0] and "launch" in found.lines[0]
    assert not conclude("asynchronous", "cuda", 5, 5).seen


@pytest.mark.parametrize("name", LESSONS)
def test_every_lesson_runs(name, device, capsys):
    if name == "naive-gemm" and naive_library(device) is None:
        pytest.skip("this build has no naive kernels")
    assert cli.main(["lesson", name, "--device", device]) == 0
    assert "µs a call" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, devices", [("naive-gemm", ("cpu", "cuda")), ("asynchronous", ("cuda",))]
)
def test_where_an_effect_cannot_be_missed_it_is_seen(name, devices, device):
    """By its verdict, not by a figure: in these, one is many times the other."""
    if device not in devices or (name == "naive-gemm" and naive_library(device) is None):
        pytest.skip(f"not there on {device}")
    assert lessons.run(name, device).seen


def test_the_naive_product_is_a_product(device):
    if naive_library(device) is None:
        pytest.skip("this build has no naive kernels")
    left, right = torch.randn(5, 7, device=device), torch.randn(7, 3, device=device)
    bias = torch.randn(right.shape[1], device=device)
    y = naive_linear_relu(left, right.T.contiguous(), bias)
    torch.testing.assert_close(y, (left @ right + bias).relu())


def test_the_list_and_the_pages(capsys):
    assert cli.main(["lesson"]) == 0
    shown = capsys.readouterr().out
    for name, lesson in LESSONS.items():
        assert name in shown and lesson.title in shown
        if (ROOT / "docs").is_dir():
            assert (
                f"fusewise lesson {name}" in (ROOT / "docs" / "lessons" / f"{name}.md").read_text()
            )
