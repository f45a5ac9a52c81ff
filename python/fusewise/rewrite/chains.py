"""BatchNorm + activation (+ max-pool), Linear + activation, wherever a module calls them in turn.

torch.fx traces the forward of the module that calls them, once in each mode. The traced program
only tells which layers follow each other; it never runs.
"""

from collections.abc import Iterator

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import BatchNorm2d

from .._ops import ACTIVATIONS, BATCH_NORM_ACT
from ..nn import BatchNormAct2d, LinearAct
from ..nn._checks import full_name, function_of, unhooked
from .candidate import Candidate, Chain, Refused, Skipped, Slot

_KNOWN = {BatchNorm2d: BATCH_NORM_ACT.choices["activation"], nn.Linear: ACTIVATIONS}
_NAMES = {BatchNorm2d: "BatchNorm + activation", nn.Linear: "Linear + activation"}
_FUNCTIONS = ("relu", "relu_", "relu6", "gelu", "silu", "hardswish")
_WITH_POOL = "BatchNorm + activation + max-pool"


def chains(name: str, module: nn.Module) -> Iterator[Candidate | Skipped]:
    """The chains that a module's own forward calls. `name` is the module's."""
    starts = [child for child in module.children() if type(child) in _KNOWN]
    if not starts:
        return
    missed: dict[str, str] = {}
    if type(module).forward is nn.Sequential.forward:
        found = _adjacent(module)
    else:
        try:
            found, missed = _traced(module)
        except Exception as error:  # tracing runs any code, which may raise anything
            if not any(map(is_activation, module.children())):
                return
            said = str(error).strip().split("\n")[0]
            reason = f"its forward cannot be traced: {type(error).__name__}: {said}"[:200]
            yield Skipped(name, _NAMES[type(starts[0])], reason)
            return
    for parts in found:
        yield _candidate(name, module, parts)
    for part, reason in missed.items():
        kind = type(module.get_submodule(part))
        yield Skipped(f"{name}.{part}".lstrip("."), _NAMES[kind], reason)


def _candidate(name: str, module: nn.Module, parts: list[str]) -> Candidate:
    layers = [module.get_submodule(part) for part in parts]
    pattern = _WITH_POOL if len(parts) == 3 else _NAMES[type(layers[0])]
    places = [f"{name}.{part}".lstrip(".") for part in parts]
    kind = type(layers[0])

    def make(root: nn.Module) -> tuple[nn.Module, nn.Module]:
        layers = [root.get_submodule(place) for place in places]
        activation = activation_of(layers[1], kind)
        if kind is nn.Linear:
            return Chain(*layers), LinearAct.from_linear(layers[0], activation)
        pool = len(layers) == 3
        if pool:
            unhooked("max-pool", layers[2])
        fused = BatchNormAct2d.from_batch_norm(layers[0], activation, max_pool=pool)
        return Chain(*layers), fused

    return Candidate(places[0], pattern, (Slot(places[0], make),), tuple(places[1:]))


def activation_of(module: nn.Module, kind: type[nn.Module] = BatchNorm2d) -> str:
    """The name of an activation behind a BatchNorm2d or a Linear."""
    try:
        return function_of("activation", module, _KNOWN[kind])
    except TypeError as error:
        raise Refused(str(error)) from error


class Calls(fx.Tracer):
    """Records the calls of submodules, without looking inside."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return True


def _traced(module: nn.Module) -> tuple[list[list[str]], dict[str, str]]:
    """The chains that the module calls in training and in inference alike.

    Also the layers with an activation behind them that is no chain, and why.
    """
    found = [_in_graph(module, graph) for graph in traced(module, Calls)]
    (training, missed), (inference, _) = found
    return [parts for parts in training if parts in inference], missed


def traced(module: nn.Module, tracer: type[fx.Tracer]) -> list[fx.Graph]:
    """What the module's forward calls in training, and in inference."""
    modes = [
        (inner, inner.training)
        for inner in module.modules()
        if not isinstance(inner, torch.jit.ScriptModule)  # a frozen one has no mode
    ]
    found = []
    try:
        for training in (True, False):
            for inner, _ in modes:
                inner.training = training
            found.append(tracer().trace(module))
    finally:
        for inner, mode in modes:
            inner.training = mode
    return found


def _in_graph(module: nn.Module, graph: fx.Graph) -> tuple[list[list[str]], dict[str, str]]:
    calls = [node for node in graph.nodes if node.op == "call_module"]
    targets = [node.target for node in calls]
    found, missed = [], {}
    for node in calls:
        layer = module.get_submodule(node.target)
        if type(layer) not in _KNOWN or targets.count(node.target) > 1:
            continue
        parts = [node.target]
        if function := _only_function(node):
            missed[node.target] = f"{function} is called as a function; use a module of torch.nn"
        while (node := _only_reader(node)) is not None:
            layer = module.get_submodule(node.target)
            if type(layer) is nn.Identity:
                continue
            if targets.count(node.target) > 1 and len(parts) == 1 and is_activation(layer):
                missed[parts[0]] = (
                    f"{node.target} is called in several places; use a module for each of them"
                )
            if targets.count(node.target) > 1 or not _continues(module, parts, layer):
                break
            parts.append(node.target)
        if len(parts) > 1:
            found.append(parts)
    return found, missed


def _only_function(node: fx.Node) -> str | None:
    """The activation that alone reads a node, if it is a function and not a module."""
    (reader,) = node.users if len(node.users) == 1 else (None,)
    if reader is None or reader.op not in ("call_function", "call_method"):
        return None
    called = getattr(reader.target, "__name__", reader.target)
    return called if called in _FUNCTIONS else None


def _only_reader(node: fx.Node) -> fx.Node | None:
    """The call of a layer that alone reads a node."""
    if len(node.users) != 1:
        return None
    (reader,) = node.users
    alone = reader.op == "call_module" and reader.args == (node,) and not reader.kwargs
    return reader if alone else None


def _adjacent(module: nn.Sequential) -> list[list[str]]:
    found: list[list[str]] = []
    growing = False
    for name, layer in module._modules.items():  # named_children leaves out a layer's second name
        if type(layer) in _KNOWN:
            found.append([name])
            growing = True
        elif growing and type(layer) is not nn.Identity:
            growing = _continues(module, found[-1], layer)
            if growing:
                found[-1].append(name)
    return [parts for parts in found if len(parts) > 1]


def _continues(module: nn.Module, parts: list[str], layer: nn.Module) -> bool:
    if len(parts) == 1:
        return is_activation(layer)
    norm = type(module.get_submodule(parts[0])) is BatchNorm2d
    return len(parts) == 2 and norm and _is_the_stems_pool(layer)


def is_activation(layer: nn.Module) -> bool:
    kind = full_name(type(layer))
    inside = kind.startswith(("torch.nn.modules.activation.", "timm.layers.activations"))
    return inside and not any(True for _ in layer.parameters())


def _is_the_stems_pool(layer: nn.Module) -> bool:
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    wanted = (layer.kernel_size, 3), (layer.stride, 2), (layer.padding, 1), (layer.dilation, 1)
    return all(found in (number, (number, number)) for found, number in wanted)
