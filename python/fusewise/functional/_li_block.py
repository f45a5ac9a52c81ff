"""LINet's residual block as one operator each way."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _ops
from .._settings import settings
from .._torch_private import is_batched_gradient
from ._products import product_math
from ._transforms import direct_apply, formula_gradients, needs_graph
from .batch_norm import batch_norm_act
from .li_conv import cast_images, li_conv


class Options(NamedTuple):
    """What the operator takes beside its tensors, in its order."""

    strides: Sequence[int]
    """Of the convolutions: the main path, then the shortcut's."""
    shortcut: bool
    """Whether the last layer is a shortcut."""
    integrated_only: bool
    training: bool


def li_block(
    x: Tensor,
    weights: list[Tensor],
    norms: list[Tensor],
    running: list[Tensor],
    blanked: Tensor | None,
    options: Options,
    momentum: float | None,
    eps: float,
) -> Tensor:
    """Convolutions, each with its BatchNorm and relu, and a residual.

    Args:
        x: `[S + 1, N, C, H, W]`, the integrated stream last.
        weights: for each convolution the streams' weights, then `mix` of all streams, then
            `previous`; see `li_conv`.
        norms: for each norm the weights of all streams and of the integrated one, then the biases.
        running: for each norm mean and variance, `[S + 1, K]`, and the counters `[S + 1]`.
        blanked: bool `[S + 1, N]` with False in the last row, or None.
        momentum, eps: of all norms; see `batch_norm_act`.

    Returns:
        `[S + 1, N, K, P, Q]`; with `integrated_only` `[N, K, P, Q]`.
    """
    x, *weights = cast_images([x], weights, keep_float32=True)
    numbers = (-1.0 if momentum is None else momentum, eps)
    tensors = (x, *weights, *norms)
    call = (options, numbers, product_math(x, "conv"), (settings.li_conv, settings.batch_norm_act))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        backward = settings.li_conv_backward, settings.batch_norm_act_backward
        apply = _LIBlock.apply if torch.compiler.is_compiling() else _direct_apply
        return apply((*call, backward), *tensors, *running, blanked)
    return _forward(call, _Tensors(*tensors, *running, blanked), save=False)[0]


class _Tensors:
    """The tensors that autograd sees, by what they are."""

    def __init__(self, x, *others):
        *others, self.blanked = others
        rows = x.shape[0]
        # Each layer has 2 S + 1 weights, 2 S + 2 tensors of its norm and 3 of running statistics.
        layers = len(others) // (4 * rows + 2)
        weights, norms = layers * (2 * rows - 1), layers * 2 * rows
        self.x, self.rows = x, rows
        self.weights = others[:weights]
        self.norms = others[weights : weights + norms]
        self.running = others[weights + norms :]


def _forward(call, t, save):
    options, numbers, math, forced = call
    try:
        return _ops.li_block(
            t.x, t.weights, t.norms, t.running, t.blanked, *options, *numbers, save, *math, *forced
        )
    except (RuntimeError, ValueError) as error:
        named = {f"weights[{i}]": w for i, w in enumerate(t.weights)}
        named |= {f"norms[{i}]": w for i, w in enumerate(t.norms)}
        raise _ops.rephrased(error, x=t.x, **named, blanked=t.blanked) from None


class _LIBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *tensors):
        *call, ctx.forced = call
        t = _Tensors(*tensors)
        y, *saved, cast = _forward(call, t, save=True)
        ctx.call = call
        ctx.save_for_backward(*saved, cast if cast.numel() else None, *tensors)
        return y

    @staticmethod
    def backward(ctx, gradient):
        options, (_, eps), math, _ = ctx.call
        kept = ctx.saved_tensors  # read once: checkpointing recomputes it
        saved, tensors = kept[:4], kept[4:]
        t, needed = _Tensors(*tensors), ctx.needs_input_grad[1:]

        def layer_by_layer():
            def block(*tensors):
                return _layers(_Tensors(*tensors), options, eps)

            return None, *formula_gradients(block, tensors, needed, gradient)

        if needs_graph():
            return layer_by_layer()
        count = 1 + len(t.weights)
        norm_needs = _in_parts(needed[count : count + len(t.norms)], 2 * t.rows)
        needs = [needed[0], *map(any, norm_needs), *needed[1:count]]
        try:
            dx, dnorms, *dweights = _ops.li_block_backward(
                gradient, t.x, *saved, t.weights, t.blanked, *options,
                list(map(int, needs)), *math, *ctx.forced,
            )  # fmt: skip
        except RuntimeError as error:
            if is_batched_gradient(gradient):  # torch cannot unbatch an operator with lists
                return layer_by_layer()
            raise _ops.rephrased(error, gradient=gradient) from None
        dnorms = dnorms.split([norm.shape[0] for norm in t.norms])
        others = [None] * (len(t.running) + 1)
        found = (dx, *dweights, *dnorms, *others)
        return None, *(g if need else None for g, need in zip(found, needed, strict=True))


_direct_apply = direct_apply(_LIBlock)


def run_layers(
    x: Tensor,
    layers: Sequence[tuple[Callable, Callable]],
    shortcut: tuple[Callable, Callable] | None,
    integrated_only: bool,
) -> Tensor:
    """A block as calls of its layers: `convolution(x, integrated_only)` and
    `norm(z, residual, integrated_only)`."""
    residual = x[-1] if integrated_only else x
    if shortcut is not None:
        convolution, norm = shortcut
        residual = norm(convolution(x, integrated_only), None, integrated_only)
    *inner, (convolution, norm) = layers
    for inner_convolution, inner_norm in inner:
        x = inner_norm(inner_convolution(x, False), None, False)
    return norm(convolution(x, integrated_only), residual, integrated_only)


def _layers(t, options, eps):
    """The block in differentiable operators. The running statistics are not updated."""
    own = zip(
        options.strides,
        _in_parts(t.weights, 2 * t.rows - 1),
        _in_parts(t.norms, 2 * t.rows),
        _in_parts(t.running, 3),
        strict=True,
    )
    layers = [_layer(t, options, eps, *each) for each in own]
    shortcut = None
    if options.shortcut:
        *layers, (convolution, norm) = layers
        shortcut = convolution, _with(norm, "identity")
    layers = [(convolution, _with(norm, "relu")) for convolution, norm in layers]
    return run_layers(t.x, layers, shortcut, options.integrated_only)


def _layer(t, options, eps, stride, weights, norms, running):
    streams = t.rows - 1
    statistics = (None, None) if options.training else running[:2]

    def convolution(x, integrated_only):
        return li_conv(
            x,
            list(weights[:streams]),
            list(weights[streams:-1]),
            weights[-1],
            stride=stride,
            padding=weights[0].shape[-1] // 2,
            integrated_only=integrated_only,
        )

    def norm(z, residual, integrated_only, activation):
        own = (*statistics, torch.stack(norms[: t.rows]), torch.stack(norms[t.rows :]))
        if integrated_only:
            own = [None if each is None else each[-1] for each in own]
        return batch_norm_act(
            z,
            *own,
            residual,
            activation=activation,
            training=options.training,
            eps=eps,
            blanked=None if integrated_only else t.blanked,
        )

    return convolution, norm


def _with(norm, activation):
    def call(z, residual, integrated_only):
        return norm(z, residual, integrated_only, activation)

    return call


def _in_parts(tensors, size):
    return [tensors[i : i + size] for i in range(0, len(tensors), size)]
