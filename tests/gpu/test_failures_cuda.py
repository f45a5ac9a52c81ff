"""What a failure inside torch or CUDA is reported as: only torch's out-of-memory is that."""

from gpu_helpers import needs_gpu

pytestmark = needs_gpu

# Prints the type and the message of what `call` raises. Leaves without CUDA's own clean-up, which
# complains about a context that has failed.
REPORT = """
import os
import torch
from fusewise.functional import linear_act, squeeze_excite

def report(call):
    try:
        call()
        print("nothing was raised")
    except RuntimeError as error:
        print(type(error).__name__, error, flush=True)

x = torch.zeros(1, 8, device="cuda")
w = torch.zeros(8, 8, device="cuda")
image = torch.zeros(1, 1, 1, 1, device="cuda")
one, bias = torch.ones(1, 1, device="cuda"), torch.ones(1, device="cuda")
linear_act(x, w, None, "gelu")
squeeze_excite(image, one, bias, one, bias, activation="silu")
"""


def test_an_earlier_kernels_failure_is_not_out_of_memory(run_python, tmp_path):
    """The calls need new memory, which CUDA refuses for another reason."""
    said = run_python(
        REPORT
        + """
image[torch.tensor([1 << 20], device="cuda")]  # an assertion in a kernel of torch's
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
report(lambda: linear_act(x.expand(2**24, 8), w, None, "gelu"))
report(lambda: squeeze_excite(image.expand(1, 1, 2**14, 2**14), one, bias, one, bias,
                              activation="silu"))
os._exit(0)
""",
        # A failed kernel may end every process that shares the GPU by the multi-process service:
        # not by that of the other tests.
        CUDA_MPS_PIPE_DIRECTORY=str(tmp_path),
    )
    lines = [line for line in said.splitlines() if "raised" in line or "Error" in line]
    assert len(lines) == 2, said
    for line in lines:
        assert not line.startswith(("OutOfMemoryError", "nothing")), said
        assert "assert" in line, said


def test_torchs_own_limit_is_out_of_memory(run_python):
    """The GPU has room, but torch was told to stay below a share of it."""
    said = run_python(
        REPORT
        + """
torch.cuda.set_per_process_memory_fraction(1e9 / torch.cuda.mem_get_info()[1])
report(lambda: linear_act(x.expand(2**28, 8), w, None, "gelu"))
report(lambda: squeeze_excite(image.expand(1, 1, 2**15, 2**15), one, bias, one, bias,
                              activation="silu"))
os._exit(0)
"""
    )
    assert said.count("OutOfMemoryError out of memory: ") == 2, said
