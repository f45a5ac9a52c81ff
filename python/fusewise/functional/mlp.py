"""A stack of linear layers with activations as one function."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _ops
from .._explain import record_torch
from .._settings import TORCH, settings
from .._torch_private import is_batched_gradient
from ._products import cast_inputs, product_math
from ._transforms import (
    SEEN_THROUGH,
    direct_apply,
    formula_gradients,
    is_symbolic,
    needs_formula,
    needs_graph,
    refuse_exporters,
    refuse_forced,
)
from .linear_act import CALL, check, formula, layer


def mlp(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] | None = None,
    activation: str = "relu",
    final_activation: str = "identity",
) -> Tensor:
    """A stack of n linear layers with activations, fused in forward and backward.

    Computes `act_n(... act_1(x @ w_1.T + b_1) ... @ w_n.T + b_n)` in one operator; backward is one
    operator too.

    Args:
        x: input `[..., K_0]`. All tensors may have the dtypes and strides that `linear_act`
            accepts.
        weights: one `[K_i, K_{i-1}]` per layer.
        biases: one `[K_i]` per layer, or None if no layer has a bias.
        activation: for all layers but the last; names as in `linear_act`.
        final_activation: for the last layer.

    Returns:
        `[..., K_n]`, in x's dtype; under autocast, in autocast's dtype.

    Example:
        >>> import torch, fusewise
        >>> weights = [torch.randn(16, 8), torch.randn(4, 16)]
        >>> biases = [torch.zeros(16), torch.zeros(4)]
        >>> y = fusewise.functional.mlp(torch.randn(5, 8), weights, biases, "gelu")
        >>> y.shape
        torch.Size([5, 4])
    """
    forced, forced_backward = settings.linear_act, settings.linear_act_backward
    if forced != TORCH:
        refuse_exporters("mlp", x)
    weights, biases = _lists(x, weights, biases)
    layers = len(weights)
    if forced == TORCH or needs_formula():
        return _with_torch(x, weights, biases, activation, final_activation, forced)
    x, parameters = cast_inputs(x, [*weights, *biases])
    math = product_math(x)
    wants_gradient = torch.is_grad_enabled() and (
        x.requires_grad or any(t.requires_grad for t in parameters)
    )
    kinds = (activation, final_activation)
    if wants_gradient:
        apply = _Mlp.apply if torch.compiler.is_compiling() else _direct_apply
        y = apply(x, layers, kinds, math, forced, forced_backward, *parameters)
    else:
        y, _ = _forward(x, parameters, layers, kinds, False, math, forced)
    if settings.records is not None:
        _record(x, parameters, layers, kinds, math, wants_gradient)
    return y


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layers, kinds, math, forced, forced_backward, *parameters):
        y, saved = _forward(x, parameters, layers, kinds, True, math, forced)
        ctx.save_for_backward(x, *parameters, *saved)
        ctx.settings = layers, kinds, math, forced_backward
        ctx.parameters = len(parameters)
        return y

    @staticmethod
    def backward(ctx, dy):
        layers, kinds, math, forced = ctx.settings
        x, *rest = ctx.saved_tensors
        parameters, saved = rest[: ctx.parameters], rest[ctx.parameters :]
        need_dx, *_ = ctx.needs_input_grad
        needs = ctx.needs_input_grad[6:]
        if needs_graph():
            return _formula_gradients(x, parameters, layers, kinds, (need_dx, *needs), dy)
        biased = len(parameters) > layers
        needed = [int(need) for need in needs] + [0] * (0 if biased else layers)
        try:
            dx, *found = _ops.mlp_backward(
                dy, x, parameters[:layers], saved, *kinds, need_dx, needed, *math, forced
            )
        except RuntimeError as error:
            if is_batched_gradient(dy):  # torch cannot unbatch an operator with lists
                return _formula_gradients(x, parameters, layers, kinds, (need_dx, *needs), dy)
            raise _ops.rephrased(error, dy=dy) from None
        gradients = (
            gradient if need else None for gradient, need in zip(found, needs, strict=False)
        )
        return dx if need_dx else None, None, None, None, None, None, *gradients


_direct_apply = direct_apply(_Mlp)


def _lists(x, weights, biases):
    """Returns weights and biases as lists; raises TypeError if they are not lists of tensors."""
    if not isinstance(x, Tensor) and not is_symbolic(x):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    found = []
    for name, value in (("weights", weights), ("biases", [] if biases is None else biases)):
        if isinstance(value, Tensor) or not isinstance(value, (list, tuple)):
            raise TypeError(f"{name}: expected a list of tensors, got {type(value).__name__}")
        for i, tensor in enumerate(value):
            if not isinstance(tensor, Tensor) and not is_symbolic(tensor):
                kind = type(tensor).__name__
                raise TypeError(f"{name}: expected tensors, got {kind} in place {i}")
        found.append(list(value))
    if not found[0]:
        raise ValueError("weights: expected at least one")
    if found[1] and len(found[1]) != len(found[0]):
        raise ValueError(f"biases: expected {len(found[0])}, one per weight, got {len(found[1])}")
    return found


def _forward(x, parameters, layers, kinds, save, math, forced):
    weights, biases = list(parameters[:layers]), list(parameters[layers:])
    try:
        return _ops.mlp(x, weights, biases, *kinds, save, *math, forced)
    except (RuntimeError, ValueError) as error:
        if wrong := _ops.wrong_words(*kinds):
            raise wrong from None
        named = {f"weights[{i}]": w for i, w in enumerate(weights)}
        named |= {f"biases[{i}]": b for i, b in enumerate(biases)}
        raise _ops.rephrased(error, x=x, **named) from None


def _layers(parameters, layers, activation, final_activation):
    """Yields weight, bias (or None) and activation of each layer."""
    for i in range(layers):
        bias = parameters[layers + i] if len(parameters) > layers else None
        yield parameters[i], bias, final_activation if i + 1 == layers else activation


def _with_torch(x, weights, biases, activation, final_activation, forced):
    why = "" if forced == TORCH else SEEN_THROUGH
    if why:
        refuse_forced("linear_act", why)
    if error := _ops.wrong_words(activation, final_activation):
        raise error
    layers, parameters = len(weights), [*weights, *biases]
    if not is_symbolic(x):
        x, parameters = cast_inputs(x, parameters)
    y = x
    for i, step in enumerate(_layers(parameters, layers, activation, final_activation)):
        _ops.in_layer(i, check, y, *step)
        y = layer(y, *step)
    if settings.records is not None:
        record_torch("linear_act", x, y, why)
    return y


def _formula(x, parameters, layers, activation, final_activation):
    for w, b, kind in _layers(parameters, layers, activation, final_activation):
        x = formula(x, w, b, kind)
    return x


def _formula_gradients(x, parameters, layers, kinds, needed, dy):
    def compute(x, *parameters):
        return _formula(x, parameters, layers, *kinds)

    dx, *found = formula_gradients(compute, (x, *parameters), needed, dy)
    return dx, None, None, None, None, None, *found


def _record(x, parameters, layers, kinds, math, wants_gradient):
    for w, b, kind in _layers(parameters, layers, *kinds):
        CALL.record((x, w, b), (kind,), math, wants_gradient)
        x = x.new_empty((*x.shape[:-1], w.shape[0]))
