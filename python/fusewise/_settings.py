"""Settings of each thread: the implementations that are forced, and whether calls are recorded.

The values are instance attributes of a `threading.local`, not class attributes, because
`torch.compile` only guards on instance attributes. A compiled function is retraced when one of them
changes.
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
"""An implementation that every operator has: torch's own operators, forward and backward."""


class implementation:
    """A context manager that forces implementations by name, in the current thread.

    Forward and backward are set separately; backward's name is `squeeze_excite_backward`. A call
    raises an error, with every reason, if the operator has no implementation of that name or if
    that implementation cannot run the call. In a nested block, an empty name lets the library
    choose again. A backward uses the setting that was active when its forward ran.

    A name without an operator applies to all operators. Every operator has "torch", which runs the
    same layer as plain torch operators. Exporters, FX tracing and quantisers need that. "torch"
    always covers forward and backward together; setting one sets both.

    Args:
        name: For every operator: "torch", or "" to let the library choose.
        per_operator: For single operators, such as `squeeze_excite="portable"`. `fusewise.explain`
            lists the names for a call, `fusewise info` all of them.

    Raises:
        ValueError: If there is no such operator.

    Example:
        >>> import torch, fusewise
        >>> layer, x = fusewise.nn.LinearAct(8, 4), torch.randn(2, 8)
        >>> with fusewise.implementation(linear_act="portable"):
        ...     fusewise.explain(layer, x)[0].chosen
        'portable'
        >>> with fusewise.implementation("torch"):  # likewise torch.onnx.export
        ...     traced = torch.fx.symbolic_trace(layer)
    """

    def __init__(self, name: str = "", /, **per_operator: str):
        for operator in per_operator:
            if operator not in OPERATORS:
                known = ", ".join(OPERATORS)
                raise ValueError(
                    f"implementation: no operator is named '{operator}'; there are: {known}"
                )
        for what, value in (("every operator", name), *per_operator.items()):
            if not isinstance(value, str):
                raise TypeError(f"implementation: expected a name for {what}, got {value!r}")
        # If operators are named, an empty positional name does not reset the others.
        self._names = dict.fromkeys(OPERATORS, name) if name or not per_operator else {}
        for operator, value in per_operator.items():
            other = _other_direction(operator)
            beside = per_operator.get(other, value)
            if value == TORCH and beside != TORCH:
                raise ValueError(
                    f"implementation: {operator} is 'torch' and {other} is '{beside}', but 'torch' "
                    "always runs both directions; set both to 'torch' or neither"
                )
            self._names |= _with_other(operator, value, self._names) | {operator: value}
        self._names |= per_operator
        self._outer = []  # a stack, because the same object may be entered again inside itself

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
    """The setting that the other direction gets, if `names` has one for it: torch goes with torch.

    If this direction is torch, so is the other. If it is not, the other may not stay torch.
    """
    other = _other_direction(operator)
    if other in names and TORCH in (name, names[other]):
        return {other: name if name == TORCH else ""}
    return {}


def _other_direction(operator: str) -> str:
    forward = operator.removesuffix("_backward")
    return forward if forward != operator else operator + "_backward"
