"""BatchNorm over the samples of all processes of a group.

Each process computes the statistics of its own samples, gathers those of the others and normalises
with all of them. Backward does the same with the sums that dx needs. The collectives are
torch.distributed's: a process that dies gives the others its error, at the latest after the group's
timeout.
"""

import torch
from torch import Tensor

from .. import _ops
from .._settings import TORCH, settings
from ._transforms import direct_apply, needs_formula, needs_graph

_OPERATOR = _ops.BATCH_NORM_ACT
_INDEX = {rule.name: i for i, rule in enumerate(_OPERATOR.inputs)}
_RESIDUAL, _BLANKED, _GROUP = (_INDEX[name] for name in ("residual", "blanked", "group"))


def is_shared(process_group) -> bool:
    """Whether other processes take part. Raises unless it is a process group or None."""
    if process_group is None:
        return False
    if torch.distributed.is_available():
        if isinstance(process_group, torch.distributed.ProcessGroup):
            return process_group.size() > 1
        wanted = "a torch.distributed.ProcessGroup or None"
    else:
        wanted = "None, because this torch has no torch.distributed"
    kind = f"{type(process_group).__module__}.{type(process_group).__qualname__}"
    raise TypeError(f"process_group: expected {wanted}, got {kind.removeprefix('builtins.')}")


def synchronized(function, tensors, words, flags, numbers, process_group) -> Tensor:
    """Calls the operator with the statistics of the whole group. The last of the tensors is None,
    in their place."""
    if torch.compiler.is_compiling():  # at import, `disable` as a decorator would load the compiler
        eager = torch.compiler.disable(synchronized)
        return eager(function, tensors, words, flags, numbers, process_group)
    forced = getattr(settings, function.name)
    if forced == TORCH or needs_formula():
        raise RuntimeError(
            "process_group: torch's own operators, which torch.func transforms and "
            '`fusewise.implementation("torch")` need, cannot share statistics; '
            "pass process_group=None there"
        )
    forced_backward = getattr(settings, function.name + "_backward")
    call = (function, words, flags, numbers, forced, forced_backward, process_group)
    try:
        y = _direct_apply(call, *tensors)
    except AttributeError as error:
        raise _OPERATOR.wrong_type(tensors, words) or error from None
    if settings.records is not None:
        x = tensors[0]
        shape = (*x.shape[:-4], 3, x.shape[-3])
        tensors = (*tensors[:-1], x.new_empty(shape, dtype=_ops.wide_dtype(x)))
        function.record(tensors, words, (*flags, *numbers), y.requires_grad)
    return y


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, *tensors):
        function, words, flags, numbers, forced, _, process_group = call
        _OPERATOR.check(tensors, words)  # before the others wait for this process
        own = _ops.batch_norm_statistics(tensors[0], tensors[_BLANKED])
        tensors = (*tensors[:_GROUP], _combined(own, process_group))
        y, saved = _OPERATOR.forward(*tensors, *words, *flags, *numbers, True, forced)
        ctx.call = call
        ctx.passed_on = function.passed_on(words, tensors)
        ctx.save_for_backward(*_OPERATOR.kept(tensors, words)[:_GROUP], saved)
        return y

    @staticmethod
    def backward(ctx, gradient):
        if needs_graph():
            raise RuntimeError(
                "process_group: there is no second backward through statistics that several "
                "processes share; pass process_group=None"
            )
        _, words, flags, _, _, forced, process_group = ctx.call
        *kept, saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        found = dict.fromkeys(range(len(needed)))

        def find(wanted, group):
            wanted = [i for i in wanted if i == _GROUP or needed[i]]
            if not wanted:
                return
            mask = sum(1 << i for i in wanted)
            read = [(*kept, group, saved)[i] for i in _OPERATOR.read_back]
            results = _OPERATOR.backward(gradient, *read, *words, *flags, mask, forced)
            found.update(zip(wanted, results, strict=True))

        find([_INDEX["weight"], _INDEX["bias"], *[_GROUP] * needed[0]], None)
        sums = found.pop(_GROUP)
        if needed[0]:
            torch.distributed.all_reduce(sums, group=process_group)
        if ctx.passed_on is not None and needed[_RESIDUAL]:
            find([0], sums)
            found[_RESIDUAL] = gradient
        else:
            find([0, _RESIDUAL], sums)
        return None, *found.values(), None


_direct_apply = direct_apply(_Call)


def _combined(own: Tensor, process_group) -> Tensor:
    """The statistics of all processes from those of each, in the order of the ranks."""
    parts = own.new_empty((process_group.size(), *own.shape))
    torch.distributed.all_gather(list(parts), own, group=process_group)
    counts, means, variances = parts.double().unbind(-2)
    count = counts.sum(0)
    per_value = 1 / count.clamp_min(1)
    mean = (counts * means).sum(0) * per_value
    squares = (counts * (variances + (means - mean).square())).sum(0)
    return torch.stack([count, mean, squares * per_value], -2).to(own.dtype)
