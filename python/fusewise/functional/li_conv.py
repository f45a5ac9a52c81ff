"""LINet's convolution as a function: several streams and one that integrates them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from .._explain import record, record_torch
from .._settings import TORCH, settings
from .._torch_private import is_batched_gradient
from ._products import autocast_dtype, cast_inputs, product_math
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


def li_conv(
    x: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    mix: Sequence[Tensor],
    previous: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    integrated_only: bool = False,
) -> Tensor:
    """The convolutions of S streams, and their mixture for the integrated stream.

        u_s = conv(x_s, weights[s])
        y   = conv1x1(m, previous, stride) + sum over s of conv1x1(u_s, mix[s])

    One operator forward and one backward. The convolutions are cuDNN's on CUDA and torch's on the
    CPU.

    Args:
        x: `[S + 1, N, C, H, W]`: the streams, and behind them the integrated stream m. In the first
            layer, which has no m: S images `[N, C_s, H, W]`. Any strides; channels_last is the
            fastest layout.
        weights: one `[K, C_s, R, R]` per stream.
        mix: one `[D, K]` or `[D, K, 1, 1]` per stream.
        previous: `[D, C]` or `[D, C, 1, 1]`; None in the first layer.
        stride, padding: of the streams' convolutions, in both directions. m is read at every
            stride-th pixel, so where it is given the kernel is odd and the padding half of it.
        integrated_only: whether to return y alone.

    Returns:
        u_1, ..., u_S and y, `[S + 1, N, K, P, Q]`, where K = D is required; with `integrated_only`
        y, `[N, D, P, Q]`. Channels-last, in x's dtype; under autocast, in autocast's dtype.

    Example:
        >>> import torch, fusewise
        >>> rgb, depth = torch.randn(2, 3, 8, 8), torch.randn(2, 1, 8, 8)
        >>> weights = [torch.randn(16, 3, 3, 3), torch.randn(16, 1, 3, 3)]
        >>> mix = [torch.randn(16, 16), torch.randn(16, 16)]
        >>> y = fusewise.functional.li_conv([rgb, depth], weights, mix, stride=2, padding=1)
        >>> y.shape  # two streams and the integrated one
        torch.Size([3, 2, 16, 4, 4])
    """
    forced, forced_backward = settings.li_conv, settings.li_conv_backward
    images = list(x) if isinstance(x, (list, tuple)) else [x]
    if forced != TORCH:
        refuse_exporters("li_conv", images[0] if images else None)
    for name, value in (("stride", stride), ("padding", padding)):
        error = _ops.wrong_whole(name, value)
        if error is not None:
            raise error
    weights, mix = _checked(images, weights, mix, previous)
    options = (stride, padding, not integrated_only)
    if forced == TORCH or needs_formula():
        return _with_torch(images, weights, mix, previous, options, forced)
    count = len(weights)
    tensors = cast_images(images, [*weights, *mix, previous], keep_float32=True)
    math = product_math(tensors[0], "conv")  # the integration is of 1x1 convolutions
    wants_gradient = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in tensors
    )
    if wants_gradient:
        apply = _LiConv.apply if torch.compiler.is_compiling() else _direct_apply
        y = apply((count, options, math, forced, forced_backward), *tensors)
    else:
        y, *_ = _forward(tensors, count, options, math, forced)
    if settings.records is not None:
        _record(tensors, count, options, wants_gradient)
    return y


class _LiConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *tensors):
        count, options, math, forced, _ = call
        y, u, cast = _forward(tensors, count, options, math, forced)
        _, _, packed = options
        cast, ctx.layouts = copies_to_keep(cast, tensors)
        ctx.save_for_backward(*tensors, y if packed else u, cast)
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx, gradient):
        count, options, math, _, forced = ctx.call
        *tensors, u, cast = ctx.saved_tensors
        cast = copies_that_fit(cast, ctx.layouts, tensors)
        needed = ctx.needs_input_grad[1:]
        if needs_graph():
            return None, *_formula_gradients(tensors, count, options, needed, gradient)
        images, weights, mix, previous = _split(tensors, count)
        try:
            found = _ops.li_conv_backward(
                gradient, u, cast, images, weights, mix, previous, *options, list(map(int, needed)),
                *math, forced,
            )  # fmt: skip
        except RuntimeError as error:
            if is_batched_gradient(gradient):  # torch cannot unbatch an operator with lists
                return None, *_formula_gradients(tensors, count, options, needed, gradient)
            raise _ops.rephrased(error, gradient=gradient) from None
        return None, *(g if need else None for g, need in zip(found, needed, strict=True))


_direct_apply = direct_apply(_LiConv)


def _checked(images, weights, mix, previous):
    """The lists as lists; raises TypeError if they are not lists of tensors."""
    found = []
    for name, value in (("weights", weights), ("mix", mix)):
        if isinstance(value, Tensor) or not isinstance(value, (list, tuple)):
            raise TypeError(f"{name}: expected a list of tensors, got {type(value).__name__}")
        found.append(list(value))
    if not images:
        raise ValueError("x: expected at least one image")
    for name, tensors in (("x", images), ("weights", found[0]), ("mix", found[1])):
        for i, tensor in enumerate(tensors):
            if not isinstance(tensor, Tensor) and not is_symbolic(tensor):
                kind = type(tensor).__name__
                raise TypeError(f"{name}: expected tensors, got {kind} in place {i}")
    if previous is not None and not isinstance(previous, Tensor) and not is_symbolic(previous):
        kind = type(previous).__name__
        raise TypeError(f"previous: expected a tensor or None, got {kind}")
    return found


def cast_images(images, parameters, keep_float32=False):
    """Images and parameters in the dtype that autocast asks for, else parameters in that of x. With
    `keep_float32`, parameters that the operator casts by itself stay."""
    images = [cast_image(image) for image in images]
    if not keep_float32 or images[0].dtype not in (torch.float16, torch.bfloat16):
        return [*images, *cast_inputs(images[0], parameters)[1]]
    others = [None if _is_float32(t) else t for t in parameters]
    cast = cast_inputs(images[0], others)[1]
    return [*images, *(t if _is_float32(t) else c for t, c in zip(parameters, cast, strict=True))]


def cast_image(image):
    """In autocast's dtype, and channels-last if it changes."""
    dtype = autocast_dtype(image)
    if dtype is None or dtype == image.dtype or image.dim() != 4:
        return cast_inputs(image, [])[0]
    return image.to(dtype, memory_format=torch.channels_last)  # the layout of the convolutions


def copies_to_keep(cast, tensors):
    """The copies of weights for backward, if there are any, and the layouts of the weights."""
    return (cast, _layouts(tensors)) if cast.numel() else (None, None)


def copies_that_fit(cast, layouts, tensors):
    """The copies that forward kept, or None. They lie in memory as the weights did. Hooks on saved
    tensors may return weights in another layout; then backward makes copies of its own."""
    return cast if cast is not None and layouts == _layouts(tensors) else None


def _layouts(tensors):
    return [None if t is None else t.stride() for t in tensors]


def _is_float32(t) -> bool:
    return t is not None and t.dtype == torch.float32


def _split(tensors, count):
    """Images, weights, mix and previous of the list that autograd sees."""
    images = len(tensors) - 2 * count - 1
    weights, mix = images + count, images + 2 * count
    return tensors[:images], tensors[images:weights], tensors[weights:mix], tensors[mix]


def _forward(tensors, count, options, math, forced):
    images, weights, mix, previous = _split(list(tensors), count)
    try:
        return _ops.li_conv(images, weights, mix, previous, *options, *math, forced)
    except (RuntimeError, ValueError) as error:
        lists = (("x", images), ("weights", weights), ("mix", mix))
        named = {f"{name}[{i}]": t for name, each in lists for i, t in enumerate(each)}
        raise _ops.rephrased(error, **named, previous=previous) from None


def _formula(tensors, count, options):
    """The same in torch's own operators."""
    stride, padding, packed = options
    images, weights, mix, previous = _split(tensors, count)
    *streams, m = (*images, None) if previous is None else images[0].unbind()
    u = [F.conv2d(x, w, None, stride, padding) for x, w in zip(streams, weights, strict=True)]
    y = sum(F.conv2d(each, _kernel(w)) for each, w in zip(u, mix, strict=True))
    if m is not None:
        y = y + F.conv2d(m, _kernel(previous), stride=stride)
    result = torch.stack([*u, y]) if packed else y
    return _channels_last(result)


def _kernel(matrix: Tensor) -> Tensor:
    return matrix if matrix.dim() == 4 else matrix[:, :, None, None]


def _channels_last(image: Tensor) -> Tensor:
    return image.movedim(-3, -1).contiguous().movedim(-1, -3)


def _formula_gradients(tensors, count, options, needed, gradient):
    dtype = tensors[0].dtype

    def compute(*tensors):  # float32 parameters beside half-precision images are rounded
        tensors = [t if t is None or t.dtype == dtype else t.to(dtype) for t in tensors]
        return _formula(tensors, count, options)

    return formula_gradients(compute, tensors, needed, gradient)


def _with_torch(images, weights, mix, previous, options, forced):
    why = "" if forced == TORCH else SEEN_THROUGH
    if why:
        refuse_forced("li_conv", why)
    if is_symbolic(images[0]):
        tensors = [*images, *weights, *mix, previous]
    else:
        tensors = cast_images(images, [*weights, *mix, previous])
        _ops.check_li_conv(*_split(tensors, len(weights)), *options)
    y = _formula(tensors, len(weights), options)
    if settings.records is not None:
        record_torch("li_conv", images[0], y, why)
    return y


def _record(tensors, count, options, wants_gradient):
    stride, padding, _ = options
    images, weights, mix, previous = _split(tensors, count)
    for direction, name in (("forward", settings.li_conv), ("backward", settings.li_conv_backward)):
        backward = direction == "backward"
        if backward and not wants_gradient:
            return
        answer = _ops.li_conv_explain(
            images, weights, mix, previous, stride, padding, backward, name
        )
        record("li_conv", direction, images[0], answer)
