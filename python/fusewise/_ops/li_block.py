"""LINet's residual block. Its fake kernels are written here, as those of the convolution are."""

import torch

from ._operator import _refuse, wide_dtype
from .li_conv import aligned, cast_elements, channels_last, check_li_conv

li_block = torch.ops.fusewise._li_block.default
li_block_backward = torch.ops.fusewise._li_block_backward.default


@torch.library.register_fake("fusewise::_li_block")
def _(
    x, weights, norms, running, blanked, strides, shortcut, integrated_only, training, momentum,
    eps, save, *_,
):  # fmt: skip
    if x.dim() != 5 or x.shape[0] < 2:
        _refuse(f"x: expected [S + 1, N, C, H, W] with S >= 1, got {list(x.shape)}")
    rows, length, each = x.shape[0], len(strides) - shortcut, 2 * x.shape[0] - 1
    kept, statistics, parameters, z = 0, 0, 0, x
    for i, stride in enumerate(strides):
        own = weights[i * each : (i + 1) * each]
        source = x if i in (0, length) else z
        kernels, mix, previous = own[: rows - 1], own[rows - 1 : -1], own[-1]
        kernel = kernels[0].shape[2]
        n, k, _, p, q = check_li_conv([source], kernels, mix, previous, stride, kernel // 2, True)
        z = x.new_empty((rows, n, k, p, q))
        alone = integrated_only and i + 1 >= length
        streams = z[:-1].numel()
        kept += aligned((aligned(streams) if alone else streams) + z[-1].numel())
        kept += aligned(z.numel()) if i + 1 < length else 0
        statistics += 2 * k * (1 if alone else rows)
        parameters += 2 * k * (1 if alone else rows)
        if i + 1 == length:
            y = channels_last(x, z.shape[1:] if alone else z.shape)
            kept += aligned(_units((y.numel() + 7) // 8, x.element_size()))
    wide = wide_dtype(x)
    if not save:
        nothing = [x.new_empty(0) for _ in range(3)]
        return y, nothing[0], x.new_empty(0, dtype=wide), *nothing[1:]
    return (
        y,
        x.new_empty(kept),
        x.new_empty(statistics, dtype=wide),
        norms[0].new_empty(parameters),
        x.new_empty(cast_elements(x, weights)),
    )


@torch.library.register_fake("fusewise::_li_block_backward")
def _(
    gradient, x, kept, statistics, parameters, cast, weights, blanked, strides, shortcut,
    integrated_only, training, needs, *_,
):  # fmt: skip
    rows = x.shape[0]
    each = 2 * rows - 1
    dx = channels_last(x, x.shape) if needs[0] else x.new_empty(0)
    channels = sum(w.shape[0] for w in weights[::each])
    found = [dx, parameters.new_empty(2 * rows * channels)]
    for i, (w, need) in enumerate(zip(weights, needs[1 + len(strides) :], strict=True)):
        like = torch.empty_like(w) if i % each < rows - 1 else w.new_empty(w.shape)
        found.append(like if need else x.new_empty(0))
    return found


def _units(count, size):
    return (count + size - 1) // size
