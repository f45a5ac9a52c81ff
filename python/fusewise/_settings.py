"""What a thread has set: the implementation forced per operator, and whether calls are recorded.

The values are instance attributes of a `threading.local`, not class attributes, because
`torch.compile` guards on the former only: a compiled function is traced again when one changes.
"""

import threading

OPERATORS = (
    "autoencoder",
    "autoencoder_backward",
    "linear_act",
    "linear_act_backward",
    "squeeze_excite",
    "squeeze_excite_backward",
)


class _Settings(threading.local):
    def __init__(self):
        self.records = None  # a list while `explain` runs
        for operator in OPERATORS:
            setattr(self, operator, "")


settings = _Settings()


class implementation:
    """Forces implementations by name, for this thread, inside a `with` block.

    >>> with fusewise.implementation(squeeze_excite="general"):
    ...     y = model(x)

    Forward and backward are operators of their own: `squeeze_excite_backward="general"`. One that
    has no implementation of that name, or whose implementation declines the call, raises an error
    with every reason. An empty name, inside another block, gives the choice back to the library.
    What holds when forward runs, holds for the backward that belongs to it.
    """

    def __init__(self, **names: str):
        for operator, name in names.items():
            if operator not in OPERATORS:
                known = ", ".join(OPERATORS)
                raise ValueError(f"implementation: no operator '{operator}'; there are: {known}")
            if not isinstance(name, str):
                raise TypeError(f"implementation: {operator} expects a name, got {name!r}")
        self._names = names
        self._outer = []  # a stack: the same object may be entered again inside itself

    def __enter__(self):
        self._outer.append({operator: getattr(settings, operator) for operator in self._names})
        for operator, name in self._names.items():
            setattr(settings, operator, name)
        return self

    def __exit__(self, *_):
        for operator, name in self._outer.pop().items():
            setattr(settings, operator, name)
