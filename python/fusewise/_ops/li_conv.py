"""LINet's convolution.

A C++ description cannot express lists of tensors, so the fake kernels are written here. Their
checks give the messages of the C++ core.
"""

import torch
from torch import Tensor

from ._operator import _FLOATING, _check_device, _name, _refuse

li_conv = torch.ops.fusewise._li_conv.default
li_conv_backward = torch.ops.fusewise._li_conv_backward.default
li_conv_explain = torch.ops.fusewise._li_conv_explain.default


@torch.library.register_fake("fusewise::_li_conv")
def _(x, weights, mix, previous, stride, padding, packed, *_):
    n, k, d, p, q = check_li_conv(x, weights, mix, previous, stride, padding, packed)
    cast = x[0].new_empty(cast_elements(x[0], [*weights, *mix, previous]))
    if packed:
        y = channels_last(x[0], (len(weights) + 1, n, k, p, q))
        return y, x[0].new_empty(0), cast
    y = channels_last(x[0], (n, d, p, q))
    return y, channels_last(x[0], (len(weights), n, k, p, q)), cast


@torch.library.register_fake("fusewise::_li_conv_backward")
def _(gradient, u, cast, x, weights, mix, previous, stride, padding, packed, needs, *_):
    images = [channels_last(t, t.shape) if t.dim() == 5 else torch.empty_like(t) for t in x]
    kernels = [t.new_empty(t.shape) for t in (*mix, x[0] if previous is None else previous)]
    found = [*images, *(torch.empty_like(w) for w in weights), *kernels]
    return [t if need else x[0].new_empty(0) for t, need in zip(found, needs, strict=True)]


def check_li_conv(x, weights, mix, previous, stride, padding, packed):
    """Raises what the core would raise; returns N, K, D, P and Q."""
    streams = len(weights)
    if not weights:
        _refuse("weights: expected at least one")
    if len(mix) != streams:
        _refuse(f"mix: expected {streams}, one per stream, got {len(mix)}")
    images, m = _images(x, streams, previous)
    _check_packed(weights[0], mix[0], packed)
    if stride < 1:
        _refuse(f"stride: expected at least 1, got {stride}")
    if padding < 0:
        _refuse(f"padding: expected at least 0, got {padding}")
    first = images[0]
    k, r, d = None, None, None
    for i, (image, w, matrix) in enumerate(zip(images, weights, mix, strict=True)):
        named = f"stream {i}: "
        _check_image(named, image, first)
        _check_weight(f"{named}w", w, first)
        shape, channels = list(w.shape), image.shape[1]
        square = len(shape) == 4 and shape[1] == channels and shape[2] == shape[3] and shape[0] > 0
        if i == 0:
            if not square:
                _refuse(f"{named}w: expected [K, {channels}, R, R], got {shape}")
            k, r = shape[0], shape[2]
        if not square or shape[0] != k or shape[2] != r:
            _refuse(f"{named}w: expected [{k}, {channels}, {r}, {r}], got {shape}")
        _check_weight(f"{named}mix", matrix, first)
        shape = _matrix(matrix)
        if i == 0:
            if len(shape) != 2 or shape[1] != k or shape[0] < 1:
                _refuse(f"{named}mix: expected [D, {k}], got {shape}")
            d = shape[0]
        if shape != [d, k]:
            _refuse(f"{named}mix: expected [{d}, {k}], got {shape}")
    if m is not None:
        _check_weight("previous", previous, first)
        if _matrix(previous) != [d, m.shape[1]]:
            _refuse(f"previous: expected [{d}, {m.shape[1]}], got {_matrix(previous)}")
    return first.shape[0], k, d, *_convolved(first, r, stride, padding, m is not None)


def _images(x, streams, previous):
    """Those of the streams, and the integrated one, if there is one."""
    if previous is None:
        if len(x) != streams:
            _refuse(f"x: expected {streams} images, one per stream, got {len(x)}")
        return x, None
    if len(x) != 1:
        wanted = f"one tensor [{streams + 1}, N, C, H, W] beside previous"
        _refuse(f"x: expected {wanted}, got {len(x)}")
    (packed,) = x
    if packed.dim() != 5 or packed.shape[0] != streams + 1:
        _refuse(f"x: expected [{streams + 1}, N, C, H, W], got {list(packed.shape)}")
    *images, m = packed.unbind()
    return images, m


def _check_packed(w: Tensor, mix: Tensor, packed: bool):
    shape = _matrix(mix)
    if packed and w.dim() == 4 and len(shape) == 2 and w.shape[0] != shape[0]:
        k = w.shape[0]
        _refuse(
            f"stream 0: mix: expected [{k}, {k}], because all streams are packed into one tensor, "
            f"got {shape}"
        )


def _check_image(named, image, first):
    _check_kind(f"{named}x", image, first)
    if image.dim() != 4:
        _refuse(f"{named}x: expected [N, C, H, W], got {list(image.shape)}")
    if min(image.shape[1:]) < 1:
        wanted = "[N, C, H, W] with C, H and W >= 1"
        _refuse(f"{named}x: expected {wanted}, got {list(image.shape)}")
    n, _, h, w = first.shape
    if image.shape[0] != n or image.shape[2] != h or image.shape[3] != w:
        _refuse(f"{named}x: expected [{n}, C, {h}, {w}], as stream 0, got {list(image.shape)}")


def _check_kind(name, tensor, first):
    if tensor.dtype not in _FLOATING:
        _refuse(f"{name}: expected a floating dtype, got {_name(tensor.dtype)}")
    if tensor.dtype != first.dtype:
        _refuse(f"{name}: expected x's dtype {_name(first.dtype)}, got {_name(tensor.dtype)}")
    _check_device(name, tensor, first.device)


def _check_weight(name, tensor, first):
    """Float32 weights beside half-precision images are cast."""
    if tensor.dtype == torch.float32 and first.dtype in (torch.float16, torch.bfloat16):
        _check_device(name, tensor, first.device)
    else:
        _check_kind(name, tensor, first)


def cast_elements(image, weights):
    """Of the copies of float32 weights beside half-precision images."""
    if image.dtype not in (torch.float16, torch.bfloat16):
        return 0
    found = (w.numel() for w in weights if w is not None and w.dtype == torch.float32)
    return sum(map(aligned, found))


def aligned(elements):
    """As the operators lay out what shares a tensor."""
    return (elements + 127) // 128 * 128


def _convolved(image, r, stride, padding, has_m):
    if has_m and r % 2 == 0:
        _refuse(f"w: expected an odd kernel size where m is given, got {r}")
    if has_m and padding != r // 2:
        wanted = f"{r // 2} for a kernel of {r} where m is given"
        _refuse(f"padding: expected {wanted}, got {padding}")
    if padding >= r:
        _refuse(f"padding: expected less than the kernel's {r}, got {padding}")
    h, w = image.shape[2:]
    least = max(1, r - 2 * padding)
    if h < least or w < least:
        _refuse(
            f"x: expected H and W >= {least} for a kernel of {r} with padding {padding}, got "
            f"{list(image.shape)}"
        )
    return tuple((size + 2 * padding - r) // stride + 1 for size in (h, w))


def _matrix(tensor: Tensor) -> list[int]:
    """The shape of a 1x1 convolution's weights as a matrix."""
    shape = list(tensor.shape)
    return shape[:2] if len(shape) == 4 and shape[2] == shape[3] == 1 else shape


def channels_last(like: Tensor, shape) -> Tensor:
    *lead, c, h, w = shape
    return like.new_empty((*lead, h, w, c)).movedim(-1, -3)
