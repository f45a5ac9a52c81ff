"""BatchNorm, an activation and Squeeze-and-Excitation as one function."""

from torch import Tensor

from .. import _ops
from ._call import Function
from ._transforms import formula_gradients, is_jit_tracing, is_symbolic
from .batch_norm import (
    ACTIVATIONS,
    activated,
    affine,
    given_momentum,
    normalized,
    plainly_normalized,
    refuse_one_value,
    unpacked,
)
from .squeeze_excite import excited, plainly_excited


def batch_norm_excite(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    *,
    activation: str = "silu",
    hidden_activation: str = "silu",
    gate: str = "sigmoid",
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    num_batches_tracked: Tensor | None = None,
) -> Tensor:
    """`squeeze_excite(batch_norm_act(x))` without keeping the activated tensor for backward.

    Computes `a * gate(w2 @ hidden_activation(w1 @ mean(a) + b1) + b2)` with
    `a = activation(batch_norm(x))`; the mean is over H and W.

    Args:
        x: `[N, C, H, W]`, any strides; channels_last is the fastest layout. float32, float64,
            float16 or bfloat16.
        running_mean, running_var: `[C]`. Both or None, not one tensor twice; without them the
            statistics are those of x, in inference too. Training updates them in place. They and
            the six parameters share one dtype: x's, or float32 if x is float16 or bfloat16.
        weight, bias: `[C]` or None.
        w1: `[R, C]` or `[R, C, 1, 1]`.
        b1: `[R]` or None.
        w2: `[C, R]` or `[C, R, 1, 1]`.
        b2: `[C]` or None.
        activation: "identity", "relu", "relu6", "silu" or "hardswish".
        hidden_activation: "silu", "relu" or "hardswish".
        gate: "sigmoid" or "hardsigmoid".
        training: Whether the statistics are those of x.
        momentum: The weight of x's statistics in the running ones, not negative. None: the running
            ones become the average over all calls, which `num_batches_tracked` counts.
        eps: Added to the variance; not negative.
        num_batches_tracked: int64 scalar or None; training adds one to it, on its device.

    There is no residual, no max-pool, no dimension for streams, no `blanked` and no process group.
    `batch_norm_act` has them; `squeeze_excite` can follow it.

    Returns:
        A tensor like x, in x's layout. Autocast changes nothing.

    Raises:
        ValueError: With one value per channel where the statistics are those of x, as torch does.

    Example:
        >>> import torch, fusewise
        >>> x, w1, w2 = torch.randn(4, 8, 6, 6), torch.randn(2, 8), torch.zeros(8, 2)
        >>> mean, var = torch.zeros(8), torch.ones(8)
        >>> y = fusewise.functional.batch_norm_excite(
        ...     x, mean, var, None, None, w1, None, w2, None, activation="relu", training=True
        ... )
        >>> y.shape, bool((y >= 0).all())
        (torch.Size([4, 8, 6, 6]), True)
        >>> torch.allclose(mean, 0.1 * x.mean((0, 2, 3)), atol=1e-6)  # updated in place
        True
    """
    if running_mean is None and not training:  # the statistics of x, in a call that does not count
        training, num_batches_tracked = True, None
    if training:
        refuse_one_value(x)
    tensors = (x, running_mean, running_var, weight, bias, w1, b1, w2, b2, num_batches_tracked)
    words = (activation, hidden_activation, gate)
    return _call(tensors, words, (training,), (given_momentum(momentum), eps))


class _ExciteFunction(Function):
    def arguments(self, words, flags, numbers):
        return *words, *flags, *numbers

    def formula_gradients(self, kept, words, flags, needed, gradient):
        """Made from what forward kept, so that it can be differentiated again: in training the
        statistics depend on x, in inference they are constants."""
        *inputs, saved = kept
        x = inputs[0]
        mean, inverse, _ = unpacked(saved, x)

        def formula(x, _, __, weight, bias, w1, b1, w2, b2, ___):
            v = affine(normalized(x, mean, inverse, None, flags[0]), weight, bias, None)
            a = ACTIVATIONS[words[0]](v)
            return excited(a, w1, b1, w2, b2, *words[1:]).to(x.dtype)

        return formula_gradients(formula, inputs, needed, gradient)


def _plain(x, running_mean, running_var, weight, bias, w1, b1, w2, b2, tracked, *others):
    """What modules built from torch's own operators compute: same roundings, same autocast."""
    activation, hidden_activation, gate, training, momentum, eps = others
    if not is_symbolic(x) and not is_jit_tracing():
        inputs = (x, running_mean, running_var, weight, bias, w1, b1, w2, b2, tracked)
        _ops.BATCH_NORM_EXCITE.check(inputs, (activation, hidden_activation, gate))
    statistics = x, running_mean, running_var, weight, bias, tracked
    v = plainly_normalized(*statistics, training, momentum, eps)
    a = ACTIVATIONS[activation](v)
    return plainly_excited(a, w1, b1, w2, b2, hidden_activation, gate)


def _formula(x, running_mean, running_var, weight, bias, w1, b1, w2, b2, tracked, *others):
    """The operator's formula in torch's own operators."""
    activation, hidden_activation, gate, *rest = others
    inputs = (x, running_mean, running_var, weight, bias, w1, b1, w2, b2, tracked)
    _ops.BATCH_NORM_EXCITE.check(inputs, (activation, hidden_activation, gate))
    a = activated(*inputs[:5], None, tracked, None, activation, *rest)
    return excited(a, w1, b1, w2, b2, hidden_activation, gate).to(x.dtype)


_call = _ExciteFunction(_ops.BATCH_NORM_EXCITE, _formula, _plain)
