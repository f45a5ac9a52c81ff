"""Squeeze-and-Excitation as a function."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from .._explain import record, record_torch
from .._settings import TORCH, settings
from ._products import autocast_dtype
from ._transforms import (
    SEEN_THROUGH,
    direct_apply,
    formula_gradients,
    is_jit_tracing,
    is_symbolic,
    needs_formula,
    needs_graph,
    refuse_exporters,
    refuse_forced,
)


def squeeze_excite(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str = None,
    gate: str = "sigmoid",
) -> Tensor:
    """Squeeze-and-Excitation: `x * gate(w2 @ act(w1 @ mean(x) + b1) + b2)`, the mean over H and W.

    Args:
        x: `[N, C, H, W]`, any strides; float32, float64, float16 or bfloat16.
        w1: `[R, C]` or `[R, C, 1, 1]`; x's dtype, or float32 beside half x, as all four.
        b1: `[R]` or None.
        w2: `[C, R]` or `[C, R, 1, 1]`.
        b2: `[C]` or None.
        activation: "silu", "relu" or "hardswish". Has to be given: torchvision's is relu, timm's
            depends on the model.
        gate: "sigmoid" or "hardsigmoid".

    Returns:
        A tensor like x, in x's layout. Autocast changes nothing.
    """
    if activation is None:
        raise _ops.missing_activation()
    forced, forced_backward = settings.squeeze_excite, settings.squeeze_excite_backward
    if forced == TORCH or needs_formula():
        return _with_torch(x, w1, b1, w2, b2, activation, gate, forced)
    refuse_exporters("squeeze_excite", x)
    try:
        wants_gradient = torch.is_grad_enabled() and (
            x.requires_grad
            or w1.requires_grad
            or w2.requires_grad
            or (b1 is not None and b1.requires_grad)
            or (b2 is not None and b2.requires_grad)
        )
    except AttributeError as error:
        raise _ops.wrong_type(x, w1, b1, w2, b2, activation, gate) or error from None
    if wants_gradient:
        y = _apply(x, w1, b1, w2, b2, activation, gate, forced, forced_backward)
    else:
        y, _ = _forward(x, w1, b1, w2, b2, activation, gate, False, forced)
    if settings.records is not None:
        _record(x, w1, b1, w2, b2, activation, gate, wants_gradient)
    return y


_NO_GRADIENT = (None,) * 4  # for the four arguments that are not tensors


class _SqueezeExcite(torch.autograd.Function):
    # `forward(ctx, ...)` and not `setup_context`: 172 against 204 µs forward and backward.
    @staticmethod
    def forward(ctx, x, w1, b1, w2, b2, activation, gate, forced, forced_backward):
        y, saved = _forward(x, w1, b1, w2, b2, activation, gate, True, forced)
        ctx.save_for_backward(x, w1, b1, w2, b2, saved)  # the biases for double backward alone
        ctx.settings = activation, gate, forced_backward
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w1, b1, w2, b2, saved = ctx.saved_tensors
        activation, gate, forced = ctx.settings
        needed = ctx.needs_input_grad[:5]
        if needs_graph():

            def formula(*inputs):
                return _formula(*inputs, activation, gate)

            return *formula_gradients(formula, (x, w1, b1, w2, b2), needed, dy), *_NO_GRADIENT
        need_dx, need_dw1, need_db1, need_dw2, need_db2 = needed
        try:
            dx, dw1, db1, dw2, db2 = _ops.squeeze_excite_backward(
                dy, x, w1, w2, saved, activation, gate, *needed, forced
            )
        except RuntimeError as error:
            raise _ops.rephrased(error, dy=dy) from None
        return (
            dx if need_dx else None,
            dw1 if need_dw1 else None,
            db1 if need_db1 else None,
            dw2 if need_dw2 else None,
            db2 if need_db2 else None,
            *_NO_GRADIENT,
        )


_apply = direct_apply(_SqueezeExcite)


def _forward(x, w1, b1, w2, b2, activation, gate, save, forced):
    try:
        return _ops.squeeze_excite(x, w1, b1, w2, b2, activation, gate, save, forced)
    except RuntimeError as error:
        if wrong := _ops.wrong_type(x, w1, b1, w2, b2, activation, gate):
            raise wrong from None
        raise _ops.rephrased(error, x=x, w1=w1, b1=b1, w2=w2, b2=b2) from None


def _record(x, w1, b1, w2, b2, activation, gate, wants_gradient):
    forced = {"forward": settings.squeeze_excite}
    if wants_gradient:
        forced["backward"] = settings.squeeze_excite_backward
    for direction, name in forced.items():
        answer = _ops.squeeze_excite_explain(
            x, w1, b1, w2, b2, activation, gate, direction == "backward", name
        )
        record("squeeze_excite", direction, x, answer)


def _with_torch(x, w1, b1, w2, b2, activation, gate, forced):
    if forced == TORCH:
        why, y = "", _plain(x, w1, b1, w2, b2, activation, gate)
    else:
        why = SEEN_THROUGH
        refuse_forced("squeeze_excite", why)
        y = _formula(x, w1, b1, w2, b2, activation, gate)
    if settings.records is not None:
        record_torch("squeeze_excite", x, y, why)
    return y


def _plain(x, w1, b1, w2, b2, activation, gate):
    """What a module of torch's own operators computes, roundings and autocast included."""
    if not is_symbolic(x):
        if not is_jit_tracing():
            _ops.check_squeeze_excite(x, w1, b1, w2, b2, activation, gate)
        if autocast_dtype(x) is None:
            w1, b1, w2, b2 = (None if t is None else t.to(x.dtype) for t in (w1, b1, w2, b2))
    hidden = ACTIVATIONS[activation](F.linear(x.mean((2, 3)), w1.flatten(1), b1))
    gates = GATES[gate](F.linear(hidden, w2.flatten(1), b2))
    return x * gates[:, :, None, None]


ACTIVATIONS = {"silu": F.silu, "relu": F.relu, "hardswish": F.hardswish}
GATES = {"sigmoid": torch.sigmoid, "hardsigmoid": F.hardsigmoid}


def _formula(x, w1, b1, w2, b2, activation, gate):
    """The operator in torch's own terms, which every transform of torch can see through."""
    _ops.check_squeeze_excite(x, w1, b1, w2, b2, activation, gate)
    dtype = _ops.saved_dtype(x)
    w1, b1, w2, b2 = (None if t is None else t.to(dtype) for t in (w1, b1, w2, b2))
    with torch.autocast(x.device.type, enabled=False):
        pooled = x.mean((2, 3), dtype=dtype)
        z = F.linear(pooled, w1.flatten(1), b1)
        if activation == "hardswish" and dtype == torch.float64:
            hidden = z * F.relu6(z + 3) / 6  # on CUDA torch's own keeps its 1/6 in float32
        else:
            hidden = getattr(F, activation)(z)
        gates = F.linear(hidden, w2.flatten(1), b2)
        # torch's hardsigmoid has no second derivative; relu6 has, and is the same function.
        gates = gates.sigmoid() if gate == "sigmoid" else F.relu6(gates + 3) / 6
        return (x * gates[:, :, None, None]).to(x.dtype)
