"""When only torch's own operators give the right answer, and what they need."""

import torch
from torch.autograd import forward_ad

transforms_active = torch._C._are_functorch_transforms_active
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by autograd.grad(is_grads_batched=True)


def needs_formula() -> bool:
    """Whether torch.func or forward-mode AD is at work: they see through torch's operators only."""
    return transforms_active() or forward_ad._current_level >= 0


def refuse_forced(name: str) -> None:
    if name:
        raise RuntimeError(
            f"implementation: '{name}' was forced, but under torch.func transforms and "
            "forward-mode AD only torch's own operators run"
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
    batched = gradient is not None and _is_batched(gradient)
    return torch.is_grad_enabled() or needs_formula() or batched


def formula_gradients(formula, inputs, needed, dy):
    """The gradients of `formula(*inputs)` as a graph of torch's operators."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: where one tensor is used twice or made from another, each use counts alone.
        inputs = [None if t is None else t.view_as(t) for t in inputs]
        y = formula(*inputs)
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need]
        found = iter(
            torch.autograd.grad(y, wanted, dy, create_graph=create_graph, materialize_grads=True)
        )
    return [next(found) if need else None for need in needed]
