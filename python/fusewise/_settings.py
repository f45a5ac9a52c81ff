"""What a thread has set: the implementation forced per operator, and whether calls are recorded.

The values are instance attributes of a `threading.local`, not class attributes, because
`torch.compile` guards on the former only: a compiled function is traced again when one changes.
"""

import threading

from ._ops import OPERATOR_NAMES

OPERATORS = tuple(name + suffix for name in OPERATOR_NAMES for suffix in ("", "_backward"))


class _Settings(threading.local):
    def __init__(self):
        self.records = None  # a list while `explain` runs
        for operator in OPERATORS:
            setattr(self, operator, "")


settings = _Settings()


TORCH = "torch"
"""The implementation that every operator has: torch's own operators, in both directions."""


class implementation:
    """Forces implementations by name, for this thread, inside a `with` block.

    >>> with fusewise.implementation(squeeze_excite="general"):
    ...     y = model(x)

    Forward and backward are operators of their own: `squeeze_excite_backward="general"`. One that
    has no implementation of that name, or whose implementation declines the call, raises an error
    with every reason. An empty name, inside another block, gives the choice back to the library.
    What holds when forward runs, holds for the backward that belongs to it.

    A name without an operator is for all of them. Every operator has "torch": the same layer as
    plain torch operators, as exporters, FX tracing and quantisers want to see it. Its forward and
    backward go together; naming one names both.

    >>> with fusewise.implementation("torch"):
    ...     torch.onnx.export(model, (x,), "model.onnx")
    """

    def __init__(self, name: str = "", /, **per_operator: str):
        for operator in per_operator:
            if operator not in OPERATORS:
                known = ", ".join(OPERATORS)
                raise ValueError(f"implementation: no operator '{operator}'; there are: {known}")
        for what, value in (("every operator", name), *per_operator.items()):
            if not isinstance(value, str):
                raise TypeError(f"implementation: {what} expects a name, got {value!r}")
        # With operators named, an empty name says nothing about the others.
        self._names = dict.fromkeys(OPERATORS, name) if name or not per_operator else {}
        for operator, value in per_operator.items():
            other = _other_direction(operator)
            beside = per_operator.get(other, value)
            if value == TORCH and beside != TORCH:
                raise ValueError(
                    f"implementation: {operator} is 'torch' and {other} '{beside}', but torch's "
                    "forward and backward go together"
                )
            self._names |= _with_other(operator, value, self._names) | {operator: value}
        self._names |= per_operator
        self._outer = []  # a stack: the same object may be entered again inside itself

    def __enter__(self):
        names = dict(self._names)
        for operator, name in self._names.items():
            if _other_direction(operator) not in names:
                names |= _with_other(operator, name, vars(settings))
        self._outer.append({operator: getattr(settings, operator) for operator in names})
        for operator, name in names.items():
            setattr(settings, operator, name)
        return self

    def __exit__(self, *_):
        for operator, name in self._outer.pop().items():
            setattr(settings, operator, name)


def _with_other(operator: str, name: str, names: dict[str, str]) -> dict[str, str]:
    """What follows for the other direction of an operator, where `names` has one for it: torch
    where this is torch, else anything but torch."""
    other = _other_direction(operator)
    if other in names and TORCH in (name, names[other]):
        return {other: name if name == TORCH else ""}
    return {}


def _other_direction(operator: str) -> str:
    forward = operator.removesuffix("_backward")
    return forward if forward != operator else operator + "_backward"
