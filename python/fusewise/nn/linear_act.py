"""Linear + activation as a module."""

import torch
from torch import Tensor

from .. import functional
from ..functional._transforms import refuse_script
from ._checks import (
    activation_name,
    activation_of,
    blame_x,
    floating,
    plain_linear,
    true_or_false,
    whole,
)


class LinearAct(torch.nn.Linear):
    """`act(x @ weight.T + bias)` as one fused operator, forward and backward.

    Parameters, initialisation and state dict are those of `torch.nn.Linear`.

    Args:
        in_features: K of the input `[..., K]`.
        out_features: N of the output `[..., N]`.
        bias: whether there is one.
        activation: "identity", "relu", "gelu", "gelu_tanh" or "silu".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        whole("in_features", in_features, least=0)
        whole("out_features", out_features, least=0)
        activation_name("activation", activation)
        true_or_false("bias", bias)
        floating(dtype)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, activation: str | torch.nn.Module = "relu"
    ) -> "LinearAct":
        """The same layer with its activation, on the same parameters, not on copies.

        `activation` is a name, or torch's module for it: `ReLU`, `GELU`, `SiLU` or `Identity`.
        """
        plain_linear("linear", linear)
        if isinstance(activation, torch.nn.Module):
            activation = activation_of("activation", activation)
        made = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            activation,
            device="meta",
            dtype=linear.weight.dtype,
        )
        made.weight, made.bias = linear.weight, linear.bias
        return made.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return functional.linear_act(x, self.weight, self.bias, self.activation)
        except RuntimeError as error:
            blame_x(error, x, self.in_features)
            raise

    __prepare_scriptable__ = refuse_script

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"
