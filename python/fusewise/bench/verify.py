"""Checks the results of a call against the reference, by the rule of accuracy.py."""

import torch
from torch import Tensor

from . import accuracy
from .accuracy import Check, Results
from .baselines import caller
from .families import Family
from .families.family import FORWARD, Case, Workload
from .measure import Call


class Verification:
    """The reference results of a case, and torch's results on its first buffer, for each mode."""

    def __init__(self, family: Family, case: Case, workload: Workload):
        self._family, self._case, self._workload = family, case, workload
        self._expected = family.reference(case, workload)
        self._eager: dict[str, Results] = {}

    def check(self, call: Call, mode: str, name: str = "fusewise") -> Check:
        """The first output that breaks the rule; if none does, the one closest to its bound."""
        found = self.results(call, mode)
        if name == "eager" and self._family.eager_rounds_between:
            expected = {key: value._replace(decided=None) for key, value in found.expected.items()}
            found = found._replace(expected=expected)
        return accuracy.check(found, self.eager(mode))

    def eager(self, mode: str) -> Results:
        if mode not in self._eager:
            call = caller(self._workload.functions["eager"], self._workload, mode)
            self._eager[mode] = self.results(call, mode)
        return self._eager[mode]

    def results(self, call: Call, mode: str) -> Results:
        if mode == FORWARD or self._family.given is None:
            return self._named(call(0))
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            kept.append(tensor.detach().clone())  # compiled code reuses this memory in backward
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = self._named(call(0))
        return self._family.given(self._case, self._workload, found, kept)

    def _named(self, outputs: tuple[Tensor, ...]) -> Results:
        return Results(dict(zip(self._expected, outputs, strict=False)), self._expected)
