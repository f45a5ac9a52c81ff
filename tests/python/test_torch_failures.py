"""A call into torch that fails is reported as what it is: only torch's out-of-memory is that."""

import contextlib

import pytest
import torch

import fusewise
from fusewise.functional import linear_act, mlp


@contextlib.contextmanager
def broken(*operators):
    """Torch's CPU kernels of these operators raise an error that is not about memory."""

    def fail(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    library = torch.library.Library("aten", "IMPL")
    try:
        for operator in operators:
            library.impl(operator, fail, "CPU", allow_override=True)
        yield
    finally:
        library._destroy()


def message_of(call):
    """Of an error that does not pretend to be out of memory."""
    with pytest.raises(RuntimeError) as raised:
        call()
    assert not isinstance(raised.value, torch.OutOfMemoryError), raised.value
    return str(raised.value)


@pytest.fixture
def layer():
    return torch.randn(5, 4), torch.randn(3, 4), torch.randn(3)


def test_a_product_that_fails_forward(layer):
    with broken("mm", "addmm"):
        assert "aten::linear: " in message_of(lambda: linear_act(*layer, "relu"))
        stack = message_of(lambda: mlp(layer[0], [layer[1]], [layer[2]], "relu"))
        assert stack.startswith("layer 0: aten::linear: ")
    linear_act(*layer, "relu")


def test_a_product_that_fails_backward(layer):
    x, w, b = (tensor.requires_grad_() for tensor in layer)
    y = linear_act(x, w, b, "relu").sum()
    with broken("mm"):
        assert "aten::mm: " in message_of(lambda: torch.autograd.grad(y, [x, w], retain_graph=True))
    torch.autograd.grad(y, [x, w])


def test_a_copy_that_fails(layer):
    x, w, b = layer
    strided = b.repeat_interleave(2)[::2]
    with broken("clone"):
        message = message_of(lambda: linear_act(x, w, strided, "relu"))
        assert message.startswith("a dense copy: ")
    linear_act(x, w, strided, "relu")


def test_scratch_that_does_not_fit_is_out_of_memory():
    """The core's own allocations have no torch call in them."""
    error = RuntimeError("out of memory: no memory for 8 bytes of scratch")
    assert isinstance(fusewise._ops.rephrased(error), torch.OutOfMemoryError)


def test_a_message_that_mentions_memory_is_not_enough():
    error = RuntimeError("x: the text out of memory is in a name")
    assert fusewise._ops.rephrased(error) is error
