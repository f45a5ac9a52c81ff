"""The host's part of a call, with clocks that nobody had to wait for."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusewise.bench import host, runner, schema
from fusewise.bench.families.family import BOTH, FORWARD, STEP
from results import contender, gpu_results


@pytest.fixture
def empty_calls(monkeypatch):
    """Every empty operator takes 7 µs; the list has a result of each that was timed."""
    results = []

    class Timer:
        def __init__(self, call, buffers, device):
            results.append(call(buffers - 1))

        def __call__(self):
            return 7.0

    monkeypatch.setattr(host, "LoopTimer", Timer)
    host.empty_us.cache_clear()
    yield results
    host.empty_us.cache_clear()


def test_overhead_is_wall_time_without_gpu_time(empty_calls):
    row = gpu_results(ours=2.0)["rows"][0]  # 2 µs on the GPU, 20 on the wall
    assert host.host(row, 5, "cpu") == {"overhead_us": 18.0, "empty_us": 7.0}
    assert len(empty_calls) == 1


@pytest.mark.parametrize("clock", ["gpu", "wall"])
def test_there_is_none_with_one_clock(empty_calls, clock):
    row = gpu_results()["rows"][0]
    del row["contenders"]["fusewise"][clock]
    assert host.host(row, 5, "cpu") is None
    assert empty_calls == []


@pytest.mark.parametrize("mode, outputs", [(FORWARD, 1), (BOTH, 1 + 4), (STEP, 1 + 3)])
def test_an_empty_operator_has_as_many_tensors(empty_calls, mode, outputs):
    """Four go in; the first of them is an input, the others are weights."""
    assert host.empty_us("cpu", 4, mode) == 7.0
    ((*results,),) = empty_calls
    assert len(results) == outputs and all(isinstance(t, torch.Tensor) for t in results)
    host.empty_us("cpu", 4, mode)
    assert len(empty_calls) == 1  # measured once
    host.empty_us("cpu", 5, mode)
    assert len(empty_calls) == 2


@pytest.mark.parametrize(
    "mode, expected",
    [
        (FORWARD, [("empty_3_1", 3)]),
        (BOTH, [("empty_3_1", 3), ("empty_4_3", 4)]),
        # backward() starts from ones; gradients are taken as they are, not copied.
        (STEP, [("empty_3_1", 3), ("ones_like", 1), ("empty_4_3", 4)]),
    ],
)
def test_an_empty_operator_is_called_once_each_way(mode, expected):
    """And nothing else that a GPU would have to run."""
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func.__name__.split(".")[0], len(args)))
            return func(*args, **(kwargs or {}))

    call = host.empty_call("cpu", 3, mode)
    call(0)
    with Recorder():
        call(0)
    assert [one for one in seen if one[0] not in ("detach", "alias", "view")] == expected


def test_one_tensor_has_a_gradient():
    x = torch.zeros((), requires_grad=True)
    (found,) = torch.autograd.grad(host.empty(x), x)
    assert found.shape == x.shape


def test_rows_of_a_gpu_say_it(monkeypatch):
    """As _measure puts it into a row; the schema takes it, and null."""
    monkeypatch.setattr(host, "empty_us", lambda device, tensors, mode: 10.0 * tensors)
    results = gpu_results()
    for row in results["rows"]:
        row["contenders"][runner.OURS] = contender(3.0)
        row["host"] = host.host(row, 5, "cuda")
        assert row["host"] == {"overhead_us": 27.0, "empty_us": 50.0}
    results["rows"][1]["host"] = None
    assert not schema.problem(results)
    results["rows"][2]["host"]["empty_us"] = None
    assert schema.problem(results) == "rows[2].host.empty_us is None"
    del results["rows"][2]["host"]["empty_us"]
    assert schema.problem(results) == "rows[2].host.empty_us is missing"
