"""Copies of a model's tree of modules.

Everything that `optimize` runs, it runs on scratch copies. So the model is not touched before the
very end, whatever happens on the way.
"""

import copy
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


def is_compiled(module: nn.Module) -> bool:
    """Whether it is the result of `torch.compile(module)`, or `module.compile()` was called."""
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


def is_opaque(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule) or is_compiled(module)


def share(model: nn.Module) -> nn.Module:
    """A new tree with the same parameters, buffers and hooks."""
    return _copy(model, lambda parameter: parameter, lambda buffer: buffer, opaque=True)


def scratch(model: nn.Module) -> nn.Module:
    """A new tree with buffers of its own. Its parameters are aliases: gradients, and hooks on
    tensors, do not reach the model's. It needs no memory for them."""

    def alias(parameter: Tensor) -> Tensor:
        return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)

    return _copy(model, alias, lambda buffer: buffer.detach().clone(), opaque=False)


def doubled(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A copy in higher precision."""

    def precise(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    def parameter(tensor: Tensor) -> Tensor:
        return nn.Parameter(precise(tensor), requires_grad=tensor.requires_grad)

    return _copy(model, parameter, precise, opaque=False)


def _copy(model: nn.Module, parameter: Callable, buffer: Callable, opaque: bool) -> nn.Module:
    known: dict[int, object] = {}
    for tensor in model.buffers():
        known[id(tensor)] = buffer(tensor)
    for tensor in model.parameters():
        known[id(tensor)] = parameter(tensor)
    modules = set(model.modules())
    for module in modules:
        if opaque and is_opaque(module):
            known[id(module)] = module  # a copy would have other parameters, or not be compiled
        for value in module.__dict__.values():
            if isinstance(value, Tensor) and not value.is_leaf:  # a pruned or normalised weight
                known[id(value)] = value.detach()
        for hook in hooks_of(module):
            if getattr(hook, "__self__", None) not in modules:
                known[id(hook)] = hook
    try:
        return copy.deepcopy(model, known)
    except (TypeError, RuntimeError, AttributeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise TypeError(f"model: expected a module that can be copied; {error}") from error


def hooks_of(module: nn.Module) -> Iterator[object]:
    """All kinds: of forward, backward and state dict."""
    found = (
        value
        for name, value in module.__dict__.items()
        if name.endswith("_hooks") and isinstance(value, dict)
    )
    return itertools.chain.from_iterable(hooks.values() for hooks in found)
