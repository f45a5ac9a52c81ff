"""A call into torch that fails is reported as what it is: only torch's out-of-memory is that."""

import contextlib
import os
import shutil
import subprocess
import sys

import pytest
import torch

import fusewise
from fusewise.functional import linear_act


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


FAILS = """
int aoti_torch_cpu_addmm_out(void) { return 1; }
int aoti_torch_cpu_mm_out(void) { return 1; }
"""
CALLS = """
import torch
from fusewise.functional import linear_act, mlp

x, w, b = torch.randn(20, 40), torch.randn(30, 40, requires_grad=True), torch.randn(30)
failing = {
    "aten::addmm: ": lambda: linear_act(x, w, b, "relu"),
    "aten::mm: ": lambda: linear_act(x, w, None, "relu"),
    "layer 0: aten::addmm: ": lambda: mlp(x, [w], [b]),
}
for start, call in failing.items():
    try:
        call()
    except RuntimeError as error:
        assert not isinstance(error, torch.OutOfMemoryError), error
        assert str(error).startswith(start), error
    else:
        raise AssertionError(start)
linear_act(torch.randn(5, 4), torch.randn(3, 4), torch.randn(3))  # too small to be torch's
"""


def test_a_gemm_that_fails(tmp_path):
    """Torch's GEMMs do not pass the dispatcher: a library in front of torch's takes their place."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("no C compiler")
    source, library = tmp_path / "fails.c", tmp_path / "fails.so"
    source.write_text(FAILS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", CALLS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_copy_that_fails(layer):
    x, w, b = layer
    strided = b.repeat_interleave(2)[::2]
    with broken("clone"):
        message = message_of(lambda: linear_act(x, w, strided, "relu"))
        assert message.startswith("a dense copy: ")
    linear_act(x, w, strided, "relu")


def test_scratch_that_does_not_fit_is_out_of_memory():
    """The core's own allocations have no torch call in them."""
    error = RuntimeError("out of memory: 8 bytes of scratch memory could not be allocated")
    assert isinstance(fusewise._ops.rephrased(error), torch.OutOfMemoryError)


def test_a_message_that_mentions_memory_is_not_enough():
    error = RuntimeError("x: the text out of memory is in a name")
    assert fusewise._ops.rephrased(error) is error
