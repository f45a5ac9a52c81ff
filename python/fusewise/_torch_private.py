"""Every name that fusewise uses of torch although torch does not promise to keep it, in one place.

When a new torch renames one, this file changes and nothing else. They are aliases and not functions
of ours, because `torch.compile` knows them and calls cost less.
"""

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

__all__ = ["tree_leaves"]

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
"""On any kind of device."""

are_transforms_active = torch._C._are_functorch_transforms_active
"""Whether torch.func is at work."""

is_batched_gradient = torch._C._functorch.is_legacy_batchedtensor
"""By `torch.autograd.grad(is_grads_batched=True)`."""

jit_tracing_state = torch._C._get_tracing_state
"""Not None while torch.jit.trace runs."""

# The functions behind torch.backends.cuda.matmul, whose properties cost several times as much. The
# older of torch's two switches for TF32 cannot even be read once the newer was set; the first of
# these tells what both say.
fp32_precision = torch._C._get_fp32_precision_getter
allows_fp16_reduced_sums = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
allows_bf16_reduced_sums = torch._C._get_cublas_allow_bf16_reduced_precision_reduction

addmm_with_activation = torch._addmm_activation
"""cuBLASLt's product with relu or gelu_tanh in its epilogue: a rival in the benchmark."""

sleep_on_gpu = torch.cuda._sleep
"""For so many cycles."""


def is_forward_ad_active() -> bool:
    return forward_ad._current_level >= 0


def constant_when_compiled(function):
    """What torch.compiler.assume_constant_result does, without importing the whole compiler."""
    function._dynamo_marked_constant = True
    return function


def compile_on_one_thread() -> None:
    torch._inductor.config.compile_threads = 1


def keep_address_when_compiled(tensor: torch.Tensor) -> None:
    """CUDA graphs of `torch.compile` read it where it lies, as a module's parameters."""
    torch._dynamo.mark_static_address(tensor)
