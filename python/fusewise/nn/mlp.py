"""A stack of linear layers with activations as a module."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import functional
from .._settings import TORCH, settings
from ..functional._transforms import refuse_script
from ..functional.linear_act import ACTIVATIONS
from ._checks import activation_name, blame_x, floating, true_or_false, whole
from ._others import stack_parts
from ._parts import foreign, hooks_everywhere, ordinary, run_torch, weight_and_bias


class MLP(torch.nn.Module):
    """`x`, then for each layer `act(x @ weight.T + bias)`: one fused operator forward and one back.

    Parameters and state dict are those of a list of `torch.nn.Linear` named `layers`:
    `layers.0.weight`, `layers.0.bias`, ... They are called, and torch's operators run, only where
    the fused operator would miss something: hooks on them, or another layer in their place.

    Args:
        sizes: features of the input and of each layer's output, `[K_0, K_1, ..., K_n]`.
        activation: of all layers but the last: "identity", "relu", "gelu", "gelu_tanh" or "silu".
        final_activation: of the last.
        bias: whether the layers have one.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str = "relu",
        final_activation: str = "identity",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not isinstance(sizes, (list, tuple)) or len(sizes) < 2:
            raise ValueError(f"sizes: expected a list of at least two, got {sizes!r}")
        for i, size in enumerate(sizes):
            whole(f"sizes[{i}]", size, least=0)
        activation_name("activation", activation)
        activation_name("final_activation", final_activation)
        true_or_false("bias", bias)
        floating(dtype)
        self.activation = activation
        self.final_activation = final_activation
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(sizes[i], sizes[i + 1], bias, device, dtype)
            for i in range(len(sizes) - 1)
        )

    @classmethod
    def from_sequential(cls, modules: torch.nn.Module) -> "MLP":
        """The same stack, on the same parameters, not on copies. Their names become
        `layers.0.weight`, `layers.0.bias`, ...

        `modules` is a `torch.nn.Sequential`, as torchvision's `MLP` and `MLPBlock`, or timm's
        `Mlp`: `torch.nn.Linear`s, each with `ReLU`, `GELU`, `SiLU`, `Identity` or nothing behind
        it, the same for all but the last; all have a bias, or none. `Dropout(0)` is passed over.
        With p > 0 it is an error, in eval mode too: a later `train()` would not bring it back.
        """
        linears, activation, final_activation = stack_parts(modules)
        sizes = [linears[0].in_features, *(linear.out_features for linear in linears)]
        biased = linears[0].bias is not None
        made = cls(sizes, activation, final_activation, biased, device="meta")
        made.layers = torch.nn.ModuleList(linears)
        return made.train(modules.training)

    def reset_parameters(self) -> None:
        """Draws the parameters anew, as torch.nn.Linear does."""
        for layer in self.layers:
            layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if settings.linear_act == TORCH:
            return run_torch("linear_act", self, self._with_torch, x)
        layers = self._modules["layers"]._modules
        kinds = (torch.nn.Linear,) * len(layers)
        usual = ordinary(layers.values(), kinds)
        if why := ("" if usual else foreign(layers, kinds, "layers.")) or hooks_everywhere():
            return run_torch("linear_act", self, self._with_torch, x, why)
        weights, biases = [], []
        for layer in layers.values():
            weight, bias = weight_and_bias(layer)
            weights.append(weight)
            biases.append(bias)
        missing = [i for i, bias in enumerate(biases) if bias is None]
        if len(missing) == len(biases):
            biases = None
        elif missing:
            why = f"layers.{missing[0]} has no bias where others have one"
            return run_torch("linear_act", self, self._with_torch, x, why)
        try:
            return functional.mlp(x, weights, biases, self.activation, self.final_activation)
        except RuntimeError as error:
            blame_x(error, x, weights[0].shape[1])
            raise

    def _with_torch(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = ACTIVATIONS[self.activation](layer(x))
        return ACTIVATIONS[self.final_activation](self.layers[-1](x))

    __prepare_scriptable__ = refuse_script

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, final_activation={self.final_activation!r}"
