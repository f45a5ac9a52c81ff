"""Walks through a model and collects the candidates, and what was refused and why."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import nn

from ..nn import BatchNormAct2d
from ..nn._checks import full_name
from ..nn._others import TIMMS_NORM
from .candidate import Candidate, Refused, Skipped, Slot
from .chains import chains
from .norm_excite import norm_excitations
from .registry import Choice, conversion
from .residual import residual_blocks
from .trees import hooks_of, is_opaque


def find(
    copy: nn.Module,
    model: nn.Module,
    training: bool,
    include: Choice | Iterable[Choice] | None = None,
    exclude: Choice | Iterable[Choice] | None = None,
) -> tuple[list[Candidate], list[Skipped]]:
    """The candidates of a model, in the order of its modules, and what cannot be swapped.

    `copy` is a scratch copy of `model`: tracing runs its code. A copy does not know that a module
    was compiled.
    """
    wanted, unwanted = _Names("include", include, copy), _Names("exclude", exclude, copy)

    def is_chosen(name: str) -> bool:
        return (include is None or name in wanted) and name not in unwanted

    shared = _used_twice(copy)
    visible = list(_visible(copy, model))
    hidden = [
        name for name, module in model.named_modules(remove_duplicate=False) if is_opaque(module)
    ]

    def is_hidden(candidate: Candidate) -> bool:
        """Whether a part of it is scripted or compiled."""
        claims = _claims(candidate)
        return any(f"{claim}.".startswith(f"{name}.") for claim in claims for name in hidden)

    found: dict[str, Candidate] = {}
    skipped: list[Skipped] = []
    for pattern in (_conversions, _residual, _chains, _norms):
        for name, module in visible:
            for candidate in pattern(name, module, training):
                if not is_chosen(candidate.name):
                    continue
                if isinstance(candidate, Candidate):
                    overlaps = any(_overlap(candidate, other) for other in found.values())
                    if overlaps or is_hidden(candidate):
                        continue
                    candidate = _checked(candidate, copy, shared)
                if isinstance(candidate, Candidate):
                    found[candidate.key] = candidate
                elif not any(_inside(candidate.name, other) for other in found.values()) and all(
                    candidate.name != other.name for other in skipped
                ):
                    skipped.append(candidate)
    alternatives = []
    for candidate in chain.from_iterable(norm_excitations(*each) for each in visible):
        if isinstance(candidate, Candidate):
            parts = [other for other in found.values() if _overlap(candidate, other)]
            inside = all(_inside(each, candidate) for part in parts for each in _claims(part))
            if not inside or not all(map(is_chosen, _claims(candidate))) or is_hidden(candidate):
                continue
            keys = tuple(part.key for part in parts)
            candidate = _checked(replace(candidate, parts=keys), copy, shared)
        if isinstance(candidate, Candidate):
            alternatives.append(candidate)
        elif is_chosen(candidate.name) and all(
            (candidate.name, candidate.reason) != (other.name, other.reason) for other in skipped
        ):
            skipped.append(candidate)
    order = {name: place for place, (name, _) in enumerate(visible)}
    both = (*found.values(), *alternatives)
    return sorted(both, key=lambda each: order[each.name]), skipped


def _conversions(name: str, module: nn.Module, _: bool) -> Iterator[Candidate]:
    if known := conversion(module):
        pattern, convert = known

        def make(root: nn.Module) -> tuple[nn.Module, nn.Module]:
            theirs = root.get_submodule(name)
            fused = convert(theirs)
            _check_conversion(theirs, fused)
            fused.training = theirs.training
            return theirs, fused

        yield Candidate(name, pattern, (Slot(name, make),))


def _residual(name: str, module: nn.Module, training: bool) -> Iterator[Candidate | Skipped]:
    return residual_blocks(name, module, training)


def _chains(name: str, module: nn.Module, _: bool) -> Iterator[Candidate | Skipped]:
    return chains(name, module)


def _norms(name: str, module: nn.Module, _: bool) -> Iterator[Candidate]:
    """Norms that no other pattern takes: in front of stochastic depth, in a downsampling path."""
    plain = type(module) is nn.BatchNorm2d
    if not plain and not (
        full_name(type(module)) == TIMMS_NORM and type(module.act) is nn.Identity
    ):
        return

    def make(root: nn.Module) -> tuple[nn.Module, nn.Module]:
        theirs = root.get_submodule(name)
        if plain:
            return theirs, BatchNormAct2d.from_batch_norm(theirs, "identity")
        return theirs, BatchNormAct2d.from_module(theirs)

    yield Candidate(name, "BatchNorm", (Slot(name, make),))


def _check_conversion(theirs: nn.Module, ours: nn.Module) -> None:
    if not isinstance(ours, nn.Module):
        raise Refused(f"the conversion returned {type(ours).__name__}, not a module")
    for what in ("named_parameters", "named_buffers"):
        names, made = dict(getattr(theirs, what)()), dict(getattr(ours, what)())
        if names.keys() != made.keys() or any(names[key] is not made[key] for key in names):
            raise Refused(
                f"the replacement's {what[6:]} are not the module's own under the same names: "
                f"expected {', '.join(names) or 'none'}, got {', '.join(made) or 'none'}"
            )


def _checked(candidate: Candidate, model: nn.Module, shared: dict[str, str]):
    """The candidate, or why it cannot be swapped."""
    try:
        for slot in candidate.slots:
            slot.make(model)
        ends = (slot.end for slot in candidate.slots if slot.end)
        for name in chain((slot.place for slot in candidate.slots), candidate.idle, ends):
            module = model.get_submodule(name)
            if any(True for inner in module.modules() for _ in hooks_of(inner)):
                raise Refused(f"{name} has hooks, which would be lost; remove them first")
            for inner, _ in chain(module.named_parameters(), module.named_buffers()):
                full = f"{name}.{inner}".lstrip(".")
                if full in shared:
                    raise Refused(f"{full} is also used as {shared[full]}")
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError) as error:
        return Skipped(candidate.name, candidate.pattern, str(error))
    except Exception as error:  # a conversion of the user's may raise anything
        said = f"{type(error).__name__}: {error}"
        return Skipped(candidate.name, candidate.pattern, said)
    return candidate


def _used_twice(model: nn.Module) -> dict[str, str]:
    """For each parameter and buffer that has several names: another one of them."""
    names = defaultdict(list)
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        names[id(tensor)].append(name)
    return {
        name: next(other for other in group if other != name)
        for group in names.values()
        if len(group) > 1
        for name in group
    }


def _visible(copy: nn.Module, model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of the copy, by name, that are not inside a scripted or compiled one."""
    if is_opaque(model):
        return
    yield name, copy
    for child_name, child in copy.named_children():
        theirs = getattr(model, child_name)
        yield from _visible(child, theirs, f"{name}.{child_name}".lstrip("."))


def _overlap(one: Candidate, other: Candidate) -> bool:
    return any(
        a == b or a == "" or b == "" or a.startswith(f"{b}.") or b.startswith(f"{a}.")
        for a in _claims(one)
        for b in _claims(other)
    )


def _inside(name: str, candidate: Candidate) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in _claims(candidate))


def _claims(candidate: Candidate) -> list[str]:
    """The submodules whose work a candidate does."""
    places = [slot.place for slot in candidate.slots]
    ends = [slot.end for slot in candidate.slots if slot.end]
    return [*places, *candidate.idle, *candidate.touched, *ends]


class _Names:
    """The modules that were chosen by name or class, and all inside of them."""

    def __init__(self, argument: str, chosen, model: nn.Module):
        several = isinstance(chosen, Iterable) and not isinstance(chosen, (str, type))
        choices = list(chosen) if several else [chosen]
        modules = dict(model.named_modules())
        self._found = set()
        for choice in [] if chosen is None else choices:
            if not isinstance(choice, (str, type)):
                raise TypeError(f"{argument}: expected names or classes, got {choice!r}")
            hits = {
                name
                for name, module in modules.items()
                if (
                    fnmatchcase(name, choice)
                    if isinstance(choice, str)
                    else isinstance(module, choice)
                )
            }
            if not hits:
                raise ValueError(f"{argument}: {choice!r} matches no module of the model")
            self._found |= hits

    def __contains__(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:i]) in self._found for i in range(len(parts) + 1))
