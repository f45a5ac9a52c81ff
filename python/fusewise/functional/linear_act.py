"""Linear + activation as a function."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from .._explain import record, record_torch
from .._settings import TORCH, settings
from ._products import cast_inputs, product_math, without_autocast
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


def linear_act(x: Tensor, w: Tensor, b: Tensor | None = None, activation: str = "relu") -> Tensor:
    """`act(x @ w.T + b)`.

    Args:
        x: `[..., K]`, any leading sizes and strides; float32, float64, float16 or bfloat16.
        w: `[N, K]`; x's dtype, or float32 beside half x.
        b: `[N]` or None; w's dtype.
        activation: "identity", "relu", "gelu" (by the error function), "gelu_tanh" or "silu".

    Returns:
        `[..., N]`, in x's dtype, or in autocast's.
    """
    forced, forced_backward = settings.linear_act, settings.linear_act_backward
    if forced == TORCH or needs_formula():
        return _with_torch(x, w, b, activation, forced)
    refuse_exporters("linear_act", x)
    try:
        x, (w, b) = cast_inputs(x, [w, b])
        math = product_math(x)
        wants_gradient = torch.is_grad_enabled() and (
            x.requires_grad or w.requires_grad or (b is not None and b.requires_grad)
        )
    except AttributeError as error:
        raise _ops.wrong_linear_type(x, w, b, activation) or error from None
    if wants_gradient:
        y = _apply(x, w, b, activation, math, forced, forced_backward)
    else:
        y, _ = _forward(x, w, b, activation, False, math, forced)
    if settings.records is not None:
        record_linear_act(x, w, b, activation, math, wants_gradient)
    return y


_NO_GRADIENT = (None,) * 4  # for the four arguments that are not tensors


class _LinearAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, activation, math, forced, forced_backward):
        y, kept = _forward(x, w, b, activation, True, math, forced)
        # x is for the gradient of w alone; without it backward still needs its shape.
        lean = not ctx.needs_input_grad[1] and x.is_contiguous()
        ctx.save_for_backward(None if lean else x, w, b, kept)
        ctx.shape = x.shape
        ctx.settings = activation, math, forced_backward
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, b, kept = ctx.saved_tensors
        activation, math, forced = ctx.settings
        needed = ctx.needs_input_grad[:3]
        if needs_graph():
            if x is None:
                raise RuntimeError(
                    "linear_act: a second backward needs x, which is not kept where w needs no "
                    "gradient; let w require one, or build the layer from torch's own operators"
                )

            def compute(x, w, b):
                return formula(x, w, b, activation)

            return *formula_gradients(compute, (x, w, b), needed, dy), *_NO_GRADIENT
        need_dx, need_dw, need_db = needed
        if x is None:
            x = w.new_empty(()).expand(ctx.shape)
        try:
            dx, dw, db = _ops.linear_act_backward(
                dy, x, w, kept, activation, *needed, *math, forced
            )
        except RuntimeError as error:
            raise _ops.rephrased(error, dy=dy) from None
        return (
            dx if need_dx else None,
            dw if need_dw else None,
            db if need_db else None,
            *_NO_GRADIENT,
        )


_apply = direct_apply(_LinearAct)


def _forward(x, w, b, activation, save, math, forced):
    try:
        return _ops.linear_act(x, w, b, activation, save, *math, forced)
    except RuntimeError as error:
        if wrong := _ops.wrong_linear_type(x, w, b, activation):
            raise wrong from None
        raise _ops.rephrased(error, x=x, w=w, b=b) from None


def record_linear_act(x, w, b, activation, math, wants_gradient):
    """Both directions, as they would run on these inputs."""
    forced = {"forward": settings.linear_act}
    if wants_gradient:
        forced["backward"] = settings.linear_act_backward
    for direction, name in forced.items():
        answer = _ops.linear_act_explain(
            x, w, b, activation, wants_gradient, direction == "backward", *math, name
        )
        record("linear_act", direction, x, answer)


def _with_torch(x, w, b, activation, forced):
    why = "" if forced == TORCH else SEEN_THROUGH
    if why:
        refuse_forced("linear_act", why)
    if not is_symbolic(x):
        if error := _ops.wrong_linear_type(x, w, b, activation):
            raise error
        x, (w, b) = cast_inputs(x, [w, b])
        if not is_jit_tracing() and not x.is_nested:
            _ops.check_linear_act(x, w, b, activation)
    y = plain(x, w, b, activation)
    if settings.records is not None:
        record_torch("linear_act", x, y, why)
    return y


def plain(x, w, b, activation):
    """The operator in torch's own terms, which every transform of torch can see through."""
    return ACTIVATIONS[activation](F.linear(x, w, b))


def formula(x, w, b, activation):
    """The same, of what is already in the dtype that it is computed in."""
    with without_autocast(x):
        return plain(x, w, b, activation)


ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
