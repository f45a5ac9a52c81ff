"""Calls an operator: applies a forced implementation, records for `explain`, sets up autograd."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

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

    arranged = None
    """A method of operators whose backward depends on layouts. `arranged(kept, gradient, strides)`
    gives both in the layout of x in forward, which had these strides.
    """

    def __init__(self, operator: _ops.Operator, formula: Callable, plain: Callable | None = None):
        self.operator = operator
        self.name = operator.name
        self.formula = formula
        self.plain = plain or formula
        self._forward = operator.forward
        self._backward_name = f"{self.name}_backward"

    def __call__(
        self, tensors: tuple[Tensor | None, ...], words=(), flags=(), numbers=()
    ) -> Tensor:
        forced = getattr(settings, self.name)
        if forced == TORCH or needs_formula():
            if error := self.operator.wrong_scalar(flags, numbers):
                raise error
            return self._with_torch(tensors, self.arguments(words, flags, numbers), forced)
        refuse_exporters(self.name, tensors[0])
        if is_dynamo_compiling():
            error = self.operator.wrong_type(tensors, words, flags, numbers)
            if error is not None:  # torch.compile does not trace the truth value of an exception
                raise error
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
                y = apply((self, words, flags, numbers, forced, forced_backward), *tensors)
            else:
                y = self._forward(*tensors, *words, *flags, *numbers, False, forced)[0]
        except (RuntimeError, ValueError) as error:
            raise self.clear(error, tensors, words, flags, numbers) from None
        if settings.records is not None:
            self.record(tensors, words, (*flags, *numbers), wants_gradient)
        return y

    def clear(self, error, tensors, words, flags, numbers):
        """The error that the user should see."""
        if wrong := self.operator.wrong_type(tensors, words, flags, numbers):
            return wrong
        named = zip((rule.name for rule in self.operator.inputs), tensors, strict=True)
        return _ops.rephrased(error, **dict(named))

    def formula_gradients(self, kept, words, flags, needed, gradient):
        """The gradients by torch's autograd on the formula. `kept`: the inputs, then the tensor
        that forward saved."""
        tensors = kept[:-1]
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

    def passed_on(self, words, tensors) -> int | None:
        """The index of the input whose gradient is the incoming one, if there is such an input."""
        return None

    def arguments(self, words, flags, numbers):
        """What the formula takes behind the tensors."""
        return words

    def _with_torch(self, tensors, arguments, forced):
        why = "" if forced == TORCH else SEEN_THROUGH
        if why:
            refuse_forced(self.name, why)
        y = (self.formula if why else self.plain)(*tensors, *arguments)
        if settings.records is not None:
            record_torch(self.name, tensors[0], y, why)
        return y

    def record(self, tensors, words, flags, wants_gradient):
        """Records which implementations forward and, if needed, backward would use."""
        names = {"forward": self.name, "backward": self._backward_name}
        for i, (direction, name) in enumerate(names.items()):
            if i > wants_gradient:
                break
            if i == 1 and self.arranged is not None:
                x = tensors[0]
                tensors, _ = self.arranged(tensors, x, x.stride())
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
        function, words, flags, numbers, forced, forced_backward = call
        operator = function.operator
        for i in operator.constant:
            if ctx.needs_input_grad[1 + i]:
                raise RuntimeError(
                    f"{operator.inputs[i].name}: expected a tensor that needs no gradient, got one "
                    "with requires_grad=True"
                )
        y, saved = operator.forward(*tensors, *words, *flags, *numbers, True, forced)
        strides = None if function.arranged is None else tensors[0].stride()
        passed_on = function.passed_on(words, tensors)
        ctx.call = function, words, flags, forced_backward, passed_on, strides
        reader = operator.first_is_for
        if reader is not None and not ctx.needs_input_grad[1 + reader]:
            first, *others = tensors
            if first.is_contiguous():  # backward needs only its shape
                ctx.first_shape = first.shape
                tensors = (None, *others)
        ctx.save_for_backward(*operator.kept(tensors, words), saved)
        return y

    @staticmethod
    def backward(ctx, gradient):
        function, words, flags, forced, passed_on, strides = ctx.call
        kept = ctx.saved_tensors  # the inputs, then the tensor that forward saved
        needed = ctx.needs_input_grad
        operator = function.operator
        dy = gradient
        if strides is not None:
            kept, dy = function.arranged(kept, gradient, strides)
        if needs_graph():
            return None, *function.formula_gradients(kept, words, flags, needed[1:], gradient)
        mask, for_autograd = operator.gradients(needed, passed_on)
        read = [kept[i] for i in operator.read_back]
        if read[0] is None:
            read[0] = kept[operator.first_is_for].new_empty(()).expand(ctx.first_shape)
        try:
            found = operator.backward(dy, *read, *words, *flags, mask, forced)
        except RuntimeError as error:
            if is_batched_gradient(gradient):  # torch cannot unbatch an operator with lists
                return None, *function.formula_gradients(kept, words, flags, needed[1:], gradient)
            raise _ops.rephrased(error, gradient=gradient) from None
        return for_autograd((*found, gradient, None))


_direct_apply = direct_apply(_Call)
