"""Modules of torch, torchvision and timm that ours can replace, and how to find their parts.

torchvision's and timm's classes are matched by their full names, so neither has to be installed.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from .._ops import BATCH_NORM_ACT, SQUEEZE_EXCITE
from ._checks import (
    activation_of,
    full_name,
    function_of,
    plain_convolution,
    plain_linear,
    unhooked,
)

# Names of the first convolution, the activation, the second convolution, and the gate.
SQUEEZE_EXCITATIONS = {
    "torchvision.ops.misc.SqueezeExcitation": ("fc1", "activation", "fc2", "scale_activation"),
    "timm.layers.squeeze_excite.SEModule": ("fc1", "act", "fc2", "gate"),
    "timm.models._efficientnet_blocks.SqueezeExcite": (
        "conv_reduce",
        "act1",
        "conv_expand",
        "gate",
    ),
    "timm.models.senet.SEModule": ("fc1", "relu", "fc2", "sigmoid"),
}
OTHER_EXCITATIONS = {
    "timm.layers.squeeze_excite.EffectiveSEModule": "has one convolution (fc) and no hidden layer",
    "timm.layers.squeeze_excite.SqueezeExciteCl": "has the channels in the last dimension",
}
TIMMS_NORM = "timm.layers.norm_act.BatchNormAct2d"
TIMMS_MLP = "timm.layers.mlp.Mlp"
_MLP_PARTS = ("fc1", "act", "drop1", "norm", "fc2", "drop2")  # in the order of the calls


class ExcitationParts(NamedTuple):
    fc1: nn.Conv2d
    activation: str
    fc2: nn.Conv2d
    gate: str
    names: tuple[str, str]
    """Of the two convolutions in the module."""


class StackParts(NamedTuple):
    linears: list[nn.Linear]
    activation: str
    """Of all layers but the last; "relu" if there is only one layer."""
    final_activation: str
    names: list[str]
    """Of the layers in the module."""


def excitation_parts(module: nn.Module) -> ExcitationParts:
    """The parts of a Squeeze-and-Excitation module of torchvision or timm.

    Raises TypeError or ValueError, naming the part, if ours would compute something else.
    """
    kind = _kind_of(module, (*SQUEEZE_EXCITATIONS, *OTHER_EXCITATIONS))
    if why := OTHER_EXCITATIONS.get(kind):
        raise TypeError(f"module: {kind} {why}, which the fused operator does not compute")
    if not kind:
        raise TypeError(
            f"module: expected one of {', '.join(SQUEEZE_EXCITATIONS)}, "
            f"got {full_name(type(module))}"
        )
    unhooked("module", module)
    first, activation, second, gate = SQUEEZE_EXCITATIONS[kind]
    fc1, fc2 = getattr(module, first), getattr(module, second)
    plain_convolution(f"module.{first}", fc1)
    plain_convolution(f"module.{second}", fc2)
    if (fc2.in_channels, fc2.out_channels) != (fc1.out_channels, fc1.in_channels):
        raise ValueError(
            f"module.{second}: expected {fc1.out_channels} channels to {fc1.in_channels}, "
            f"got {fc2.in_channels} to {fc2.out_channels}"
        )
    _check_pooling(module)
    if hasattr(module, "bn"):
        function_of("module.bn", module.bn, ("identity",))
    activations, gates = SQUEEZE_EXCITE.choices.values()
    return ExcitationParts(
        fc1,
        function_of(f"module.{activation}", getattr(module, activation), activations),
        fc2,
        function_of(f"module.{gate}", getattr(module, gate), gates),
        (first, second),
    )


def _check_pooling(module: nn.Module) -> None:
    if getattr(module, "add_maxpool", False):
        raise ValueError(
            "module.add_maxpool: expected False, got True; the fused operator pools by the mean"
        )
    if not hasattr(module, "avgpool"):
        return
    pool = module.avgpool
    if type(pool) is not nn.AdaptiveAvgPool2d or pool.output_size not in (1, (1, 1)):
        found = full_name(type(pool)) if type(pool) is not nn.AdaptiveAvgPool2d else pool
        raise ValueError(f"module.avgpool: expected AdaptiveAvgPool2d(1), got {found}")
    unhooked("module.avgpool", pool)


def norm_activation(module: nn.Module) -> str:
    """The activation of timm's BatchNormAct2d.

    Raises TypeError or ValueError, naming the part, if ours would compute something else.
    """
    if full_name(type(module)) != TIMMS_NORM:
        raise TypeError(f"module: expected {TIMMS_NORM}, got {full_name(type(module))}")
    unhooked("module", module)
    function_of("module.drop", module.drop, ("identity",))
    return function_of("module.act", module.act, BATCH_NORM_ACT.choices["activation"])


def stack_parts(modules: nn.Module) -> StackParts:
    """The layers and activations of a Sequential or of timm's Mlp.

    Raises TypeError or ValueError, naming the part, if a fused stack would compute something else.
    """
    linears, kinds = _layers_of(modules)
    hidden = set(kinds[:-1])
    if len(hidden) > 1:
        names = ", ".join(sorted(hidden))
        raise ValueError(
            f"modules: expected one activation for all layers but the last, got {names}"
        )
    if len({linear.bias is None for linear in linears}) > 1:
        raise ValueError("modules: expected a bias in all layers or in none")
    places = {id(module): name for name, module in modules.named_children()}
    names = [places[id(linear)] for linear in linears]
    return StackParts(linears, *(hidden or {"relu"}), kinds[-1], names)


def _named_parts(modules: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts with their names, in the order in which forward calls them."""
    if _kind_of(modules, (TIMMS_MLP,)):
        yield from ((f"modules.{part}", getattr(modules, part)) for part in _MLP_PARTS)
        return
    kind = full_name(type(modules))
    if not isinstance(modules, nn.Sequential):
        raise TypeError(f"modules: expected a torch.nn.Sequential or {TIMMS_MLP}, got {kind}")
    if type(modules).forward is not nn.Sequential.forward:
        raise TypeError(f"modules: {kind} overrides forward, which a fused stack would not call")
    yield from ((f"modules[{i}]", module) for i, module in enumerate(modules))


def _layers_of(modules: nn.Module) -> tuple[list[nn.Linear], list[str]]:
    """The linear layers, and the activation after each."""
    linears, kinds = [], []
    behind_linear = False
    for name, module in _named_parts(modules):
        if isinstance(module, nn.Linear):
            plain_linear(name, module)
            if linears and linears[-1].out_features != module.in_features:
                raise ValueError(
                    f"{name}: expected {linears[-1].out_features} in_features, "
                    f"got {module.in_features}"
                )
            linears.append(module)
            kinds.append("identity")
            behind_linear = True
            continue
        if type(module) is nn.Dropout:
            _check_dropout(name, module)
            continue
        kind = activation_of(name, module, "Linear, Dropout(0), ")
        if kind == "identity":
            continue
        if not behind_linear:
            raise ValueError(f"{name}: expected a Linear before {full_name(type(module))}")
        kinds[-1] = kind
        behind_linear = False
    unhooked("modules", modules)
    if not linears:
        raise ValueError("modules: expected at least one Linear")
    return linears, kinds


def _check_dropout(name: str, module: nn.Dropout) -> None:
    unhooked(name, module)
    if module.p > 0:
        raise ValueError(
            f"{name}: expected Dropout(0), got Dropout({module.p:g}), which a fused stack would "
            "not apply in training; set p to 0 if it is not needed"
        )


def _kind_of(module: nn.Module, known: tuple[str, ...]) -> str:
    """The name of the known class that the module is, or inherits its computation from; else ''."""
    cls = type(module)
    for kind in cls.__mro__:
        if full_name(kind) in known:
            methods = ("__call__", "forward", "_scale")  # torchvision's forward calls the last
            same = all(getattr(cls, each, None) is getattr(kind, each, None) for each in methods)
            return full_name(kind) if same and "_scale" not in module.__dict__ else ""
    return ""
