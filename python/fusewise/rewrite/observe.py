"""Runs a model once and looks at what each slot really gets."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..bench.accuracy import Check
from .candidate import Candidate, Edits, Slot
from .setting import Setting


@dataclass
class Seen:
    """What one slot got."""

    inputs: tuple
    """Of the first call. Empty for shapes that another slot has had before."""
    kind: object
    """Equal for slots that take the same time."""
    shape: list[int]
    setting: Setting
    calls: int = 0
    check: Check | None = None
    failure: str = ""


def observe(
    edits: Edits,
    candidates: list[Candidate],
    setting: Setting,
    check: Callable[..., Check] | None,
    progress,
) -> dict[Slot, Seen]:
    """By slot: what the model calls it with. Verifies each fused module on that, in place.

    `check` compares two modules on inputs in a setting; None: nothing is verified.

    The tree has modules that compute as the model does in its slots, so the fused ones get the
    model's own values, and the check needs the memory of one slot at a time.
    """
    seen: dict[Slot, Seen] = {}
    known: set[object] = set()
    handles = []
    for candidate in candidates:
        for slot in candidate.slots:
            before, after = edits.made[slot]

            def look(module, args, kwargs, slot=slot, pattern=candidate.pattern, after=after):
                if slot in seen:
                    seen[slot].calls += 1
                    return
                progress.now(slot.place)
                seen[slot] = _seen(module, after, pattern, args, kwargs, setting, check, known)
                progress.advance()

            handles.append(before.register_forward_pre_hook(look, with_kwargs=True))
    try:
        with torch.no_grad():
            setting.run(edits.root.model)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _seen(before, after, pattern, args, kwargs, setting, check, known) -> Seen:
    here = setting.here()
    tensors = [value for value in args if isinstance(value, Tensor)]
    shape = list(tensors[0].shape) if tensors else []
    kind = _kind(before, after, pattern, args, here)
    found = Seen((), kind, shape, here, calls=1)
    if kwargs:
        found.failure = f"is called with keyword arguments: {', '.join(kwargs)}"
        return found
    if kind not in known:
        known.add(kind)
        found.inputs = tuple(v.detach().clone() if isinstance(v, Tensor) else v for v in args)
    if check:
        # The check calls `before` again, which must not come back here.
        hooks = before._forward_pre_hooks
        before._forward_pre_hooks = OrderedDict()
        try:
            found.check = check(before, after, args, here)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a conversion of the user's may raise anything
            found.failure = str(error).strip().split("\n")[0][:200] or type(error).__name__
        finally:
            before._forward_pre_hooks = hooks
    return found


def _kind(before: nn.Module, after: nn.Module, pattern: str, args: tuple, setting: Setting):
    inputs = tuple(
        (tuple(v.shape), v.dtype, v.stride()) if isinstance(v, Tensor) else repr(v) for v in args
    )
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in after.named_parameters()
    )
    modes = tuple(module.training for module in before.modules())
    return pattern, repr(after), inputs, parameters, modes, setting.dtype
