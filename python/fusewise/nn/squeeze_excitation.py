"""Squeeze-and-Excitation as a module."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from .._ops import SQUEEZE_EXCITE, missing_activation
from .._settings import TORCH, settings
from ..functional._transforms import is_jit_tracing, is_symbolic, refuse_script
from ._checks import floating, one_of, true_or_false, whole
from ._others import excitation_parts
from ._parts import foreign, hooks_everywhere, ordinary, run_torch, weight_and_bias

_KINDS = (torch.nn.Conv2d, torch.nn.Conv2d)  # fc1 and fc2


class SqueezeExcitation(torch.nn.Module):
    """Squeeze-and-Excitation, fused in forward and backward.

    Computes `x * gate(fc2(act(fc1(mean(x)))))`; the mean is over H and W.

    Parameters and state dict are those of torchvision's module: `fc1` and `fc2` are 1x1
    convolutions. They only hold the parameters and are normally not called. If one of them has
    hooks, or was replaced by another kind of layer, the module calls both and runs torch's own
    operators instead.

    Args:
        channels: C of the input `[N, C, H, W]`.
        reduced: number of hidden units, R.
        activation: "silu", "relu" or "hardswish". There is no default: torchvision uses relu,
            timm's choice depends on the model, and the parameters do not reveal it.
        gate: "sigmoid" or "hardsigmoid".
        bias: whether fc1 and fc2 have biases.

    Example:
        >>> import torch, fusewise
        >>> layer = fusewise.nn.SqueezeExcitation(channels=64, reduced=4, activation="silu")
        >>> x = torch.randn(8, 64, 14, 14).to(memory_format=torch.channels_last)
        >>> y = layer(x)
        >>> y.shape, y.is_contiguous(memory_format=torch.channels_last)
        (torch.Size([8, 64, 14, 14]), True)
        >>> list(layer.state_dict())
        ['fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias']
    """

    _parts = ("fc1", "fc2")  # from_module may keep other names

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
        one_of("activation", activation, SQUEEZE_EXCITE.choices["activation"])
        one_of("gate", gate, SQUEEZE_EXCITE.choices["gate"])
        true_or_false("bias", bias)
        floating(dtype)
        self.activation = activation
        self.gate = gate
        self.fc1 = torch.nn.Conv2d(channels, reduced, 1, bias=bias, device=device, dtype=dtype)
        self.fc2 = torch.nn.Conv2d(reduced, channels, 1, bias=bias, device=device, dtype=dtype)

    @classmethod
    def from_module(cls, module: torch.nn.Module, keep_names: bool = False) -> "SqueezeExcitation":
        """Makes a SqueezeExcitation from a module of torchvision or timm.

        It shares the module's parameters; nothing is copied. It starts in the same mode (train or
        eval).

        `module` is torchvision's `SqueezeExcitation`, or timm's `SEModule` or `SqueezeExcite`, with
        an activation and a gate that the operator supports. The parameters get torchvision's names,
        `fc1` and `fc2`, even if timm calls them `conv_reduce` and `conv_expand`. With `keep_names`
        they keep their own, so that the model's state dict stays as it was.

        Raises:
            TypeError, ValueError: Naming the part, if the fused operator would compute something
                else: timm's effective variant, max-pooling, a norm, hooks, parametrisations.

        Example:
            >>> import torch, torchvision, fusewise
            >>> theirs = torchvision.ops.SqueezeExcitation(64, 4, activation=torch.nn.SiLU)
            >>> ours = fusewise.nn.SqueezeExcitation.from_module(theirs)
            >>> ours, ours.fc1 is theirs.fc1
            (SqueezeExcitation(
              activation='silu', gate='sigmoid'
              (fc1): Conv2d(64, 4, kernel_size=(1, 1), stride=(1, 1))
              (fc2): Conv2d(4, 64, kernel_size=(1, 1), stride=(1, 1))
            ), True)
        """
        parts = excitation_parts(module)
        channels, reduced = parts.fc1.in_channels, parts.fc1.out_channels
        made = cls(channels, reduced, parts.activation, parts.gate, device="meta")
        if keep_names:
            made._parts = parts.names
        made._modules = dict(zip(made._parts, (parts.fc1, parts.fc2), strict=True))
        made.training = module.training
        return made

    def reset_parameters(self) -> None:
        """Initialises the parameters again, as `torch.nn.Conv2d` does."""
        for name in self._parts:
            self._modules[name].reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: `[N, C, H, W]`, any strides; dtypes as in `functional.squeeze_excite`.

        Returns:
            A tensor of x's shape, dtype and memory layout.
        """
        if settings.squeeze_excite == TORCH:
            return run_torch("squeeze_excite", self, self._with_torch, x)
        parts = {name: self._modules[name] for name in self._parts}
        usual = ordinary(parts.values(), _KINDS)
        if why := ("" if usual else foreign(parts, _KINDS)) or hooks_everywhere():
            return run_torch("squeeze_excite", self, self._with_torch, x, why)
        fc1, fc2 = parts.values()
        w1, b1 = weight_and_bias(fc1)
        w2, b2 = weight_and_bias(fc2)
        try:
            return functional.squeeze_excite(x, w1, b1, w2, b2, self.activation, self.gate)
        except RuntimeError as error:
            channels = w1.shape[1]
            if not x.is_nested and x.dim() == 4 and x.shape[1] != channels:
                message = f"x: expected {channels} channels, got {x.shape[1]}"
                raise RuntimeError(message) from error
            raise

    def _with_torch(self, x: Tensor) -> Tensor:
        # torch's pooling also accepts an image without a batch dimension; the operator does not.
        if not is_symbolic(x) and not is_jit_tracing() and x.dim() != 4:
            raise RuntimeError(f"x: expected [N, C, H, W], got {list(x.shape)}")
        fc1, fc2 = (self._modules[name] for name in self._parts)
        hidden = getattr(F, self.activation)(fc1(F.adaptive_avg_pool2d(x, 1)))
        return x * getattr(F, self.gate)(fc2(hidden))

    __prepare_scriptable__ = refuse_script

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, gate={self.gate!r}"
