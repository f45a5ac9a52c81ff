"""Linear layer + activation as a function."""

import torch.nn.functional as F
from torch import Tensor

from .. import _ops
from ._call import Function
from ._products import cast_inputs, product_math, without_autocast
from ._transforms import is_jit_tracing, is_symbolic


def linear_act(x: Tensor, w: Tensor, b: Tensor | None = None, activation: str = "relu") -> Tensor:
    """Linear layer and activation, `act(x @ w.T + b)`, fused in forward and backward.

    Args:
        x: input `[..., K]` with any leading sizes and any strides; float32, float64, float16 or
            bfloat16.
        w: weight `[N, K]`, in x's dtype; may also be float32 if x is float16 or bfloat16.
        b: bias `[N]` in w's dtype, or None.
        activation: "identity", "relu", "gelu" (exact, with erf), "gelu_tanh" or "silu".

    Returns:
        `[..., N]`, in x's dtype; under autocast, in autocast's dtype.

    Example:
        >>> import torch, fusewise
        >>> x, w, b = torch.ones(3, 2), torch.tensor([[1.0, 1.0], [-1.0, 0.0]]), torch.zeros(2)
        >>> fusewise.functional.linear_act(x, w, b, "relu")[0]
        tensor([2., 0.])
        >>> fusewise.functional.linear_act(x.reshape(3, 1, 2), w).shape
        torch.Size([3, 1, 2])
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
    """The layer built from torch's own operators."""
    return ACTIVATIONS[activation](F.linear(x, w, b))


ACTIVATIONS = {
    "identity": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def check(x, w, b, activation):
    """Checks the arguments, unless torch.fx or torch.jit is tracing and sizes must not be read."""
    if not is_symbolic(x) and not is_jit_tracing() and not x.is_nested:
        _ops.LINEAR_ACT.check((x, w, b), (activation,))


def _plain(x, w, b, activation):
    check(x, w, b, activation)
    return layer(x, w, b, activation)


def formula(x, w, b, activation):
    """The operator's formula in torch's own operators; the inputs are already cast for the GEMM."""
    _ops.LINEAR_ACT.check((x, w, b), (activation,))
    with without_autocast(x):
        return layer(x, w, b, activation)


CALL = Function(_ops.LINEAR_ACT, formula, _plain)
