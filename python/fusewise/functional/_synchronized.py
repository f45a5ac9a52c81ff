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
    except (RuntimeError, ValueError, AttributeError) as error:
        raise function.clear(error, tensors, words, flags, numbers) from None
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
        operator = function.operator
        operator.check(tensors, words, flags, numbers)  # before the others wait for this process
        own = _ops.batch_norm_statistics(tensors[0], tensors[operator.index["blanked"]])
        tensors = (*tensors[:-1], _combined(own, process_group))
        y, saved = operator.forward(*tensors, *words, *flags, *numbers, True, forced)
        ctx.call = call
        ctx.passed_on = function.passed_on(words, tensors)
        ctx.strides = tensors[0].stride()
        ctx.save_for_backward(*operator.kept(tensors, words)[:-1], saved)
        return y

    @staticmethod
    def backward(ctx, gradient):
        if needs_graph():
            raise RuntimeError(
                "process_group: there is no second backward through statistics that several "
                "processes share; pass process_group=None"
            )
        function, words, flags, _, _, forced, process_group = ctx.call
        operator = function.operator
        kept, dy = function.arranged(ctx.saved_tensors, gradient, ctx.strides)
        *kept, saved = kept
        needed = ctx.needs_input_grad[1:]
        found = dict.fromkeys(operator.index)
        wanted = {name for name, i in operator.index.items() if needed[i]}
        if ctx.passed_on is not None:
            (name,) = {operator.inputs[ctx.passed_on].name} & wanted or {None}
            found[name] = gradient
            wanted -= {name}

        def find(names, group):
            names = [name for name in operator.index if name in names]
            if not names:
                return
            mask = sum(1 << operator.index[name] for name in names)
            read = [(*kept, group, saved)[i] for i in operator.read_back]
            results = operator.backward(dy, *read, *words, *flags, mask, forced)
            found.update(zip(names, results, strict=True))

        find(wanted & {"weight", "bias"} | ({"group"} if needed[0] else set()), None)
        if needed[0]:
            torch.distributed.all_reduce(found["group"], group=process_group)
        find(wanted & {"x", "residual"}, found["group"])
        found["group"] = None
        return None, *[found[name] for name in operator.index]


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
