"""A place in a model where fused modules could run, and the edits that put them there."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Make = Callable[[nn.Module], tuple[nn.Module, nn.Module]]
"""From a model's root: a module that computes as the model does, and the fused one. Both are called
alike and share the model's parameters and buffers."""


class Refused(ValueError):
    """The fused operator would not compute what the module computes. The message says why."""


class Chain(nn.Module):
    """Layers that are called one after the other, with a residual added behind the first."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def __getattr__(self, name: str):
        """A model may look at a layer's weight. The first layer has what the fused module has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            layers = self.__dict__.get("_modules", {}).get("layers")
            if layers is None:
                raise
            return getattr(layers[0], name)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        first, *others = self.layers
        y = first(x)
        if residual is not None:
            y += residual
        for layer in others:
            y = layer(y)
        return y


@dataclass(frozen=True)
class Slot:
    """A submodule that a fused one replaces."""

    place: str
    """The submodule's name; "" is the model itself."""
    make: Make
    end: str = ""
    """If the fused module is a chain of two, the name of the submodule that the second replaces."""


@dataclass(frozen=True)
class Candidate:
    """Slots that are swapped together."""

    name: str
    """Of the first module that it concerns."""
    pattern: str
    slots: tuple[Slot, ...]
    idle: tuple[str, ...] = ()
    """Submodules whose work a slot does. They become `Identity`."""
    block: type[nn.Module] | None = None
    """The class that the module `name` gets, whose forward passes residuals to the slots."""
    touched: tuple[str, ...] = ()
    """Further submodules whose work a slot does, and that stay where they are."""
    parts: tuple[str, ...] = ()
    """Keys of the candidates that it is an alternative to: each does a part of its work."""

    @property
    def key(self) -> str:
        """Unique in a model."""
        return f"{self.slots[0].place}: {self.pattern}"


@dataclass(frozen=True)
class Skipped:
    """A module that a pattern matched, and why it cannot be swapped."""

    name: str
    pattern: str
    reason: str


class Root(nn.Module):
    """Holds a model, so that the model itself can be replaced like any submodule."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def place(self, name: str) -> tuple[nn.Module, str]:
        """The parent of a submodule of the model, and the submodule's name in it."""
        parent, _, leaf = f"model.{name}".rstrip(".").rpartition(".")
        return (self.get_submodule(parent) if parent else self), leaf


@dataclass
class Edits:
    """Changes of a tree of modules that can be undone."""

    root: Root
    made: dict[Slot, tuple[nn.Module, nn.Module]] = field(default_factory=dict)
    """By slot: the module that computes as the model does, and the fused one."""
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def replace(self, name: str, module: nn.Module) -> None:
        parent, leaf = self.root.place(name)
        before = parent._modules[leaf]

        def undo():
            take_over(before, parent._modules[leaf])
            parent._modules[leaf] = before

        self._undo.append(undo)
        parent._modules[leaf] = module

    def change_class(self, name: str, cls: type[nn.Module]) -> None:
        parent, leaf = self.root.place(name)
        module = parent._modules[leaf]
        before = type(module)
        self._undo.append(lambda: setattr(module, "__class__", before))
        module.__class__ = cls

    def compile(self) -> None:
        model = self.root.model
        self._undo.append(lambda: setattr(model, "_compiled_call_impl", None))
        model.compile()

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def apply(root: Root, candidates: Iterable[Candidate], fused: bool = True) -> Edits:
    """Puts the fused modules into their slots, or those that compute as the model does.

    If that fails, the tree is as it was.
    """
    edits = Edits(root)
    try:
        for candidate in candidates:
            made = {slot: slot.make(root.model) for slot in candidate.slots}
            edits.made |= made
            for slot, modules in made.items():
                module, end = modules[fused], nn.Identity()
                if slot.end and fused:
                    module, end = module.layers
                edits.replace(slot.place, module)
                if slot.end:
                    edits.replace(slot.end, end)
            for name in candidate.idle:
                edits.replace(name, nn.Identity().train(root.model.get_submodule(name).training))
            if candidate.block:
                edits.change_class(candidate.name, candidate.block)
    except BaseException:
        edits.undo()
        raise
    return edits


def take_over(old: nn.Module, new: nn.Module) -> None:
    """Gives a module that returns the parameters, buffers and modes of its replacement.

    They may have moved to another device or dtype since.
    """
    theirs = dict(new.named_modules())
    for name, module in old.named_modules():
        if name in theirs and not isinstance(module, torch.jit.ScriptModule):
            for kind in ("_parameters", "_buffers"):
                there, mine = getattr(theirs[name], kind), getattr(module, kind)
                mine.update({key: there[key] for key in mine.keys() & there.keys()})
            module.training = theirs[name].training
