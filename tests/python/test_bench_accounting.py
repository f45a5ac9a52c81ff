"""What the benchmark makes of times, where the times are known: floors, ceilings, buffers, sums."""

import dataclasses
import itertools
import json
import weakref
from types import SimpleNamespace

import pytest
import torch

from fusewise import bench
from fusewise.bench import floor, measure, report, runner, schema, yardsticks
from fusewise.bench.baselines import caller
from fusewise.bench.cases import select
from fusewise.bench.families import FAMILIES
from fusewise.bench.families.family import BOTH, FORWARD, STEP, Case, Traffic
from fusewise.bench.naive import naive_library
from fusewise.bench.progress import Progress
from results import gpu_results

# By family: a case, and by mode the elements of data, of weights and of what backward reads again,
# and the operations, counted by hand.
COUNTED = {
    # x has 12 elements, w 15, y 20. Backward has dy, dx and dw, and reads x and w again.
    "linear_act": (
        {"shape": [4, 3, 5], "activation": "gelu"},
        {
            FORWARD: (12 + 20, 15, 0, 2 * 60),
            BOTH: (12 + 20 + 20 + 12 + 15, 15, 12 + 15, 3 * 2 * 60),
        },
    ),
    # Two layers, 3 to 4 and 4 to 5, of two rows; the hidden values need not leave the chip.
    "mlp": (
        {"shape": [2, 3, 4, 5], "activation": "gelu"},
        {
            FORWARD: (6 + 10, 12 + 20, 0, 2 * 2 * 32),
            BOTH: (6 + 10 + 10 + 6 + 32, 32, 6 + 32, 3 * 2 * 2 * 32),
        },
    ),
    # 120 elements of x; 17 of weights and biases; products of 2 samples, 3 channels and 2 units.
    # Forward: the sum over pixels, both layers, the scaling. Backward: the sum of dy * x, four
    # products, dy * g + dp.
    "squeeze_excite": (
        {"shape": [2, 3, 4, 5], "reduced": 2},
        {
            FORWARD: (120 + 120, 17, 0, 120 + 2 * 24 + 120),
            BOTH: (4 * 120 + 17, 17, 120 + 17, 288 + 240 + 4 * 24 + 240),
        },
    ),
    # Two rows of 3 frames of 4 values; 97 weights. Multiplications in a row: 60 to encode, 30 to
    # project, 4 between, and 24 to decode, folded (90 through the slices). Backward has twice
    # those, and twice 120 a call from the folded gradient to those of decoder and basis.
    "autoencoder": (
        {"shape": [2, 3, 4], "latent": 2, "slice_latent": 5, "output": "reconstruction"},
        {
            FORWARD: (24 + 24, 97, 0, 2 * 2 * (60 + 30 + 4 + 24)),
            BOTH: (4 * 24 + 97, 97, 24 + 97, 2 * (3 * 2 * 118 + 2 * 120)),
        },
    ),
}


def counted_case(name, dtype="float32", **changes):
    entry = COUNTED[name][0] | changes
    extra = {key: value for key, value in entry.items() if key != "shape"}
    return Case(name, "", tuple(entry["shape"]), dtype, extra=extra)


def test_every_family_is_counted():
    assert COUNTED.keys() | {"batch_norm_act", "batch_norm_excite"} == FAMILIES.keys()


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2), ("float64", 8)])
def test_floors_by_hand(name, dtype, size):
    case = counted_case(name, dtype)
    for mode, (data, weights, again, operations) in COUNTED[name][1].items():
        expected = Traffic(size * data, size * weights, size * again)
        assert FAMILIES[name].traffic(case, mode) == expected
        assert FAMILIES[name].operations(case, mode) == operations


@pytest.mark.parametrize("dtype, size, wide", [("float32", 4, 4), ("bfloat16", 2, 4)])
def test_floors_of_batch_norm(dtype, size, wide):
    """An image has 120 elements, each of the four parameters 3, in float32 beside half."""
    family, weights = FAMILIES["batch_norm_act"], 4 * 3 * wide
    for activation, residual, images, operations in (
        ("relu", "none", (2, 4), (6, 13)),  # x, y; dy, dx
        ("relu", "add", (3, 6), (7, 14)),  # the residual and its gradient
        ("identity", "add", (3, 5), (7, 14)),  # the residual's gradient is dy
    ):
        extra = {"activation": activation, "residual": residual}
        case = Case("batch_norm_act", "", (2, 3, 4, 5), dtype, extra=extra)
        image = 120 * size
        assert family.traffic(case, FORWARD) == Traffic(images[0] * image, weights)
        expected = Traffic(images[1] * image + weights, weights, image + weights)
        assert family.traffic(case, BOTH) == expected
        assert family.operations(case, FORWARD) == 120 * operations[0]
        assert family.operations(case, BOTH) == 120 * operations[1]


def test_floors_of_batch_norms_variants():
    """x has 120 elements of 2 bytes, y after a max-pool 2 * 3 * 2 * 3."""
    family, weights = FAMILIES["batch_norm_act"], 4 * 3 * 4
    extra = {"activation": "relu", "residual": "none", "variant": "max-pool"}
    pool = Case("batch_norm_act", "", (2, 3, 4, 5), "float16", extra=extra)
    assert family.modes(pool) == (FORWARD, BOTH)
    assert family.traffic(pool, FORWARD) == Traffic(2 * (120 + 36), weights)
    expected = Traffic(2 * (120 + 36 + 36 + 120) + weights, weights, 2 * 120 + weights)
    assert family.traffic(pool, BOTH) == expected  # x, y; dy, dx
    assert family.operations(pool, FORWARD) == 120 * 6
    assert family.operations(pool, BOTH) == 120 * 6 + 36 * 3 + 120 * 4
    extra = {"activation": "relu", "residual": "add", "variant": "inference"}
    inference = dataclasses.replace(pool, extra=extra)
    assert family.modes(inference) == (FORWARD,)
    assert family.traffic(inference, FORWARD) == Traffic(3 * 240, weights)  # x, residual, y
    assert family.operations(inference, FORWARD) == 120 * 3


@pytest.mark.parametrize("dtype, size, wide", [("float32", 4, 4), ("bfloat16", 2, 4)])
def test_floors_of_batch_norm_and_excitation(dtype, size, wide):
    """An image has 120 elements. Parameters, in float32 beside half: 4 of 3 elements for the norm,
    17 for the excitation, whose products are those of 2 samples, 3 channels and 2 units."""
    functions = {"activation": "silu", "hidden_activation": "silu", "gate": "sigmoid"}
    extra = {"reduced": 2, **functions}
    family, weights, image = FAMILIES["batch_norm_excite"], 29 * wide, 120 * size
    case = Case("batch_norm_excite", "", (2, 3, 4, 5), dtype, extra=extra)
    assert family.modes(case) == (FORWARD, BOTH)
    assert family.traffic(case, FORWARD) == Traffic(2 * image, weights)  # x, y
    expected = Traffic(4 * image + weights, weights, image + weights)  # dy, dx; x again
    assert family.traffic(case, BOTH) == expected
    # Statistics, scale and shift, the mean, the scaling. Backward: the gradient of the gates, of
    # the activated values, the sums of the norm, dx.
    assert family.operations(case, FORWARD) == 120 * (4 + 2 + 1 + 1) + 2 * 24
    backward = 120 * (2 + 2 + 3 + 4) + 4 * 24
    assert family.operations(case, BOTH) == family.operations(case, FORWARD) + backward
    inference = dataclasses.replace(case, extra=extra | {"variant": "inference"})
    assert family.modes(inference) == (FORWARD,)
    assert family.operations(inference, FORWARD) == 120 * (2 + 1 + 1) + 2 * 24


@pytest.mark.parametrize(
    "output, mode, expected, operations",
    [
        # Scores are float32 where x is of half the size.
        ("score", FORWARD, Traffic(2 * 24 + 4 * 2, 2 * 97), 472),
        ("score", BOTH, Traffic(2 * 48 + 4 * 4 + 2 * 97, 2 * 97, 2 * (24 + 97)), 1896),
        # x is read once, and nobody wants its gradient: 60 products in a row.
        ("mse_loss", STEP, Traffic(2 * (24 + 97), 2 * 97), 1896 - 2 * 2 * 60),
        ("mean_score", STEP, Traffic(2 * (24 + 97), 2 * 97), 1896 - 2 * 2 * 60),
    ],
)
def test_floors_of_the_autoencoders_other_outputs(output, mode, expected, operations):
    case = counted_case("autoencoder", "bfloat16", output=output)
    assert FAMILIES["autoencoder"].traffic(case, mode) == expected
    assert FAMILIES["autoencoder"].operations(case, mode) == operations


DEFAULT = {"latent": 32, "slice_latent": 64}


@pytest.mark.parametrize(
    "shape, sizes, mode, multiplications",
    [
        # The model's own sizes: 20480 to encode, 10240 to project, 1024, 10240 to decode.
        ([7, 5, 64], DEFAULT, FORWARD, 7 * 41984),
        ([7000, 5, 64], DEFAULT, BOTH, 3 * 7000 * 41984 + 2 * 5 * 64 * 64 * 32),
        ([7000, 5, 64], DEFAULT, STEP, 7000 * (3 * 41984 - 20480) + 2 * 5 * 64 * 64 * 32),
        # One row: y and dz are folded, the gradients of weights go through the slices, 5 * 64 * 96
        # for decoder and basis each.
        ([1, 5, 64], DEFAULT, BOTH, 3 * 31744 + 2 * 10240 + 2 * 30720),
        # A latent larger than all the rest: nothing is folded, 2 * (3 + 100) * 4 to decode.
        ([9, 2, 4], {"latent": 100, "slice_latent": 3}, FORWARD, 9 * (24 + 600 + 10000 + 624)),
        ([9, 2, 4], {"latent": 100, "slice_latent": 3}, BOTH, 9 * 3 * (24 + 600 + 10000 + 624)),
    ],
)
def test_the_autoencoders_operations_are_the_fewest(shape, sizes, mode, multiplications):
    output = "mse_loss" if mode == STEP else "reconstruction"
    case = counted_case("autoencoder", shape=shape, output=output, **sizes)
    assert FAMILIES["autoencoder"].operations(case, mode) == 2 * multiplications


# --- ceilings and times, with a fake timer ------------------------------------------------------


class FakeYardsticks:
    """1 GB/s and 2 GFLOP/s at first, three times that later."""

    def __init__(self, device, dtypes):
        self.moments = 1

    def sample(self):
        self.moments = 3

    def ceilings(self):
        return floor.Ceilings(self.moments * 1e9, {"float32": self.moments * 2e9})


@pytest.fixture
def fake_run(monkeypatch, tmp_path):
    """Runs one small case of a family; ours takes as long as `us` says, eager three times that."""

    def run(name, us):
        made = itertools.count()

        class Timer:
            def __init__(self, call, buffers, device):
                call(buffers - 1)
                self._us = us * (1, 3)[next(made) % 2]

            def __call__(self):
                return self._us

        def without_compiler(workload, baselines):
            return {who: workload.functions[who] for who in ("fusewise", *baselines)}

        monkeypatch.setattr(runner, "LoopTimer", Timer)
        monkeypatch.setattr(runner, "functions", without_compiler)
        monkeypatch.setattr(runner, "Yardsticks", FakeYardsticks)
        monkeypatch.setattr(runner, "keep_memory", lambda: None)
        monkeypatch.setattr(floor, "cache_bytes", lambda device: 100)
        file = tmp_path / "cases.json"
        entry = COUNTED[name][0] | {"name": "small", "dtype": "float32"}
        file.write_text(json.dumps({"family": name, "cases": [entry]}))
        options = bench.Options((name,), "cpu", baselines=("eager",), cases=file)
        return bench.run(options, Progress())

    return run


@pytest.mark.parametrize("name", COUNTED)
def test_a_row_of_every_family(fake_run, name):
    """The floor is what the machine needs for the counts by its last, best moment."""
    results = fake_run(name, us=10.0)
    ceilings = results["ceilings"]
    assert ceilings["copy_bytes_per_second"] == 3e9
    assert ceilings["matrix_operations_per_second"] == {"float32": 6e9}
    assert ceilings["raised"] == {}
    modes = COUNTED[name][1]
    assert [row["mode"] for row in results["rows"]] == list(modes)
    for row, counts in zip(results["rows"], modes.values(), strict=True):
        data, weights, again, operations = counts
        # All that exceeds the cache of 100 bytes.
        moved = 4 * data + max(0, 4 * weights - 100) + max(0, 4 * again - 100)
        times = {"bytes": moved / 3e3, "operations": operations / 6e3}
        assert (row["floor"]["bytes"], row["floor"]["operations"]) == (moved, operations)
        assert row["floor"]["touched_bytes"] == 4 * (data + weights)
        assert row["floor"]["us"] == pytest.approx(max(times.values()))
        assert times[row["floor"]["bound"]] == max(times.values())
        assert row["contenders"]["fusewise"]["wall"]["median"] == 10
        assert row["against"]["eager"]["wall"]["ratio"] == pytest.approx(3)
        assert row["against"]["eager"]["wall"]["verdict"] == "faster"
        assert row["host"] is None  # there is one clock only


@pytest.mark.parametrize("name", COUNTED)
def test_no_contender_is_faster_than_the_floor(fake_run, name):
    """Faster than any yardstick: the ceilings are those of the fastest row, and both its rows are
    held against them."""
    us = 0.001
    results = fake_run(name, us)
    shares = [row["floor"]["us"] / us for row in results["rows"]]
    assert max(shares) == pytest.approx(1, rel=1e-6) and all(share <= 1 for share in shares)
    moved, operations = (
        max(row["floor"][key] for row in results["rows"]) for key in ("bytes", "operations")
    )
    ceilings = results["ceilings"]
    assert ceilings["copy_bytes_per_second"] == pytest.approx(moved / 1e-9)
    assert ceilings["matrix_operations_per_second"]["float32"] == pytest.approx(operations / 1e-9)
    said = "fusewise in small forward+backward, wall time"
    assert ceilings["raised"] == {"bytes": said, "float32": said}
    assert not schema.problem(results)


def timed_row(dtype="float32", moved=1000, operations=3000, **contenders):
    """A row with times by contender and clock."""
    return {
        "case": "a",
        "mode": FORWARD,
        "dtype": dtype,
        "floor": {"bytes": moved, "operations": operations},
        "contenders": {
            name: {clock: {"median": us} for clock, us in clocks.items()}
            for name, clocks in contenders.items()
        },
    }


def test_any_contender_by_any_clock_raises_the_ceilings():
    ceilings = floor.Ceilings(1e9, {"float32": 1e9, "float16": 1e9, "float64": 1e9})
    rows = [
        timed_row(fusewise={"gpu": 2.0, "wall": 9.0}, eager={"gpu": 0.5, "wall": 9.0}),
        timed_row("float16", fusewise={"gpu": 4.0, "wall": 2.0}, naive={}),
        {**timed_row("float64"), "failed": "out of memory"},
    ]
    found = floor.set_floors(rows, ceilings)
    assert found.bytes_per_second == pytest.approx(2e9)  # 1000 bytes in 0.5 µs
    rates = {"float32": 6e9, "float16": 6e9, "float64": 1e9}  # half types may take float32's rate
    assert found.operations_per_second == pytest.approx(rates)
    eager = "eager in a forward, gpu time"
    assert found.raised == {"bytes": eager, "float32": eager}
    assert [row["floor"]["us"] for row in rows] == pytest.approx([0.5, 0.5, 3.0])


@pytest.mark.parametrize("us, amount", [(472.196, 1689486), (908.049, 1161), (337.577, 6160619)])
def test_a_share_stays_at_one_in_floating_point(us, amount):
    """Of these, amount / (amount / us) is a bit more than us."""
    row = timed_row(moved=amount, operations=amount, fusewise={"wall": us})
    floor.set_floors([row], floor.Ceilings(1.0, {"float32": 1.0}))
    assert row["floor"]["us"] <= us


# --- yardsticks, with a fake timer --------------------------------------------------------------

MB = 1 << 20
# By way and size, µs of the first samples; the last one stays. A copy of 1 MB reads and writes 2.
FAKE_US = {
    ("_copy", MB): [400.0],
    ("_copy", MB * 3 // 4): [400.0],
    ("_negate", MB): [100.0],
    ("_negate", MB * 3 // 4): [100.0],
    ("_streaming", MB): [90.0],
    ("_streaming", MB * 3 // 4): [80.0, 60.0, 80.0, 50.0, 70.0],
}
PRODUCT_US = {torch.float32: 50.0, torch.float64: 200.0, torch.bfloat16: 25.0, torch.float16: 80.0}


@pytest.fixture
def fake_machine(monkeypatch):
    """A machine whose copies and products take known times; nothing is computed."""
    asked = []

    def fake(name, key):
        monkeypatch.setattr(yardsticks, name, lambda *tensors: (name, key(tensors[0])))

    for name in ("_copy", "_negate"):
        fake(name, lambda tensor: tensor.nbytes)
    for name in ("_torch_product", "_torch_linear", "_ours"):
        fake(name, lambda tensor: (tensor.shape[0], tensor.dtype))
    stream = lambda target, _: ("_streaming", target.nbytes)  # noqa: E731
    monkeypatch.setattr(yardsticks, "_streaming_copy", lambda: stream)
    monkeypatch.setattr(yardsticks, "naive_library", lambda device: True)
    monkeypatch.setattr(yardsticks, "cache_bytes", lambda device: MB)
    monkeypatch.setattr(yardsticks, "_LEAST_COPY", {"cpu": 0})
    monkeypatch.setattr(yardsticks, "_PRODUCT_SIZES", {"cpu": (2, 4, 8, 16)})

    def timer(call, device):
        way, key = call(0)
        if way in ("_copy", "_negate", "_streaming"):
            times = iter(FAKE_US[way, key])
            last = FAKE_US[way, key][-1]
            return lambda: asked.append((way, key)) or next(times, last)
        size, dtype = key
        us = PRODUCT_US[dtype] * (size / 4) ** 3 * {"_torch_product": 2}.get(way, 1)
        if way == "_ours" and size == 4:
            us /= 2  # the best of all
        return lambda: asked.append((way, *key)) or us

    monkeypatch.setattr(yardsticks, "_timer", timer)
    return asked


def test_ceilings_are_the_best_of_all_ways_and_sizes(fake_machine):
    found = yardsticks.measure_ceilings("cpu", {"float64", "bfloat16", "float16"})
    assert found.bytes_per_second == pytest.approx(1.5 * MB / 60e-6)  # the best of three samples

    def rate(dtype):
        return 2 * 4**3 / (PRODUCT_US[dtype] / 2 * 1e-6)

    expected = {
        "float32": rate(torch.float32),
        "float64": rate(torch.float64),
        "bfloat16": rate(torch.bfloat16),
        "float16": rate(torch.float32),  # may be computed in float32, which is faster here
    }
    assert found.operations_per_second == pytest.approx(expected)


def test_ceilings_rise_at_a_better_moment_and_never_fall(fake_machine):
    found = yardsticks.Yardsticks("cpu", set())
    assert found.ceilings().bytes_per_second == pytest.approx(1.5 * MB / 60e-6)
    for us in (50, 50):
        fake_machine.clear()
        found.sample()
        # Only the best of each: this is done between all cases.
        assert fake_machine == [("_streaming", MB * 3 // 4), ("_ours", 4, torch.float32)]
        assert found.ceilings().bytes_per_second == pytest.approx(1.5 * MB / (us * 1e-6))


def test_larger_products_while_a_call_is_short(monkeypatch, fake_machine):
    """At 8 float32 takes 400 µs by us and torch's linear, at 16 3200; float64 1600 at 8."""
    yardsticks.Yardsticks("cpu", {"float64"})
    sizes = {dtype: set() for dtype in (torch.float32, torch.float64)}
    for _, size, dtype in (asked for asked in fake_machine if len(asked) == 3):
        sizes[dtype].add(size)
    assert sizes[torch.float32] == sizes[torch.float64] == {2, 4, 8, 16}
    monkeypatch.setattr(yardsticks, "_LONG_US", 1000)
    fake_machine.clear()
    yardsticks.Yardsticks("cpu", {"float64"})
    assert ("_ours", 16, torch.float32) in fake_machine
    assert ("_ours", 16, torch.float64) not in fake_machine
    monkeypatch.setattr(yardsticks, "_LONG_US", 0)
    fake_machine.clear()
    yardsticks.Yardsticks("cpu", set())
    assert {asked[1] for asked in fake_machine if len(asked) == 3} == {2, 4}  # at least two


@pytest.mark.parametrize("threads", [1, 3])
def test_the_copy_with_non_temporal_stores_copies(monkeypatch, threads):
    if naive_library("cpu") is None:
        pytest.skip("this build has no naive kernels")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    source = torch.randn(16 * 101)
    target = torch.zeros_like(source)
    yardsticks._streaming_copy()(target, source)
    assert torch.equal(target, source)


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
    timer = measure.LoopTimer(seen.append, 7, "cpu")
    assert len(seen) == 7 + 3  # every buffer is warm; then it is estimated how long a call takes
    for _ in range(3):
        before = len(seen)
        us = timer()
        # A call took 1/3 ms in the loop of three: 30 are a sample of 10 ms.
        assert len(seen) - before == 30
        assert us == pytest.approx(1000 / 30)
    assert seen == [i % 7 for i in range(len(seen))]  # across samples, too


def test_outputs_live_until_their_buffers_turn_comes_again():
    """Freed at once, every call would write to the same memory, which then stays in the cache."""
    alive = weakref.WeakSet()
    most = 0

    class Output:
        pass

    def call(_):
        nonlocal most
        output = Output()
        alive.add(output)
        most = max(most, len(alive))
        return output

    timer = measure.LoopTimer(call, 3, "cpu")
    timer()
    assert most == len(alive) == 3
    del timer
    assert not alive


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("mode", [FORWARD, BOTH])
def test_every_buffer_has_data_of_its_own(name, mode):
    workload = FAMILIES[name].build(counted_case(name), "cpu", 3)
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
