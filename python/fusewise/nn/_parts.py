"""Submodules ("parts") that hold the parameters of a fused module.

The fused operator reads a part's parameters and never calls the part. That is only correct if
calling it would compute the layer's own formula and nothing else. Otherwise `foreign` gives the
reason, and the module calls its parts and runs torch's own operators.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .._explain import record_torch
from .._ops import dtensor_error
from .._settings import settings
from ..functional._products import autocast_dtype
from ..functional._transforms import is_symbolic, refuse_forced

# Values that are fixed in the operators: a LayerNorm's eps, a convolution's padding.
_EPS = 1e-5
_PADDING = (0, 0)


def parameter(part: nn.Module, name: str) -> Tensor | None:
    """Skips Module.__getattr__, which would take longer than some operators do on few rows."""
    own = part._parameters
    return own[name] if name in own else getattr(part, name)


def make_weights(part: nn.Module) -> None:
    """Runs the pre-hooks that compute weights: pruning, old-style weight and spectral norm."""
    for hook in part._forward_pre_hooks.values():
        if _makes_weights(hook):
            hook(part, ())


def weight_and_bias(part: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a part that is not `foreign`; recomputed if it is pruned or normalised."""
    own = part._parameters
    if "weight" in own and "bias" in own:
        return own["weight"], own["bias"]
    make_weights(part)
    return parameter(part, "weight"), parameter(part, "bias")


def ordinary(
    parts: Collection[nn.Module], kinds: Sequence[type[nn.Module]], eps: float = _EPS
) -> bool:
    """Whether no part can be `foreign`. Only look-ups, because every call of a module runs it."""
    for part, kind in zip(parts, kinds):  # noqa: B905 - `strict` would cost more than a look-up
        own = part.__dict__
        if (
            type(part) is not kind
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            or ("eps" in own and own["eps"] != eps)
            or ("padding" in own and own["padding"] != _PADDING)
            or ("groups" in own and own["groups"] != 1)
        ):
            return False
    return len(parts) == len(kinds)


def foreign(parts: dict[str, nn.Module], kinds: Sequence[type[nn.Module]], prefix: str = "") -> str:
    """Why calling one of the parts would not compute the formula of its kind, or ''."""
    if len(parts) != len(kinds):
        return f"{prefix[:-1]} has {len(parts)} parts, the fused operator needs {len(kinds)}"
    for (name, part), kind in zip(parts.items(), kinds, strict=True):
        if why := _foreign(prefix + name, part, kind):
            return why
    return ""


def _foreign(name: str, part: nn.Module, kind: type[nn.Module]) -> str:
    cls = type(part)
    if not _computes_as(cls, kind):
        return f"{name} is a {_full_name(cls)}, which may compute something else"
    if "forward" in part.__dict__:
        return f"{name} overrides forward"
    if (
        part._forward_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        or not all(map(_makes_weights, part._forward_pre_hooks.values()))
    ):
        for of, tensor in part._parameters.items():
            if error := dtensor_error(f"{name}.{of}", tensor):
                raise error
        return f"{name} has hooks, and the fused operator would not call them"
    for of, value in (("eps", _EPS), ("padding", _PADDING), ("groups", 1)):
        if getattr(part, of, value) != value:
            return f"{name}.{of} is {getattr(part, of)}, the fused operator has {value}"
    return ""


def hooks_everywhere() -> str:
    """The reason to call the parts if hooks are registered for all modules, or ''."""
    if not (
        _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    ):
        return ""
    # The hooks of torch's FLOP and memory counters only note which module is running.
    tracker = getattr(sys.modules.get("torch.utils.module_tracker"), "ModuleTracker", ())
    for hooks in (
        _module._global_forward_hooks,
        _module._global_forward_pre_hooks,
        _module._global_backward_hooks,
        _module._global_backward_pre_hooks,
    ):
        if not all(isinstance(getattr(hook, "__self__", None), tracker) for hook in hooks.values()):
            return (
                "hooks are registered for all modules, and the fused operator would not call them"
            )
    return ""


def run_torch(
    operator: str, module: nn.Module, compute: Callable[[Tensor], Tensor], x: Tensor, why: str = ""
) -> Tensor:
    """`compute(x)`, which calls the module's parts; `why` is empty if "torch" was forced."""
    if why:
        refuse_forced(operator, why)
    with _rounded_to(x, module.parameters()):
        y = compute(x)
    if settings.records is not None:
        record_torch(operator, x, y, why)
    return y


def _rounded_to(x: Tensor, parameters: Iterable[Tensor]):
    """Autocast to x's dtype if x is fp16 or bf16; torch's layers refuse mixed dtypes."""
    if (
        is_symbolic(x)
        or x.dtype not in (torch.float16, torch.bfloat16)
        or x.is_meta
        or autocast_dtype(x) is not None
        or all(parameter.dtype == x.dtype for parameter in parameters)
    ):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, x.dtype)


def _computes_as(cls: type[nn.Module], kind: type[nn.Module]) -> bool:
    """Whether `cls` inherits the call methods of `kind`, as a parametrised layer's class does."""
    methods = ("__call__", "forward", "_conv_forward")
    return all(getattr(cls, each, None) is getattr(kind, each, None) for each in methods)


def _makes_weights(hook: Callable) -> bool:
    """Whether a forward pre-hook only recomputes the part's weight."""
    from torch.nn.utils.prune import BasePruningMethod  # not loaded by `import torch`

    return isinstance(hook, (BasePruningMethod, SpectralNorm, WeightNorm))


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
