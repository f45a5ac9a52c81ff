"""Linear layer + activation as a module."""

import torch
from torch import Tensor
from torch.nn import Parameter

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


class LinearAct(torch.nn.Module):
    """Linear layer and activation, `act(x @ weight.T + bias)`, fused in forward and backward.

    Parameters, initialisation and state dict are those of `torch.nn.Linear`. This is not a subclass
    of it, because tools that replace every `torch.nn.Linear` (LoRA, quantisers) would drop the
    activation.

    Args:
        in_features: K of the input `[..., K]`.
        out_features: N of the output `[..., N]`.
        bias: whether to add a bias.
        activation: "identity", "relu", "gelu" (exact), "gelu_tanh" or "silu".

    Example:
        >>> import torch, fusewise
        >>> layer = fusewise.nn.LinearAct(784, 2048, activation="gelu")
        >>> layer(torch.randn(32, 784)).shape
        torch.Size([32, 2048])
        >>> list(layer.state_dict())
        ['weight', 'bias']
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
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.activation = activation
        kind = {"device": device, "dtype": dtype}
        self.weight = Parameter(torch.empty(out_features, in_features, **kind))
        self.register_parameter(
            "bias", Parameter(torch.empty(out_features, **kind)) if bias else None
        )
        self.reset_parameters()

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, activation: str | torch.nn.Module = "relu"
    ) -> "LinearAct":
        """Makes a LinearAct from a `torch.nn.Linear`. It shares the parameters; nothing is copied.

        `activation` is a name, or one of torch's modules `ReLU`, `GELU`, `SiLU` and `Identity`.

        Raises:
            TypeError: If `linear` is of another class, subclasses included.
            ValueError: If it has hooks or parametrisations, or the activation has no fused form.

        Example:
            >>> import torch, fusewise
            >>> linear = torch.nn.Linear(784, 2048)
            >>> layer = fusewise.nn.LinearAct.from_linear(linear, torch.nn.SiLU())
            >>> layer.activation, layer.weight is linear.weight
            ('silu', True)
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

    def reset_parameters(self) -> None:
        """Initialises the parameters again, as `torch.nn.Linear` does."""
        torch.nn.Linear.reset_parameters(self)

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: `[..., in_features]`, any strides; dtypes as in `functional.linear_act`.

        Returns:
            `[..., out_features]`, in x's dtype; under autocast, in autocast's dtype.
        """
        try:
            return functional.linear_act(x, self.weight, self.bias, self.activation)
        except RuntimeError as error:
            blame_x(error, x, self.in_features)
            raise

    __prepare_scriptable__ = refuse_script

    def extra_repr(self) -> str:
        return f"{torch.nn.Linear.extra_repr(self)}, activation={self.activation!r}"
