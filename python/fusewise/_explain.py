"""`fusewise.explain`: which implementation runs, and why the others do not."""

from collections import Counter
from dataclasses import dataclass

import torch

from ._settings import TORCH, settings


@dataclass(frozen=True)
class Candidate:
    """One implementation and whether it can run one particular call."""

    name: str
    chosen: bool
    reason: str
    """Why it is not used for the call; empty if it could be."""
    able: bool
    """Whether it can run the call when forced. Its `reason` may only be that another is faster."""


@dataclass(frozen=True)
class Record:
    """One call of an operator. The candidates are in the order in which they are tried.

    Example:
        >>> import torch, fusewise
        >>> layer, x = fusewise.nn.LinearAct(8, 4), torch.randn(2, 8)
        >>> forward, backward = fusewise.explain(layer, x)
        >>> forward.chosen in forward.able
        True
        >>> for name in forward.able:
        ...     with fusewise.implementation(linear_act=name):
        ...         y = layer(x)
    """

    operator: str
    direction: str
    """"forward" or "backward"."""
    input: str
    """Shape, dtype and device of the first argument."""
    candidates: tuple[Candidate, ...]
    why: str = ""
    """Why torch's own operators run although they were not forced; otherwise empty."""

    @property
    def chosen(self) -> str:
        """The name of the implementation that runs the call."""
        return next(candidate.name for candidate in self.candidates if candidate.chosen)

    @property
    def able(self) -> list[str]:
        """The names that can be forced with `fusewise.implementation`."""
        return [candidate.name for candidate in self.candidates if candidate.able]

    def __str__(self):
        because = f", because {self.why}" if self.why else ""
        lines = [f"{self.operator} {self.direction} {self.input}: {self.chosen}{because}"]
        for candidate in self.candidates:
            if not candidate.chosen:
                why = f"declines: {candidate.reason}" if candidate.reason else "would take it too"
                lines.append(f"    {candidate.name} {why}")
        return "\n".join(lines)


class Explanation(list):
    """The records of all fused calls, in order. `str()` prints equal records once, with a count."""

    def __str__(self):
        if not self:
            return "no fusewise operator ran"
        return "\n".join(
            f"{count} x {record}" if count > 1 else str(record)
            for record, count in Counter(self).items()
        )


def explain(fn, *args, **kwargs) -> Explanation:
    """Calls `fn(*args, **kwargs)` and reports which implementation each fused call in it uses.

    `fn` is any callable: a function of `fusewise.functional`, a module, a model, a training step.
    If a gradient is needed, the matching backward is recorded next to its forward. Compiled
    functions run uncompiled here.

    Args:
        fn: A callable.
        args, kwargs: Its arguments, tensors of any shape among them.

    Returns:
        A list of records, one per call and direction. `print` it, or read `chosen`, `able` and
        `candidates` of a record.

    Example:
        >>> import torch, fusewise
        >>> layer, x = fusewise.nn.LinearAct(8, 4), torch.randn(2, 8)
        >>> for record in fusewise.explain(layer, x):
        ...     print(record.operator, record.direction, record.input)
        linear_act forward [2, 8] float32 cpu
        linear_act backward [2, 8] float32 cpu
        >>> print(fusewise.explain(torch.nn.Linear(8, 4), x))
        no fusewise operator ran
    """
    outer, settings.records = settings.records, Explanation()
    try:
        with torch.compiler.set_stance("force_eager"):
            fn(*args, **kwargs)
        return settings.records
    finally:
        settings.records = outer


def record(operator: str, direction: str, x: torch.Tensor, answer: str) -> None:
    """Adds a record from the operator's answer: one line of name, chosen, able, reason per
    candidate."""
    fields = (line.split("\t") for line in answer.splitlines())
    candidates = tuple(
        Candidate(name, chosen == "1", reason, able == "1") for name, chosen, able, reason in fields
    )
    settings.records.append(Record(operator, direction, _described(x), candidates))


def record_torch(operator: str, x: torch.Tensor, y: torch.Tensor, why: str = "") -> None:
    """Records that torch's own operators computed y from x, and will compute its gradients."""
    candidates = (Candidate(TORCH, True, "", True),)
    for direction in ("forward", "backward")[: 1 + y.requires_grad]:
        settings.records.append(Record(operator, direction, _described(x), candidates, why))


def _described(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')} {x.device}"
