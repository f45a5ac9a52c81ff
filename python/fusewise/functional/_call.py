"""Calls an operator: applies a forced implementation, records for `explain`, sets up autograd."""

from collections.abc import Callable

import torch
from torch import Tensor

from .. import _ops
from .._explain import record, record_torch
from .._settings import TORCH, settings
from .._torch_private import is_batched_gradient
from ._transforms import (
    SEEN_THROUGH,
    direct_apply,
    formula_gradients,
    needs_formula,
    needs_graph,
    refuse_exporters,
    refuse_forced,
)


class Function:
    """A fused operator together with the same formula in torch's own operators.

    `formula(*tensors, *words)` is used under torch.func, forward-mode AD and double backward, which
    only work on torch's own operators. `plain` runs when "torch" is forced. It computes what a
    module built from torch's own operators would, with the same roundings and under autocast. It
    defaults to `formula`.
    """

    def __init__(self, operator: _ops.Operator, formula: Callable, plain: Callable | None = None):
        self.operator = operator
        self.name = operator.name
        self.formula = formula
        self.plain = plain or formula
        self._forward = operator.forward
        self._backward_name = f"{self.name}_backward"

    def __call__(self, tensors: tuple[Tensor | None, ...], words=(), flags=()) -> Tensor:
        forced = getattr(settings, self.name)
        if forced == TORCH or needs_formula():
            return self._with_torch(tensors, words, forced)
        refuse_exporters(self.name, tensors[0])
        wants_gradient = False
        if torch.is_grad_enabled():
            try:
                for tensor in tensors:
                    if tensor is not None and tensor.requires_grad:
                        wants_gradient = True
                        break
            except AttributeError as error:
                raise self.operator.wrong_type(tensors, words) or error from None
        try:
            if wants_gradient:
                forced_backward = getattr(settings, self._backward_name)
                apply = _Call.apply if torch.compiler.is_compiling() else _direct_apply
                y = apply((self, words, flags, forced, forced_backward), *tensors)
            else:
                (y,) = self._forward(*tensors, *words, *flags, False, forced)
        except (RuntimeError, ValueError) as error:
            raise self._clear(error, tensors, words) from None
        if settings.records is not None:
            self.record(tensors, words, flags, wants_gradient)
        return y

    def _clear(self, error, tensors, words):
        named = zip((rule.name for rule in self.operator.inputs), tensors, strict=True)
        return self.operator.wrong_type(tensors, words) or _ops.rephrased(error, **dict(named))

    def formula_gradients(self, tensors, words, needed, gradient):
        """The gradients by torch's autograd on the formula."""
        if tensors[0] is None:
            inputs = self.operator.inputs
            x, w = inputs[0].name, inputs[self.operator.first_is_for].name
            raise RuntimeError(
                f"{self.name}: a second backward and a backward for a batch of gradients need {x}, "
                f"which forward did not save because {w} needs no gradient; call "
                f"{w}.requires_grad_() before forward, or {_ops.WAY_OUT}"
            )

        def formula(*tensors):
            return self.formula(*tensors, *words)

        return formula_gradients(formula, tensors, needed, gradient)

    def _with_torch(self, tensors, words, forced):
        why = "" if forced == TORCH else SEEN_THROUGH
        if why:
            refuse_forced(self.name, why)
        y = (self.formula if why else self.plain)(*tensors, *words)
        if settings.records is not None:
            record_torch(self.name, tensors[0], y, why)
        return y

    def record(self, tensors, words, flags, wants_gradient):
        """Records which implementations forward and, if needed, backward would use."""
        names = {"forward": self.name, "backward": self._backward_name}
        for i, (direction, name) in enumerate(names.items()):
            if i > wants_gradient:
                break
            answer = self.operator.explain(
                *tensors, *words, *flags, wants_gradient, i == 1, getattr(settings, name)
            )
            record(self.name, direction, tensors[0], answer)


class _Call(torch.autograd.Function):
    # `forward(ctx, ...)` instead of `setup_context`: 172 against 204 µs for forward and backward.
    # Everything but the tensors is packed into one argument, because each argument costs time, in
    # backward too.
    @staticmethod
    def forward(ctx, call, *tensors):
        function, words, flags, forced, _ = call
        operator = function.operator
        y, saved = operator.forward(*tensors, *words, *flags, True, forced)
        ctx.call = call
        reader = operator.first_is_for
        if reader is not None and not ctx.needs_input_grad[1 + reader]:
            first, *others = tensors
            if first.is_contiguous():  # backward needs only its shape
                ctx.first_shape = first.shape
                tensors = (None, *others)
        ctx.save_for_backward(*tensors, saved)
        return y

    @staticmethod
    def backward(ctx, gradient):
        function, words, flags, _, forced = ctx.call
        kept = ctx.saved_tensors  # the inputs, then the tensor that forward saved
        needed = ctx.needs_input_grad[1:]
        operator = function.operator
        if needs_graph():
            return None, *function.formula_gradients(kept[:-1], words, needed, gradient)
        mask = operator.all_inputs
        if not all(needed):
            mask = sum(1 << i for i, need in enumerate(needed) if need)
        read = [kept[i] for i in operator.read_back]
        if read[0] is None:
            read[0] = kept[operator.first_is_for].new_empty(()).expand(ctx.first_shape)
        try:
            found = operator.backward(gradient, *read, *words, *flags, mask, forced)
        except RuntimeError as error:
            if is_batched_gradient(gradient):  # torch cannot unbatch an operator with lists
                return None, *function.formula_gradients(kept[:-1], words, needed, gradient)
            raise _ops.rephrased(error, gradient=gradient) from None
        if mask == operator.all_inputs:
            return None, *found
        found = iter(found)
        return None, *[next(found) if need else None for need in needed]


_direct_apply = direct_apply(_Call)
