"""What the benchmark makes of times, where the times are known: floors, ceilings, buffers, sums."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from fusewise import bench
from fusewise.bench import floor, measure, report, runner
from fusewise.bench.baselines import caller
from fusewise.bench.cases import select
from fusewise.bench.families import FAMILIES
from fusewise.bench.families.family import BOTH, FORWARD, STEP, Case
from fusewise.bench.progress import Progress
from results import gpu_results

# By family: a case, and by mode the elements that move and the operations, counted by hand.
COUNTED = {
    # x has 12 elements, w 15, y 20. Backward reads dy, x and w, writes dx and dw.
    "linear_act": (
        {"shape": [4, 3, 5], "activation": "gelu"},
        {FORWARD: (12 + 15 + 20, 120), BOTH: (47 + 20 + 12 + 15 + 12 + 15, 360)},
    ),
    # Two layers, 3 to 4 and 4 to 5, of two rows; the hidden values are written and read.
    "mlp": (
        {"shape": [2, 3, 4, 5], "activation": "gelu"},
        {FORWARD: (6 + 12 + 8 + 8 + 20 + 10, 128), BOTH: (64 + 44 + 66, 384)},
    ),
    # 120 elements of x; 17 of weights and biases.
    "squeeze_excite": (
        {"shape": [2, 3, 4, 5], "reduced": 2},
        {FORWARD: (120 + 120 + 17, 288), BOTH: (257 + 3 * 120 + 2 * 17, 864)},
    ),
    # Two rows of 3 frames of 4 values; 97 weights; 60 + 30 + 4 + 30 + 60 products in a row.
    "autoencoder": (
        {"shape": [2, 3, 4], "latent": 2, "slice_latent": 5, "output": "reconstruction"},
        {FORWARD: (24 + 24 + 97, 736), BOTH: (145 + 72 + 2 * 97, 3 * 736)},
    ),
}


def test_every_family_is_counted():
    assert COUNTED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_floors_by_hand(name, dtype):
    entry, modes = COUNTED[name]
    extra = {key: value for key, value in entry.items() if key != "shape"}
    case = Case(name, "", tuple(entry["shape"]), dtype, extra=extra)
    for mode, (elements, operations) in modes.items():
        assert FAMILIES[name].bytes_moved(case, mode) == elements * case.dtype.itemsize
        assert FAMILIES[name].operations(case, mode) == operations


@pytest.mark.parametrize(
    "output, mode, elements, operations",
    [
        ("score", FORWARD, 24 + 2 + 97, 736),
        ("score", BOTH, 123 + 2 * 24 + 2 + 2 * 97, 3 * 736),
        # x is read once, and nobody wants its gradient.
        ("mse_loss", STEP, 24 + 2 * 97, 3 * 736 - 2 * 2 * 60),
    ],
)
def test_floors_of_the_autoencoders_other_outputs(output, mode, elements, operations):
    extra = {"latent": 2, "slice_latent": 5, "output": output}
    case = Case("autoencoder", "", (2, 3, 4), "float32", extra=extra)
    assert FAMILIES["autoencoder"].bytes_moved(case, mode) == 4 * elements
    assert FAMILIES["autoencoder"].operations(case, mode) == operations


# --- ceilings and times, with a fake timer ------------------------------------------------------

COPY_US, KERNEL_US = 400.0, 100.0
PRODUCT_US = {torch.float32: 50.0, torch.float64: 200.0, torch.bfloat16: 25.0, torch.float16: 80.0}
BANDWIDTH = 2 * (1 << 28) / (KERNEL_US * 1e-6)  # the faster of the two, read and written


def rate(dtype):
    return 2 * 1024**3 / (PRODUCT_US[dtype] * 1e-6)


@pytest.fixture
def fake_machine(monkeypatch):
    """A machine whose copies, products and calls take known times."""
    copies = itertools.cycle([COPY_US, KERNEL_US])

    def timer(call, device):
        result = call(0)
        us = next(copies) if result.dim() == 1 else PRODUCT_US[result.dtype]
        return lambda: us

    monkeypatch.setattr(floor, "_timer", timer)
    monkeypatch.setattr(torch, "mm", lambda left, right, out: out)  # nobody looks at the values


def test_ceilings_are_the_fastest_copy_and_the_products(fake_machine):
    found = floor.measure_ceilings("cpu", {"float64", "bfloat16", "float16"})
    assert found.bytes_per_second == pytest.approx(BANDWIDTH)
    expected = {
        "float32": rate(torch.float32),
        "float64": rate(torch.float64),
        "bfloat16": rate(torch.bfloat16),
        "float16": rate(torch.float32),  # may be computed in float32, which is faster here
    }
    assert found.operations_per_second == pytest.approx(expected)


@pytest.mark.parametrize("name", COUNTED)
def test_a_row_of_every_family(monkeypatch, tmp_path, name):
    """Ours takes 10 µs, eager 30; the floor is what such a machine needs for the counts."""
    ceilings = floor.Ceilings(BANDWIDTH, {"float32": rate(torch.float32)})

    class Timer:
        made = 0

        def __init__(self, call, buffers, device):
            call(buffers - 1)
            self._us = (10.0, 30.0)[Timer.made % 2]
            Timer.made += 1

        def __call__(self):
            return self._us

    def without_compiler(workload, baselines):
        return {who: workload.functions[who] for who in ("fusewise", *baselines)}

    monkeypatch.setattr(runner, "LoopTimer", Timer)
    monkeypatch.setattr(runner, "functions", without_compiler)
    monkeypatch.setattr(floor, "measure_ceilings", lambda device, dtypes: ceilings)
    monkeypatch.setattr(runner, "keep_memory", lambda: None)
    monkeypatch.setattr(floor, "cache_bytes", lambda device: 1000)
    entry, modes = COUNTED[name]
    file = tmp_path / "cases.json"
    entry = entry | {"name": "small", "dtype": "float32"}
    file.write_text(json.dumps({"family": name, "cases": [entry]}))
    options = bench.Options((name,), "cpu", baselines=("eager",), cases=file)
    results = bench.run(options, Progress())
    assert [row["mode"] for row in results["rows"]] == list(modes)
    for row, (elements, operations) in zip(results["rows"], modes.values(), strict=True):
        times = {
            "bytes": 4 * elements / BANDWIDTH * 1e6,
            "operations": operations / rate(torch.float32) * 1e6,
        }
        assert row["floor"]["us"] == pytest.approx(max(times.values()))
        assert times[row["floor"]["bound"]] == max(times.values())
        assert row["contenders"]["fusewise"]["wall"]["median"] == 10
        assert row["against"]["eager"]["wall"]["ratio"] == pytest.approx(3)
        assert row["against"]["eager"]["wall"]["verdict"] == "faster"


# --- buffers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cache, buffers",
    [
        (100, 2),  # 300 bytes in all, of 188 each
        (1000, 16),
        (1 << 20, 64),  # no more than that
    ],
)
def test_buffers_are_three_times_the_cache(monkeypatch, cache, buffers):
    monkeypatch.setattr(floor, "cache_bytes", lambda device: cache)
    case = Case("linear_act", "", (4, 3, 5), "float32", extra={"activation": "relu"})
    family = FAMILIES["linear_act"]
    assert runner._buffers(family, case, "cuda") == buffers
    monkeypatch.setattr(runner, "_CPU_BUFFER_BYTES", 3 * 188 + 1)
    assert runner._buffers(family, case, "cpu") == min(buffers, 3)
    monkeypatch.setattr(runner, "_CPU_BUFFER_BYTES", 1)
    assert runner._buffers(family, case, "cpu") == 1


def test_a_loop_takes_the_buffers_in_turn(monkeypatch):
    clock = itertools.count(step=0.001)  # a millisecond between any two looks
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    seen = []
    timer = measure.LoopTimer(seen.append, 3, "cpu")
    seen.clear()
    us = timer()
    assert seen == [i % 3 for i in range(len(seen))]
    assert len(seen) == 30  # a call took 1/3 ms in the loop of three: 30 are a sample of 10 ms
    assert us == pytest.approx(1000 / 30)


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_every_buffer_has_data_of_its_own(name, mode):
    entry, _ = COUNTED[name]
    extra = {key: value for key, value in entry.items() if key != "shape"}
    case = Case(name, "", tuple(entry["shape"]), "float32", extra=extra)
    workload = FAMILIES[name].build(case, "cpu", 3)
    tensors = [t for inputs in workload.inputs for t in inputs] + workload.gradients
    assert len({t.data_ptr() for t in tensors}) == len(tensors) == 6
    call = caller(workload.functions["eager"], workload, mode)
    for i in range(3):
        inputs = (*workload.inputs[i], *workload.weights)
        y = workload.functions["eager"](*inputs)
        expected = (y,)
        if mode == BOTH:
            expected += torch.autograd.grad(y, inputs, workload.gradients[i])
        for found, right in zip(call(i), expected, strict=True):
            assert torch.equal(found, right)


def test_timers_take_turns_and_keep_to_their_budget(monkeypatch):
    now = 0.0
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now))
    seen = []

    def timer(name, seconds):
        def sample():
            nonlocal now
            now += seconds
            seen.append(name)
            return seconds

        return sample

    timers = {"a": timer("a", 0.0), "b": timer("b", 1.0), "c": timer("c", 0.0)}
    samples = measure.interleave(timers, rounds=7, budget=2.5)
    assert "".join(seen) == "abc" + "bca" + "cab" + "abc" + "bca" + "ca" + "ac"
    assert {name: len(found) for name, found in samples.items()} == {"a": 7, "b": 5, "c": 7}


# --- sums ---------------------------------------------------------------------------------------


def blocks():
    return select("squeeze_excite", "cuda", "quick", "b4-*")


def test_a_sum_weighs_rows_by_their_counts():
    results = gpu_results()
    for i, row in enumerate(results["rows"]):
        row["floor"] |= {"us": float(i), "bytes": i, "operations": 2 * i}
    (total,) = runner.sums(results["rows"], blocks())
    weighed = sum(i * row["count"] for i, row in enumerate(results["rows"]))
    assert total["floor"] == {"us": weighed, "bytes": weighed, "operations": 2 * weighed}
    assert total["cases"] == len(results["rows"])


@pytest.mark.parametrize("missing", ["absent", "failed"])
def test_an_incomplete_group_has_no_sum(missing):
    """A sum without one of its parts would be a smaller number, and look like a better one."""
    results = gpu_results()
    if missing == "absent":
        results["rows"].pop()
    else:
        failed = results["rows"][3]
        for key in ("check", "implementation", "contenders", "against"):
            del failed[key]
        failed["failed"] = "out of memory"
    results["sums"] = list(runner.sums(results["rows"], blocks()))
    assert results["sums"] == []
    assert "sum of" not in report.markdown(results)


def test_a_baseline_that_a_row_lacks_is_in_no_sum():
    results = gpu_results()
    del results["rows"][2]["against"]["compile"]
    (total,) = runner.sums(results["rows"], blocks())
    assert set(total["against"]) == {"eager"}
    assert set(total["contenders"]) == {"fusewise", "eager"}
