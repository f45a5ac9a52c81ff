"""BatchNorm (+ activation) + Squeeze-and-Excitation, wherever a block calls them in turn.

The norm and the excitation keep their places and names, so the operator's parameters are in two
modules. The norm hands on its input and itself, and the excitation runs the operator. What stands
between them only passes a value on: containers, and layers that are `Identity`. If something came
after the swap that the norm can see, such as a hook, each of the two computes its own part.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, fx, nn

from .. import functional
from .._ops import dtensor_error
from ..functional._transforms import is_symbolic
from ..nn import BatchNormAct2d, SqueezeExcitation
from ..nn._checks import full_name, unhooked
from ..nn._others import OTHER_EXCITATIONS, SQUEEZE_EXCITATIONS, TIMMS_NORM
from ..nn._parts import hooks_everywhere, ordinary
from .candidate import Candidate, Chain, Refused, Skipped, Slot
from .chains import Calls, activation_of, is_activation, traced
from .registry import has_own_pattern

_PATTERN = "BatchNorm + Squeeze-and-Excitation"


class Deferred:
    """A call of a norm that the excitation behind it computes."""

    def __init__(self, norm: "NormBeforeExcitation"):
        self.norm = norm
        self.with_gradients = torch.is_grad_enabled()
        self.computed = False


class NormBeforeExcitation(BatchNormAct2d):
    """A norm and an activation that the `ExcitationAfterNorm` behind it computes."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Deferred]:
        hooked = self._forward_hooks or self._backward_hooks or self._backward_pre_hooks
        if hooked or is_symbolic(x):
            return super().forward(x)
        return x, Deferred(self)


class ExcitationAfterNorm(SqueezeExcitation):
    """The norm, the activation and Squeeze-and-Excitation in one operator."""

    def forward(self, given: Tensor | tuple[Tensor, Deferred]) -> Tensor:
        if not isinstance(given, tuple):
            return super().forward(given)
        x, call = given
        norm = call.norm
        _check_surroundings(call)
        fc1, fc2 = (self._modules[name] for name in self._parts)
        # What has come since the swap: a process group, hooks, parametrisations, another dtype.
        if norm.process_group is not None or not _is_covered(norm, fc1, fc2):
            return super().forward(BatchNormAct2d.forward(norm, x))
        mean, var, tracked = norm.running_mean, norm.running_var, norm.num_batches_tracked
        # A checkpoint around the excitation alone calls it again; the norm was called once.
        if norm.training and (call.computed or not norm.track_running_stats):
            mean = var = tracked = None
        call.computed = True
        return functional.batch_norm_excite(
            x,
            mean,
            var,
            norm.weight,
            norm.bias,
            fc1.weight,
            fc1.bias,
            fc2.weight,
            fc2.bias,
            activation=norm.activation,
            hidden_activation=self.activation,
            gate=self.gate,
            training=norm.training,
            momentum=norm.momentum,
            eps=norm.eps,
            num_batches_tracked=tracked,
        )


def _check_surroundings(call: Deferred) -> None:
    """Raises an error if the norm was called in surroundings that have ended."""
    if call.with_gradients != torch.is_grad_enabled():
        raise RuntimeError(
            "BatchNorm + Squeeze-and-Excitation: expected gradients for both layers or for none; "
            "put the block that holds both into the checkpoint or under torch.no_grad()"
        )
    if any(dtensor_error("weight", each) for each in (call.norm.weight, call.norm.bias)):
        raise RuntimeError(
            "BatchNorm + Squeeze-and-Excitation: expected whole parameters of the norm, got a "
            "DTensor; apply fully_shard to the block that holds both layers"
        )


def _is_covered(norm: nn.Module, fc1: nn.Module, fc2: nn.Module) -> bool:
    """Whether the operator takes the parameters as they are, and no hook expects a call."""
    usual = ordinary((fc1, fc2), (nn.Conv2d, nn.Conv2d)) and not hooks_everywhere()
    return usual and len(_dtypes(norm, fc1, fc2)) == 1


def _dtypes(*modules: nn.Module) -> set[torch.dtype]:
    tensors = chain.from_iterable((each.weight, each.bias) for each in modules)
    return {each.dtype for each in (*tensors, modules[0].running_mean) if each is not None}


def norm_excitations(name: str, module: nn.Module) -> Iterator[Candidate | Skipped]:
    """The chains that end in one of a module's children. `name` is the module's."""
    ends = [key for key, child in module.named_children() if _is_excitation(child)]
    if not ends or not _has_norms(module):
        return
    try:
        graphs = traced(module, _Layers)
    except Exception as error:  # tracing runs any code, which may raise anything
        said = str(error).strip().split("\n")[0]
        reason = f"its forward cannot be traced: {type(error).__name__}: {said}"[:200]
        yield Skipped(name, _PATTERN, reason)
        return
    for end in ends:
        training, inference = (_back_to_the_norm(module, graph, end) for graph in graphs)
        if training and training == inference:
            yield _candidate(f"{name}." if name else "", module, training)


class _Layers(Calls):
    """Looks inside the modules that hold norms."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return _is_norm(module) or _is_excitation(module) or not _has_norms(module)


def _back_to_the_norm(module: nn.Module, graph: fx.Graph, end: str) -> list[str]:
    """A norm, possibly an activation, and the excitation, with each `Identity` between them.

    Empty if other layers feed the excitation, or if a result is read elsewhere too.
    """
    calls = {node: node.target for node in graph.nodes if node.op == "call_module"}
    targets = list(calls.values())
    node = next((node for node in calls if node.target == end), None)
    names, act = [], False
    while node in calls and targets.count(node.target) == 1:
        layer = module.get_submodule(node.target)
        if node.target != end and len(node.users) > 1:
            break
        names.insert(0, node.target)
        if _is_norm(layer):
            return [] if act and type(layer) is not nn.BatchNorm2d else names
        if not act and is_activation(layer):
            act = True
        elif node.target != end and type(layer) is not nn.Identity:
            break
        node = node.args[0] if len(node.args) == 1 and not node.kwargs else None
    return []


def _candidate(prefix: str, module: nn.Module, names: list[str]) -> Candidate:
    norm, *between, end = names
    act = [name for name in between if type(module.get_submodule(name)) is not nn.Identity]
    layers = [prefix + name for name in (norm, *act, end)]
    passed = {name for name in between if name not in act}
    for name in names:  # the containers that they are in
        parts = name.split(".")
        passed |= {".".join(parts[:count]) for count in range(1, len(parts))}

    def make(root: nn.Module) -> tuple[nn.Module, nn.Module]:
        for name in passed:
            unhooked(prefix + name, root.get_submodule(prefix + name))
        theirs = Chain(*map(root.get_submodule, layers))
        norm, *act, excitation = theirs.layers
        if full_name(type(norm)) == TIMMS_NORM:
            first = NormBeforeExcitation.from_module(norm)
        else:
            activation = activation_of(act[0]) if act else "identity"
            first = NormBeforeExcitation.from_batch_norm(norm, activation)
        try:
            second = ExcitationAfterNorm.from_module(excitation, keep_names=True)
        except (TypeError, ValueError) as error:
            raise Refused(f"{layers[-1]}: {error}") from error
        dtypes = _dtypes(norm, *map(excitation.get_submodule, second._parts))
        if len(dtypes) > 1:
            found = " and ".join(sorted(map(str, dtypes)))
            raise Refused(f"expected parameters of one dtype, got {found}")
        return theirs, Chain(first, second)

    slot = Slot(layers[0], make, layers[-1])
    return Candidate(layers[0], _PATTERN, (slot,), idle=tuple(layers[1:-1]))


def _is_excitation(module: nn.Module) -> bool:
    kind = full_name(type(module))
    known = kind in SQUEEZE_EXCITATIONS or kind in OTHER_EXCITATIONS
    return known and not has_own_pattern(module)


def _is_norm(module: nn.Module) -> bool:
    known = type(module) is nn.BatchNorm2d or full_name(type(module)) == TIMMS_NORM
    return known and not has_own_pattern(module)


def _has_norms(module: nn.Module) -> bool:
    return any(map(_is_norm, module.modules()))
