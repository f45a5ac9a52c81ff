"""Detects the callers that need torch's own operators, and refuses those that cannot be served."""

import torch
from torch.fx import Proxy

from .. import _ops
from .._settings import TORCH, settings
from .._torch_private import (
    jit_tracing_state,
    needs_formula,
)

SEEN_THROUGH = "torch.func transforms and forward-mode AD only work with torch's own operators"


def is_symbolic(x) -> bool:
    """Whether x is a torch.fx Proxy, which has neither a type nor a size."""
    return isinstance(x, Proxy)


def is_jit_tracing() -> bool:
    """Whether torch.jit.trace is running; it warns whenever Python code reads a size."""
    return jit_tracing_state() is not None


def refuse_exporters(operator: str, x) -> None:
    """Raises an error, with the remedy, for tracers that cannot handle a fused operator."""
    if isinstance(x, Proxy):
        raise TypeError(f"{operator}: torch.fx cannot trace a fused operator; {_ops.WAY_OUT}")
    if jit_tracing_state() is not None:
        _ops.refuse_onnx(operator)


def refuse_script(_=None) -> None:
    """Assigned to `__prepare_scriptable__`, which torch.jit.script calls before it compiles."""
    raise RuntimeError(
        "torch.jit.script cannot compile fusewise's operators; use torch.export or torch.compile, "
        'or torch.jit.trace inside `with fusewise.implementation("torch"):`, which records '
        "torch's own operators"
    )


def refuse_forced(operator: str, why: str) -> None:
    """Raises if another implementation is forced where only torch's own operators can run."""
    for name in (getattr(settings, operator), getattr(settings, operator + "_backward")):
        if name not in ("", TORCH):
            raise RuntimeError(
                f"implementation: '{name}' was forced, but torch's own operators run, because {why}"
            )


def direct_apply(function: type[torch.autograd.Function]):
    """A faster `function.apply`, for calls in which `needs_formula()` is False.

    `torch.autograd.Function.apply` adds Python code for torch.func that takes as long as the rest
    of the call. This skips it. Not under `torch.compile`, which only recognises the original.
    """
    return super(torch.autograd.Function, function).apply


def needs_graph() -> bool:
    """Whether backward must be built from torch's own operators to be differentiated again.

    A compiled backward is traced once, with gradients enabled; torch itself refuses to
    differentiate it again.
    """
    return (torch.is_grad_enabled() or needs_formula()) and not torch.compiler.is_compiling()


def formula_gradients(formula, inputs, needed, dy):
    """The gradients of `formula(*inputs)`, by torch's autograd on torch's own operators."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views: a tensor that is passed twice, or made from another, gets a gradient per use.
        inputs = [None if t is None else t.view_as(t) for t in inputs]
        y = formula(*inputs)
        if not y.requires_grad:  # it depends on no input that needs a gradient
            return [
                torch.zeros_like(t) if need else None
                for t, need in zip(inputs, needed, strict=True)
            ]
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        found = iter(
            torch.autograd.grad(y, wanted, dy, create_graph=create_graph, materialize_grads=True)
        )
    return [next(found) if need else None for need in needed]
