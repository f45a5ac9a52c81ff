"""Squeeze-and-Excitation as a module."""

import torch
from torch import Tensor

from .. import functional
from .._ops import SQUEEZE_EXCITE_ACTIVATIONS, SQUEEZE_EXCITE_GATES, missing_activation
from ._checks import floating, one_of, whole
from ._others import excitation_parts


class SqueezeExcitation(torch.nn.Module):
    """`x * gate(fc2(act(fc1(mean(x)))))`, the mean over H and W, as one fused operator.

    Parameters and state dict are those of torchvision's module: `fc1` and `fc2` are 1x1
    convolutions that hold them and are not called themselves.

    Args:
        channels: C of the input `[N, C, H, W]`.
        reduced: number of hidden units, R.
        activation: "silu", "relu" or "hardswish". Has to be given: torchvision's is relu, timm's
            depends on the model, and the parameters do not tell.
        gate: "sigmoid" or "hardsigmoid".
        bias: whether fc1 and fc2 have biases.
    """

    def __init__(
        self,
        channels: int,
        reduced: int,
        activation: str = None,
        gate: str = "sigmoid",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        whole("channels", channels)
        whole("reduced", reduced)
        if activation is None:
            raise missing_activation()
        one_of("activation", activation, SQUEEZE_EXCITE_ACTIVATIONS)
        one_of("gate", gate, SQUEEZE_EXCITE_GATES)
        floating(dtype)
        self.activation = activation
        self.gate = gate
        self.fc1 = torch.nn.Conv2d(channels, reduced, 1, bias=bias, device=device, dtype=dtype)
        self.fc2 = torch.nn.Conv2d(reduced, channels, 1, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> "SqueezeExcitation":
        """The same layer, on the same parameters, not on copies, in the same mode.

        `module` is torchvision's `SqueezeExcitation`, or timm's `SEModule` or `SqueezeExcite`, with
        an activation and a gate that are known here. The parameters' names become torchvision's,
        `fc1` and `fc2`, also where timm's are `conv_reduce` and `conv_expand`.

        TypeError or ValueError, which name the part, where the operator would compute something
        else: timm's effective variant, max-pooling, a norm, hooks, parametrisations.
        """
        parts = excitation_parts(module)
        channels, reduced = parts.fc1.in_channels, parts.fc1.out_channels
        made = cls(channels, reduced, parts.activation, parts.gate, device="meta")
        made.fc1, made.fc2 = parts.fc1, parts.fc2
        made.training = module.training
        return made

    def reset_parameters(self) -> None:
        """Draws the parameters anew, as torch.nn.Conv2d does."""
        self.fc1.reset_parameters()
        self.fc2.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        fc1, fc2 = self.fc1, self.fc2
        try:
            return functional.squeeze_excite(
                x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, self.activation, self.gate
            )
        except RuntimeError as error:
            channels = fc1.weight.shape[1]
            if x.dim() == 4 and x.shape[1] != channels:
                message = f"x: expected {channels} channels, got {x.shape[1]}"
                raise RuntimeError(message) from error
            raise

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, gate={self.gate!r}"
