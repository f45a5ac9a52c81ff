"""Shared by the GPU tests of several families."""

import contextlib
import gc
import time

import pytest
import torch

import fusewise
from fusewise._capturing import without_garbage_collection
from reference import same_bits

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@contextlib.contextmanager
def matmul_settings(**values):
    """Sets these attributes of torch.backends.cuda.matmul in a `with` block."""
    matmul = torch.backends.cuda.matmul
    before = {name: getattr(matmul, name) for name in values}
    for name, value in values.items():
        setattr(matmul, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def check_all_but_general_decline(operator, fn, *arguments):
    """Each implementation but "general" declines with a reason, and raises if it is forced."""
    (record,) = fusewise.explain(fn, *arguments)
    assert record.chosen == record.candidates[-1].name == "general"
    for candidate in record.candidates[:-1]:
        assert candidate.reason
        with (
            fusewise.implementation(**{operator: candidate.name}),
            pytest.raises(RuntimeError, match=f"'{candidate.name}' declines: "),
        ):
            fn(*arguments)


# --- streams and graphs -------------------------------------------------------------------------


def slow_down(milliseconds=20):
    """Keeps the current stream busy, so that work on a wrong stream would overtake it."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def on_side_stream(work):
    """Runs `work` on a stream of its own, waits for the stream, and returns the result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = work()
    stream.synchronize()
    return result


def late_on_side_stream(empty, full, work):
    """`work` on a side stream that fills its tensors late; another stream would miss them."""

    def fill_and_work():
        slow_down()
        for target, source in zip(empty, full, strict=True):
            target.copy_(source)
        return work()

    return on_side_stream(fill_and_work)


def check_graph(step, inputs, warm=True):
    """Captures `step`, which returns a list of tensors, in a CUDA graph. Replays it on new inputs
    in the same memory and compares with a plain call. Without `warm`, nothing runs before the
    capture."""
    if warm:
        on_side_stream(step)
    graph = torch.cuda.CUDAGraph()
    with without_garbage_collection(), torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for t in inputs:
                t.normal_()
        for t in captured:
            t.detach().zero_()
        graph.replay()
        for i, (ours, right) in enumerate(zip(captured, step(), strict=True)):
            assert same_bits(ours.detach(), right.detach()), f"tensor {i} of the step"


# --- memory -------------------------------------------------------------------------------------


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def comes_back_to(bytes_before):
    """Whether the allocated memory returns to this number of bytes. After a failed backward,
    autograd's thread may release its tensors a little later."""
    end = time.monotonic() + 5
    while allocated() != bytes_before and time.monotonic() < end:
        time.sleep(0.01)
    return allocated() == bytes_before


def fails_with_out_of_memory(fn):
    """Whether `fn` raises torch's own error. Keeps no frame alive, and so no tensor."""
    try:
        fn()
    except torch.OutOfMemoryError as error:
        return "out of memory" in str(error)
    return False


def peak(step):
    """The peak memory of a step, beyond what was allocated before it."""
    step()
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def check_memory_is_flat(step, calls=200):
    step()
    before = allocated()
    for _ in range(calls):
        step()
    assert allocated() == before


def check_out_of_memory_in_backward(call, inputs, dy, room, dx):
    """The gradients do not fit into `room` bytes. After the failure no memory is lost, and the same
    backward gives `dx`."""

    def attempt():
        learned = [t.detach().requires_grad_() for t in inputs]
        y = call(*learned)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room) / total)

        def backward():
            return torch.autograd.grad(y, learned, dy, retain_graph=True)

        plugs = []  # fill holes in torch's reserved memory, in which dx would fit

        def plug():
            plugs.append(torch.empty_like(y))

        try:
            while not fails_with_out_of_memory(plug):
                pass
            kept = allocated()
            assert fails_with_out_of_memory(backward)
            assert comes_back_to(kept)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        plugs.clear()
        assert same_bits(backward()[0], dx)

    before = allocated()
    attempt()
    assert allocated() == before


# --- whole models -------------------------------------------------------------------------------


def train_under_autocast(model, x, rate=0.1):
    """Trains five steps in float16; returns the last output and its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(5):
        with torch.autocast("cuda", torch.float16):
            y = model(x)
        assert y.dtype == torch.float16
        loss = (y.float() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return y, loss.item()


def check_reduce_overhead(module, draw):
    """torch.compile with CUDA graphs of forward and backward; several steps, as in training."""
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        torch.manual_seed(seed)
        x = draw()
        results = []
        for fn in (module, compiled):
            y = fn(x)
            slopes = torch.autograd.grad(y.square().sum(), list(module.parameters()))
            results.append([t.clone() for t in (y, *slopes)])
        torch.testing.assert_close(*results)
