"""When only torch's own operators give the right answer, and what they need."""

import torch
from torch.autograd import forward_ad

transforms_active = torch._C._are_functorch_transforms_active


def needs_formula() -> bool:
    """Whether torch.func or forward-mode AD is at work: they see through torch's operators only."""
    return transforms_active() or forward_ad._current_level >= 0


def refuse_forced(name: str) -> None:
    if name:
        raise RuntimeError(
            f"implementation: '{name}' was forced, but under torch.func transforms and "
            "forward-mode AD only torch's own operators run"
        )


def needs_graph() -> bool:
    """Whether a backward is to be differentiated again.

    Compiled backward is traced once, with gradients on; torch itself refuses a second one.
    """
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or needs_formula())


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
