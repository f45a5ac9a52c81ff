"""When only torch's own operators give the right answer, and what they need."""

import torch
from torch.fx import Proxy

from .. import _ops
from .._settings import TORCH, settings
from .._torch_private import (
    are_transforms_active,
    is_batched_gradient,
    is_forward_ad_active,
    jit_tracing_state,
)

SEEN_THROUGH = "torch.func transforms and forward-mode AD see through torch's own operators only"


def needs_formula() -> bool:
    """Whether torch.func or forward-mode AD is at work: they see through torch's operators only."""
    return are_transforms_active() or is_forward_ad_active()


def is_symbolic(x) -> bool:
    """Whether x is what torch.fx traces with: a name without a type or a size."""
    return isinstance(x, Proxy)


def is_jit_tracing() -> bool:
    """Whether torch.jit.trace runs: it warns of every look at a size."""
    return jit_tracing_state() is not None


def refuse_exporters(operator: str, x) -> None:
    """For tracers that cannot take a fused operator: an error that names the way out."""
    if isinstance(x, Proxy):
        raise TypeError(
            f"{operator}: torch.fx cannot trace a fused operator of fusewise; {_ops.WAY_OUT}"
        )
    if jit_tracing_state() is not None:
        _ops.refuse_onnx(operator)


def refuse_script(_=None) -> None:
    """In the place of `__prepare_scriptable__`, which torch.jit.script calls before it compiles."""
    raise RuntimeError(
        "torch.jit.script cannot compile fusewise's operators; use torch.export or torch.compile, "
        'or torch.jit.trace inside `with fusewise.implementation("torch"):`, which records '
        "torch's own operators"
    )


def refuse_forced(operator: str, why: str) -> None:
    """For calls that only torch's own operators can serve: a forced name must not be ignored."""
    for name in (getattr(settings, operator), getattr(settings, operator + "_backward")):
        if name not in ("", TORCH):
            raise RuntimeError(
                f"implementation: '{name}' was forced, but torch's own operators run, because {why}"
            )


def direct_apply(function: type[torch.autograd.Function]):
    """`function.apply` for arguments that `needs_formula` let through: what it adds, in Python, is
    for torch.func, and takes as long as the rest. `torch.compile` knows only that one."""
    direct = super(torch.autograd.Function, function).apply

    def apply(*arguments):
        return (function.apply if torch.compiler.is_compiling() else direct)(*arguments)

    return apply


def needs_graph(gradient: torch.Tensor | None = None) -> bool:
    """Whether a backward is to be differentiated again; or, for operators with lists of tensors, to
    run for a batch of gradients, which torch itself takes apart for all others.

    Compiled backward is traced once, with gradients on; torch itself refuses a second one.
    """
    if torch.compiler.is_compiling():
        return False
    batched = gradient is not None and is_batched_gradient(gradient)
    return torch.is_grad_enabled() or needs_formula() or batched


def formula_gradients(formula, inputs, needed, dy):
    """The gradients of `formula(*inputs)` as a graph of torch's operators."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: where one tensor is used twice or made from another, each use counts alone.
        inputs = [None if t is None else t.view_as(t) for t in inputs]
        y = formula(*inputs)
        if not y.requires_grad:  # it depends on nothing that is wanted
            return [
                torch.zeros_like(t) if need else None
                for t, need in zip(inputs, needed, strict=True)
            ]
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        found = iter(
            torch.autograd.grad(y, wanted, dy, create_graph=create_graph, materialize_grads=True)
        )
    return [next(found) if need else None for need in needed]
