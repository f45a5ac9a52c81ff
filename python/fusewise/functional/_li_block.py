"""LINet's residual block as one operator each way."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _ops
from .._settings import settings
from .._torch_private import is_batched_gradient
from ._products import product_math, without_autocast
from ._transforms import direct_apply, formula_gradients, needs_graph
from .batch_norm import batch_norm_act, given_momentum
from .li_conv import cast_images, copies_that_fit, copies_to_keep, li_conv


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
    numbers = (given_momentum(momentum), eps)
    tensors = _Tensors(x, weights, norms, blanked)
    call = (options, numbers, product_math(x, "conv"), (settings.li_conv, settings.batch_norm_act))
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *norms)):
        backward = settings.li_conv_backward, settings.batch_norm_act_backward
        apply = _LIBlock.apply if torch.compiler.is_compiling() else _direct_apply
        return apply((*call, backward), *tensors.in_a_row(), *running)
    return _forward(call, tensors, running, save=False)[0]


class _Tensors(NamedTuple):
    x: Tensor
    weights: Sequence[Tensor]
    norms: Sequence[Tensor]
    blanked: Tensor | None

    def in_a_row(self) -> tuple:
        """As autograd sees them."""
        return (self.x, *self.weights, *self.norms, self.blanked)

    @property
    def rows(self) -> int:
        """S + 1. A layer has 2 S + 1 weights, and its norm twice as many parameters as rows."""
        return self.x.shape[0]


def _by_kind(options, x, *others):
    """The tensors, and what follows them."""
    layers, rows = len(options.strides), x.shape[0]
    weights = layers * (2 * rows - 1)
    end = weights + layers * 2 * rows
    return _Tensors(x, others[:weights], others[weights:end], others[end]), others[end + 1 :]


def _forward(call, t, running, save):
    options, numbers, product, forced = call
    try:
        return _ops.li_block(
            t.x, t.weights, t.norms, running, t.blanked, *options, *numbers, save, *product, *forced
        )
    except (RuntimeError, ValueError) as error:
        named = {f"weights[{i}]": w for i, w in enumerate(t.weights)}
        named |= {f"norms[{i}]": w for i, w in enumerate(t.norms)}
        raise _ops.rephrased(error, x=t.x, **named, blanked=t.blanked) from None


class _LIBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *tensors):
        *call, ctx.forced = call
        t, running = _by_kind(call[0], *tensors)
        y, *saved, cast = _forward(call, t, running, save=True)
        cast, ctx.layouts = copies_to_keep(cast, t.weights)
        ctx.call = call
        # Not the running statistics, which other calls change before backward.
        ctx.save_for_backward(*saved, cast, *t.in_a_row())
        return y

    @staticmethod
    def backward(ctx, gradient):
        options, (_, eps), product, _ = ctx.call
        # Read once: checkpointing recomputes it.
        kept, statistics, parameters, cast, *tensors = ctx.saved_tensors
        t, _ = _by_kind(options, *tensors)
        cast = copies_that_fit(cast, ctx.layouts, t.weights)
        needed = ctx.needs_input_grad[1 : 1 + len(tensors)]
        others = [None] * (len(ctx.needs_input_grad) - 1 - len(needed))

        def layer_by_layer():
            def block(*tensors):
                return _layers(_by_kind(options, *tensors)[0], statistics, options, eps)

            with without_autocast(gradient):
                return None, *formula_gradients(block, tensors, needed, gradient), *others

        if needs_graph():
            return layer_by_layer()
        count = 1 + len(t.weights)
        norm_needs = _in_parts(needed[count : count + len(t.norms)], 2 * t.rows)
        needs = [needed[0], *map(any, norm_needs), *needed[1:count]]
        try:
            dx, dnorms, *dweights = _ops.li_block_backward(
                gradient, t.x, kept, statistics, parameters, cast, t.weights, t.blanked, *options,
                list(map(int, needs)), *product, *ctx.forced,
            )  # fmt: skip
        except RuntimeError as error:
            if is_batched_gradient(gradient):  # torch cannot unbatch an operator with lists
                return layer_by_layer()
            raise _ops.rephrased(error, gradient=gradient) from None
        dnorms = dnorms.split([norm.shape[0] for norm in t.norms])
        found = (dx, *dweights, *dnorms, None)
        found = (g if need else None for g, need in zip(found, needed, strict=True))
        return None, *found, *others


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


def _layers(t, statistics, options, eps):
    """The block in differentiable operators, with the statistics of forward."""
    norms = _in_parts(t.norms, 2 * t.rows)
    own = zip(
        options.strides,
        _in_parts(t.weights, 2 * t.rows - 1),
        norms,
        _running(t, norms, statistics, options, eps),
        strict=True,
    )
    layers = [_layer(t, options, eps, *each) for each in own]
    shortcut = None
    if options.shortcut:
        *layers, (convolution, norm) = layers
        shortcut = convolution, _with(norm, "identity")
    layers = [(convolution, _with(norm, "relu")) for convolution, norm in layers]
    return run_layers(t.x, layers, shortcut, options.integrated_only)


def _running(t, norms, statistics, options, eps):
    """For each layer the running statistics of forward, or None in training."""
    length, begin = len(options.strides) - options.shortcut, 0
    for i, (first, *_) in enumerate(norms):
        if options.training:
            yield None, None
            continue
        alone = options.integrated_only and i + 1 >= length
        shape = first.shape if alone else (t.rows, *first.shape)
        end = begin + 2 * math.prod(shape)
        mean, inverse_deviation = statistics[begin:end].reshape(2, *shape)
        yield mean.to(first.dtype), (inverse_deviation**-2 - eps).to(first.dtype)
        begin = end


def _layer(t, options, eps, stride, weights, norms, statistics):
    streams = t.rows - 1

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
        weight, bias = (torch.stack(each) for each in (norms[: t.rows], norms[t.rows :]))
        if integrated_only:
            weight, bias = weight[-1], bias[-1]
        return batch_norm_act(
            z,
            *statistics,
            weight,
            bias,
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
