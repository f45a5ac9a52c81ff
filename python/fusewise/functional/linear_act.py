"""Linear + activation as a function."""

import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from ._call import Function
from ._products import cast_inputs, product_math, without_autocast
from ._transforms import is_jit_tracing, is_symbolic


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
    if is_symbolic(x):
        return CALL((x, w, b), (activation,))
    try:
        x, (w, b) = cast_inputs(x, [w, b])
        math = product_math(x)
    except AttributeError as error:
        raise _ops.LINEAR_ACT.wrong_type((x, w, b), (activation,)) or error from None
    return CALL((x, w, b), (activation,), math)


def layer(x, w, b, activation):
    """What a module of torch's own operators computes."""
    return ACTIVATIONS[activation](F.linear(x, w, b))


ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def check(x, w, b, activation):
    """Where there are sizes to check: not while torch.fx or torch.jit traces."""
    if not is_symbolic(x) and not is_jit_tracing() and not x.is_nested:
        _ops.LINEAR_ACT.check((x, w, b), (activation,))


def _plain(x, w, b, activation):
    check(x, w, b, activation)
    return layer(x, w, b, activation)


def formula(x, w, b, activation):
    """The operator in torch's own terms, which every transform of torch can see through, of what is
    already in the dtype that it is computed in."""
    _ops.LINEAR_ACT.check((x, w, b), (activation,))
    with without_autocast(x):
        return layer(x, w, b, activation)


CALL = Function(_ops.LINEAR_ACT, formula, _plain)
