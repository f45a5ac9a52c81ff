"""BatchNorm, a residual and an activation as one function."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from ._call import Function
from ._synchronized import is_shared, synchronized
from ._transforms import formula_gradients, is_jit_tracing, is_symbolic

ACTIVATIONS = {
    "identity": lambda v: v,
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}


def batch_norm_act(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    activation: str = "relu",
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    num_batches_tracked: Tensor | None = None,
    blanked: Tensor | None = None,
    max_pool: bool = False,
    process_group=None,
) -> Tensor:
    """`act(batch_norm(x) + residual)` in one pass over memory, or two; with a max-pool if wanted.

    Args:
        x: `[N, C, H, W]`, or `[S, N, C, H, W]` for S streams that have statistics and parameters of
            their own. Then everything that is `[C]` below is `[S, C]`. Any strides; channels_last
            is the fastest layout. float32, float64, float16 or bfloat16.
        running_mean, running_var: `[C]`, x's dtype, or float32 beside half-precision x. Both or
            None, not one tensor twice; without them the statistics are those of x, in inference
            too. Training updates them in place.
        weight, bias: `[C]` or None, the dtype of the running statistics.
        residual: x's shape and dtype, or None.
        activation: "identity", "relu", "relu6", "silu" or "hardswish".
        training: Whether the statistics are those of x.
        momentum: The weight of x's statistics in the running ones, not negative. None: the running
            ones become the average over all calls, which `num_batches_tracked` counts.
        eps: Added to the variance; not negative.
        num_batches_tracked: int64 scalar or None; training adds one to it, on its device. Or `[S]`:
            only to those of the streams that have at least two values.
        blanked: bool `[N]` (`[S, N]`) or None. True where a sample is absent: its values do not
            matter, it does not count, and its result and gradients are 0.
        max_pool: Whether a max-pool of 3x3 values with stride 2 and padding 1 follows, as at the
            start of a ResNet. The result is `[N, C, ceil(H / 2), ceil(W / 2)]`. Not with a
            residual.
        process_group: A `torch.distributed` group, or None. In training the statistics are those of
            the samples of all its processes, each of which must make the call, with as many samples
            as it has, be it none. weight's and bias's gradients are of this process's samples.

    Returns:
        A tensor like x, in x's layout. Autocast changes nothing.

    Raises:
        ValueError: In training with one value per channel, as torch does.

    Example:
        >>> import torch, fusewise
        >>> x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
        >>> mean, var = torch.zeros(3), torch.ones(3)
        >>> y = fusewise.functional.batch_norm_act(x, mean, var, residual=x, training=True)
        >>> y.shape, bool((y >= 0).all())
        (torch.Size([4, 3, 8, 8]), True)
        >>> torch.allclose(mean, 0.1 * x.mean((0, 2, 3)), atol=1e-6)  # updated in place
        True
    """
    shared = is_shared(process_group) and training
    if training and not shared:
        refuse_one_value(x)
    statistics = (x, running_mean, running_var, weight, bias)
    if max_pool:
        if residual is not None:
            raise ValueError("residual: expected None with max_pool, got a tensor")
        function, tensors = _call_pool, (*statistics, num_batches_tracked, blanked, None)
    else:
        function, tensors = _call, (*statistics, residual, num_batches_tracked, blanked, None)
    words, flags = (activation,), (training,)
    numbers = (given_momentum(momentum), eps)
    if shared:
        return synchronized(function, tensors, words, flags, numbers, process_group)
    return function(tensors, words, flags, numbers)


def given_momentum(momentum: float | None) -> float:
    """The operator's momentum, which is negative for None."""
    if momentum is None:
        return -1.0
    if isinstance(momentum, float) and momentum >= 0:
        return momentum
    error = _ops.wrong_number("momentum", momentum, "a number or None")
    if error is not None:
        raise error
    if momentum < 0:
        raise ValueError(
            f"momentum: expected a number that is not negative, or None, got {momentum:g}"
        )
    return momentum


def refuse_one_value(x: Tensor) -> None:
    """Raises torch's error if a channel of the image has one value, which has no statistics. Not
    for tracers, which cannot compare sizes."""
    if is_symbolic(x) or is_jit_tracing():
        return
    shape = getattr(x, "shape", ())
    if len(shape) >= 4 and shape[-1] == 1 and shape[-4] * shape[-2] == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {shape}"
        )


def check_statistics(
    running_mean, running_var, num_batches_tracked, training, momentum, eps
) -> None:
    """Raises the core's errors about running statistics."""
    if (running_mean is None) != (running_var is None):
        raise RuntimeError("running_mean and running_var: expected both or none")
    averages = training and momentum < 0 and running_mean is not None
    if averages and num_batches_tracked is None:
        raise RuntimeError(
            "num_batches_tracked: expected a tensor where momentum is None, got none"
        )
    if eps < 0:
        raise RuntimeError(f"eps: expected a number that is not negative, got {eps:g}")


class _NormFunction(Function):
    def __init__(self, operator: _ops.Operator, formula):
        super().__init__(operator, formula)
        self._residual = operator.index.get("residual")

    def arguments(self, words, flags, numbers):
        return *words, *flags, *numbers

    def arranged(self, kept, gradient, strides):
        """x in the layout that it had in forward: what forward saved is in the order of its memory,
        and hooks on saved tensors may change it. The other images follow, because the fast kernels
        take one layout, and the gradient of a global average pooling is expanded or NCHW."""
        x, at = kept[0], self._residual
        residual = None if at is None else kept[at]
        follows = residual is None or residual.stride() == strides
        if follows and x.stride() == strides and gradient.stride() == strides:
            return kept, gradient
        kept, adjacent = list(kept), x.shape[-3] > 1 and strides[-3] == 1
        if _ops.has_adjacent_channels(x) != adjacent:
            kept[0] = x = _dense(x, adjacent)
        if _is_dense(x, adjacent):
            gradient = _dense(gradient, adjacent)
            if residual is not None:
                kept[at] = _dense(residual, adjacent)
        return kept, gradient


class _BatchNormFunction(_NormFunction):
    def passed_on(self, words, tensors):
        """dresidual is dy itself where nothing stands between them."""
        if words[0] != "identity" or tensors[self._residual] is None:
            return None
        return self._residual if tensors[self.operator.index["blanked"]] is None else None

    def formula_gradients(self, kept, words, flags, needed, gradient):
        """Made from what forward kept, so that it can be differentiated again: in training the
        statistics depend on x, in inference they are constants."""
        *inputs, saved = kept
        x, residual = inputs[0], self._residual
        mean, inverse, rest = unpacked(saved, x)
        passes = _in_order(_bits(rest, x.numel()).bool(), x, x.shape) if rest.numel() else None
        if needed[residual] and inputs[residual] is None:
            # Its values are not needed: the activation's decisions are kept.
            inputs[residual] = torch.zeros_like(x).requires_grad_()

        def formula(x, _, __, weight, bias, residual, ___, blanked, ____):
            v = normalized(x, mean, inverse, blanked, flags[0])
            v = affine(v, weight, bias, residual)
            y = torch.where(passes, v, 0) if passes is not None else ACTIVATIONS[words[0]](v)
            return _without(y.to(x.dtype), blanked)

        return formula_gradients(formula, inputs, needed, gradient)


class _PoolFunction(_NormFunction):
    def formula_gradients(self, kept, words, flags, needed, gradient):
        """The same. The max-pool takes the values that forward chose."""
        *inputs, saved = kept
        x = inputs[0]
        mean, inverse, _ = unpacked(saved, x)
        places = pooled_pixels(saved, x)

        def formula(x, _, __, weight, bias, ___, blanked, ____):
            v = affine(normalized(x, mean, inverse, blanked, flags[0]), weight, bias, None)
            u = ACTIVATIONS[words[0]](v).to(x.dtype)
            y = u.flatten(-2).gather(-1, places.flatten(-2)).view(places.shape)
            return _without(y, blanked)

        return formula_gradients(formula, inputs, needed, gradient)


def normalized(x, mean, inverse, blanked, training):
    """The statistics as functions of x in training, with forward's values."""
    if training:
        mean, variance = _statistics(x, blanked)
        # The same value as forward's, whose eps is not kept.
        inverse = (variance + (inverse**-2 - variance).detach()).rsqrt()
    return (x - _wide(mean, x)) * _wide(inverse, x)


def pooled_pixels(saved: Tensor, x: Tensor) -> Tensor:
    """For each output of the max-pool, the pixel of the image that it took."""
    shape = torch.Size((*x.shape[:-2], (x.shape[-2] + 1) // 2, (x.shape[-1] + 1) // 2))
    choices = unpacked(saved, x)[2][: shape.numel()]
    choices = _in_order(choices, x, shape).long()
    h, w = (torch.arange(size, device=x.device) for size in shape[-2:])
    rows = 2 * h[:, None] - 1 + choices // 3
    return rows * x.shape[-1] + 2 * w - 1 + choices % 3


def _wide(channels: Tensor, x: Tensor) -> Tensor:
    """`[C]` or `[S, C]`, to be broadcast against x."""
    return channels[..., None, :, None, None] if x.dim() == 5 else channels[:, None, None]


def affine(v, weight, bias, residual):
    if weight is not None:
        v = v * _wide(weight, v)
    if bias is not None:
        v = v + _wide(bias, v)
    return v if residual is None else v + residual


def _without(y, blanked):
    return y if blanked is None else y.masked_fill(blanked[..., None, None, None], 0)


def _statistics(x: Tensor, blanked: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over the samples that are not blanked."""
    x, dims = x.to(_ops.wide_dtype(x)), (-4, -2, -1)
    if blanked is None:
        return x.mean(dims), x.var(dims, correction=0)
    count = (~blanked).sum(-1, keepdim=True).clamp_min(1) * (x.shape[-2] * x.shape[-1])
    mean = _without(x, blanked).sum(dims) / count
    squares = _without((x - _wide(mean, x)).square(), blanked)
    return mean, squares.sum(dims) / count


def unpacked(saved: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What forward saved: mean, 1 / deviation, and the bytes of the rest."""
    shape = (x.shape[0], x.shape[2]) if x.dim() == 5 else (x.shape[1],)
    count = shape[0] * shape[-1] if x.dim() == 5 else shape[0]
    mean, inverse = saved[: 2 * count].reshape(2, *shape)
    return mean, inverse, saved[2 * count :].contiguous().view(torch.uint8)


def _bits(values: Tensor, count: int) -> Tensor:
    return ((values[:, None] >> torch.arange(8, device=values.device)) & 1).flatten()[:count]


def _dense(image: Tensor, adjacent: bool) -> Tensor:
    """The image, copied unless it is channels-last (`adjacent`) or else NCHW."""
    if adjacent:
        return image.movedim(-3, -1).contiguous().movedim(-1, -3)
    return image.contiguous()


def _is_dense(image: Tensor, adjacent: bool) -> bool:
    return (image.movedim(-3, -1) if adjacent else image).is_contiguous()


def _in_order(values: Tensor, x: Tensor, shape) -> Tensor:
    """Saved values of an image, in the order of x's memory."""
    if _ops.has_adjacent_channels(x):
        *lead, c, h, w = shape
        return values.view(*lead, h, w, c).movedim(-1, -3)
    return values.view(shape)


def _formula(
    x,
    running_mean,
    running_var,
    weight,
    bias,
    residual,
    num_batches_tracked,
    blanked,
    group,
    activation,
    training,
    momentum,
    eps,
):
    statistics = (x, running_mean, running_var, weight, bias)
    tracked = num_batches_tracked
    if is_symbolic(x):
        v = plainly_normalized(*statistics, tracked, training, momentum, eps)
        return ACTIVATIONS[activation](v if residual is None else v + residual)
    _ops.BATCH_NORM_ACT.check((*statistics, residual, tracked, blanked, group), (activation,))
    v = activated(*statistics, residual, tracked, blanked, activation, training, momentum, eps)
    return _without(v.to(x.dtype), blanked)


def plainly_normalized(
    x, running_mean, running_var, weight, bias, num_batches_tracked, training, momentum, eps
):
    """What `nn.BatchNorm2d` computes."""
    check_statistics(running_mean, running_var, num_batches_tracked, training, momentum, eps)
    if training and num_batches_tracked is not None:
        num_batches_tracked.add_(1)
        if momentum < 0:
            momentum = 1.0 / float(num_batches_tracked)
    return F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


def activated(
    x,
    running_mean,
    running_var,
    weight,
    bias,
    residual,
    num_batches_tracked,
    blanked,
    activation,
    training,
    momentum,
    eps,
):
    """The formula without checks of shapes and types, before it is rounded to x's dtype. Updates
    the statistics."""
    check_statistics(running_mean, running_var, num_batches_tracked, training, momentum, eps)
    if training and num_batches_tracked is not None:
        each = num_batches_tracked.dim() == 1
        num_batches_tracked.add_((_count(x, blanked)[..., 0] > 1).long() if each else 1)
    if training or running_mean is None:
        mean, variance = _statistics(x, blanked)
        if training and running_mean is not None:
            factor = 1.0 / num_batches_tracked[..., None] if momentum < 0 else momentum
            _update(running_mean, running_var, mean, variance, factor, _count(x, blanked))
    else:
        mean, variance = running_mean, running_var
    dtype = _ops.wide_dtype(x)
    mean, variance = mean.to(dtype), variance.to(dtype)
    v = (x - _wide(mean, x)) * _wide((variance + eps).rsqrt(), x)
    return ACTIVATIONS[activation](affine(v, weight, bias, residual))


def _pool_formula(x, running_mean, running_var, weight, bias, tracked, blanked, group, *others):
    statistics = (x, running_mean, running_var, weight, bias)
    if is_symbolic(x):
        y = _formula(*statistics, None, tracked, blanked, group, *others)
        return F.max_pool2d(y, 3, 2, 1)
    _ops.BATCH_NORM_ACT_POOL.check((*statistics, tracked, blanked, group), others[:1])
    y = _formula(*statistics, None, tracked, blanked, group, *others)
    pooled = F.max_pool2d(y.flatten(0, -4), 3, 2, 1)
    return pooled.reshape(*x.shape[:-2], *pooled.shape[-2:])


def _count(x: Tensor, blanked: Tensor | None) -> Tensor:
    """The number of values per channel, `[1]` or, if streams differ, `[S, 1]`."""
    if blanked is None:
        samples = x.new_full((1,), x.shape[-4], dtype=_ops.wide_dtype(x))
    else:
        samples = (~blanked).sum(-1, keepdim=True).to(_ops.wide_dtype(x))
    return samples * (x.shape[-2] * x.shape[-1])


@torch.no_grad()
def _update(running_mean, running_var, mean, variance, factor, count):
    """The running statistics; streams with fewer than two values keep theirs."""
    unbiased = variance * (count / (count - 1).clamp_min(1))
    for running, new in ((running_mean, mean), (running_var, unbiased)):
        updated = running + factor * (new.to(running.dtype) - running)
        running.copy_(torch.where(count > 1, updated, running))


_call = _BatchNormFunction(_ops.BATCH_NORM_ACT, _formula)
_call_pool = _PoolFunction(_ops.BATCH_NORM_ACT_POOL, _pool_formula)
