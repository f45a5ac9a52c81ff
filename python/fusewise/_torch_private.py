"""All of torch's private names that fusewise uses, in one place.

When a new torch renames one, only this file changes. They are aliases, not wrapper functions,
because `torch.compile` recognises them and a wrapper would cost an extra call.
"""

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device type."""

is_batched_gradient = torch._C._functorch.is_legacy_batchedtensor
"""Whether the gradient is a batch, from `torch.autograd.grad(is_grads_batched=True)`."""

jit_tracing_state = torch._C._get_tracing_state
"""Not None while torch.jit.trace runs."""

# The functions behind the properties of torch.backends.cuda.matmul, which cost several times as
# much. torch has two switches for TF32, and the older one cannot be read once the newer one was
# set. fp32_precision reports the result of both.
fp32_precision = torch._C._get_fp32_precision_getter
allows_fp16_reduced_sums = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
allows_bf16_reduced_sums = torch._C._get_cublas_allow_bf16_reduced_precision_reduction

addmm_with_activation = torch._addmm_activation
"""cuBLASLt's GEMM with relu or gelu_tanh in its epilogue; a baseline in the benchmark."""

copy_each = torch._foreach_copy_
"""Copies a list of tensors into another, in few launches."""

sleep_on_gpu = torch.cuda._sleep
"""Keeps the GPU busy for a number of cycles."""


_are_transforms_active = torch._C._are_functorch_transforms_active


def needs_formula() -> bool:
    """Whether torch.func or forward-mode AD is active; both only work on torch's own operators."""
    return _are_transforms_active() or forward_ad._current_level >= 0


def constant_when_compiled(function):
    """Like torch.compiler.assume_constant_result, without importing the whole compiler."""
    function._dynamo_marked_constant = True
    return function


def compile_on_one_thread() -> None:
    torch._inductor.config.compile_threads = 1


def keep_address_when_compiled(tensor: torch.Tensor) -> None:
    """Lets CUDA graphs of `torch.compile` read the tensor in place, like a module's parameter."""
    torch._dynamo.mark_static_address(tensor)
