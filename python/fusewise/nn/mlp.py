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
    """A stack of linear layers, each `act(x @ weight.T + bias)`, fused in forward and backward.

    Parameters and state dict are those of a list of `torch.nn.Linear` named `layers`:
    `layers.0.weight`, `layers.0.bias`, ... The layers only hold the parameters and are normally not
    called. If one of them has hooks, or was replaced by another kind of layer, the module calls
    them all and runs torch's own operators instead.

    Args:
        sizes: features of the input and of each layer's output, `[K_0, K_1, ..., K_n]`.
        activation: for all layers but the last: "identity", "relu", "gelu", "gelu_tanh" or "silu".
        final_activation: for the last layer.
        bias: whether the layers have biases.

    Example:
        >>> import torch, fusewise
        >>> model = fusewise.nn.MLP([784, 256, 10], activation="gelu")
        >>> model(torch.randn(32, 784)).shape
        torch.Size([32, 10])
        >>> list(model.state_dict())
        ['layers.0.weight', 'layers.0.bias', 'layers.1.weight', 'layers.1.bias']
    """

    _parts = None  # the layers' names, if from_sequential has kept them

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
    def from_sequential(cls, modules: torch.nn.Module, keep_names: bool = False) -> "MLP":
        """Makes an MLP from existing layers. It shares their parameters; nothing is copied.

        `modules` is a `torch.nn.Sequential`, which includes torchvision's `MLP` and `MLPBlock`, or
        timm's `Mlp`. It holds `torch.nn.Linear` layers, each followed by `ReLU`, `GELU`, `SiLU`,
        `Identity` or nothing. All layers but the last must have the same activation. Either all
        layers have a bias or none has. In the result the parameters are named `layers.0.weight`,
        `layers.0.bias`, ... With `keep_names` they keep the names that they have in `modules`.

        `Dropout(0)` is skipped. Dropout with p > 0 is an error, in eval mode too, because the MLP
        could not apply it after a later `train()`.

        Raises:
            TypeError, ValueError: Naming the part, if a fused stack would compute something else.

        Example:
            >>> import torch, fusewise
            >>> nn = torch.nn
            >>> theirs = nn.Sequential(nn.Linear(784, 256), nn.GELU(), nn.Linear(256, 10))
            >>> ours = fusewise.nn.MLP.from_sequential(theirs, keep_names=True)
            >>> list(ours.state_dict()) == list(theirs.state_dict())
            True
        """
        linears, activation, final_activation, names = stack_parts(modules)
        sizes = [linears[0].in_features, *(linear.out_features for linear in linears)]
        biased = linears[0].bias is not None
        made = cls(sizes, activation, final_activation, biased, device="meta")
        if keep_names:
            made._parts = tuple(names)
            made._modules = dict(zip(names, linears, strict=True))
        else:
            made.layers = torch.nn.ModuleList(linears)
        return made.train(modules.training)

    def _layers(self) -> dict[str, torch.nn.Module]:
        own = self._modules
        if self._parts is None:
            return own["layers"]._modules
        return {name: own[name] for name in self._parts}

    def reset_parameters(self) -> None:
        """Initialises the parameters again, as `torch.nn.Linear` does."""
        for layer in self._layers().values():
            layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """
        Args:
            x: `[..., K_0]`, any strides; dtypes as in `functional.linear_act`.

        Returns:
            `[..., K_n]`, in x's dtype; under autocast, in autocast's dtype.
        """
        if settings.linear_act == TORCH:
            return run_torch("linear_act", self, self._with_torch, x)
        layers = self._layers()
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
            why = f"layers.{missing[0]} has no bias, but other layers have one"
            return run_torch("linear_act", self, self._with_torch, x, why)
        try:
            return functional.mlp(x, weights, biases, self.activation, self.final_activation)
        except RuntimeError as error:
            blame_x(error, x, weights[0].shape[1])
            raise

    def _with_torch(self, x: Tensor) -> Tensor:
        *layers, last = self._layers().values()
        for layer in layers:
            x = ACTIVATIONS[self.activation](layer(x))
        return ACTIVATIONS[self.final_activation](last(x))

    __prepare_scriptable__ = refuse_script

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, final_activation={self.final_activation!r}"
