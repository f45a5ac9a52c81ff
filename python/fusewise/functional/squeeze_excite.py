"""Squeeze-and-Excitation as a function."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from ._call import Function
from ._products import autocast_dtype, without_autocast
from ._transforms import is_jit_tracing, is_symbolic


def squeeze_excite(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    activation: str = None,
    gate: str = "sigmoid",
) -> Tensor:
    """Squeeze-and-Excitation, fused in forward and backward.

    Computes `x * gate(w2 @ act(w1 @ mean(x) + b1) + b2)`; the mean is over H and W.

    Args:
        x: input `[N, C, H, W]`, any strides; float32, float64, float16 or bfloat16.
        w1: `[R, C]` or `[R, C, 1, 1]`. The four parameters share one dtype: x's, or float32 if x is
            float16 or bfloat16.
        b1: `[R]` or None.
        w2: `[C, R]` or `[C, R, 1, 1]`.
        b2: `[C]` or None.
        activation: "silu", "relu" or "hardswish". There is no default, because torchvision uses
            relu and timm's choice depends on the model.
        gate: "sigmoid" or "hardsigmoid".

    Returns:
        A tensor of x's shape, dtype and memory layout. Autocast has no effect.

    Raises:
        TypeError: If the activation is missing.

    Example:
        >>> import torch, fusewise
        >>> x, w1, w2 = torch.ones(2, 8, 5, 5), torch.randn(4, 8), torch.zeros(8, 4)
        >>> y = fusewise.functional.squeeze_excite(x, w1, None, w2, None, activation="silu")
        >>> y.shape
        torch.Size([2, 8, 5, 5])
        >>> y[0, 0, 0, 0]  # every gate is sigmoid(0)
        tensor(0.5000)
    """
    if activation is None:
        raise _ops.missing_activation()
    return _call((x, w1, b1, w2, b2), (activation, gate))


def _plain(x, w1, b1, w2, b2, activation, gate):
    """What a module built from torch's own operators computes: same roundings, same autocast."""
    if not is_symbolic(x) and not is_jit_tracing():
        _ops.SQUEEZE_EXCITE.check((x, w1, b1, w2, b2), (activation, gate))
    return plainly_excited(x, w1, b1, w2, b2, activation, gate)


def plainly_excited(x, w1, b1, w2, b2, activation, gate):
    """The same without checks."""
    if not is_symbolic(x) and autocast_dtype(x) is None:
        w1, b1, w2, b2 = (None if t is None else t.to(x.dtype) for t in (w1, b1, w2, b2))
    # The operator's names for activations and gates are also the names of torch's functions.
    hidden = getattr(F, activation)(F.linear(x.mean((2, 3)), w1.flatten(1), b1))
    gates = getattr(F, gate)(F.linear(hidden, w2.flatten(1), b2))
    return x * gates[:, :, None, None]


def _formula(x, w1, b1, w2, b2, activation, gate):
    """The operator's formula in torch's own operators."""
    _ops.SQUEEZE_EXCITE.check((x, w1, b1, w2, b2), (activation, gate))
    return excited(x, w1, b1, w2, b2, activation, gate).to(x.dtype)


def excited(x, w1, b1, w2, b2, activation, gate):
    """The formula without checks and before it is rounded to x's dtype."""
    dtype = _ops.wide_dtype(x)
    w1, b1, w2, b2 = (None if t is None else t.to(dtype) for t in (w1, b1, w2, b2))
    with without_autocast(x):
        pooled = x.mean((2, 3), dtype=dtype)
        z = F.linear(pooled, w1.flatten(1), b1)
        if activation == "hardswish" and dtype == torch.float64:
            hidden = z * F.relu6(z + 3) / 6  # on CUDA, torch's hardswish keeps its 1/6 in float32
        else:
            hidden = getattr(F, activation)(z)
        gates = F.linear(hidden, w2.flatten(1), b2)
        # torch's hardsigmoid has no second derivative. relu6 has one, and gives the same function.
        gates = gates.sigmoid() if gate == "sigmoid" else F.relu6(gates + 3) / 6
        return x * gates[:, :, None, None]


_call = Function(_ops.SQUEEZE_EXCITE, _formula, _plain)
