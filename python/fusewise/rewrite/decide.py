"""Which candidates are swapped: those that are right and faster, if the whole model is, too."""

from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from ..bench.environment import describe
from . import measure, verify
from .candidate import Candidate, Chain, Root, Skipped, Slot, apply
from .find import find
from .measure import Comparison, Times, deciding_clocks
from .observe import Seen, observe
from .options import Options, check_model
from .report import SWAPPED, UNSUPPORTED, Report, Row
from .setting import Setting
from .trees import scratch
from .whole import Whole


class Work:
    """A model's candidates, and the decision about each. Runs scratch copies only."""

    def __init__(self, model: nn.Module, example_inputs, options: Options, progress):
        options.check()
        training = options.training
        check_model(model, getattr(model, "training", True) if training is None else training)
        self._model, self.options, self.progress = model, options, progress
        self.setting = Setting.make(model, example_inputs, training, options.amp)
        options.check_setting(self.setting, model)
        self.deciding = deciding_clocks(self.setting.device, options.graph)
        progress.start("looking for candidates", 1)
        self._try_out()
        which = options.include, options.exclude
        self.found, self._skipped = find(self._fresh().model, model, self.setting.training, *which)
        if options.inplace:
            self._leave_the_root()
        self._rows = {each.key: Row(each.name, each.pattern) for each in self.found}
        for each in self.found:
            self._rows[each.key].alternative = bool(each.parts)
        self._covered: dict[Candidate, dict[Candidate, Comparison]] = {}  # by larger candidates
        progress.advance()

    def decide(self) -> tuple[Report, list[str]]:
        """The report, and the keys of the candidates to swap."""
        setting = self.setting
        chosen = self._choose(self._observe())
        skipped = [Row(e.name, e.pattern, UNSUPPORTED, e.reason) for e in self._skipped]
        report = Report(
            {
                "device": setting.device,
                "training": setting.training,
                "amp": str(setting.dtype).removeprefix("torch.") if setting.dtype else False,
                "inputs": setting.shapes(),
                "min_gain": self.options.min_gain,
                "compile": self.options.compile,
                "graph": self.options.graph,
            },
            describe(setting.device),
            [*self._rows.values(), *skipped],
        )
        if chosen or self.options.compile or self.options.graph:
            chosen = Whole(self, report, chosen).judge()
        else:
            report.conclusion = (
                "No candidate can be swapped with a gain; the model stays as it is."
                if report.rows
                else "There is nothing in the model that fusewise replaces."
            )
        kept = report.returned.startswith(SWAPPED)
        for candidate in chosen:
            self._rows[candidate.key].result = "swapped" if kept else "taken back"
        for row in self._rows.values():
            if row.result == "covered" and not kept:
                row.result = "taken back"
        return report, [candidate.key for candidate in chosen] if kept else []

    def without_alternatives(self, chosen: dict[Candidate, Comparison], said: str):
        """The same with the parts of the alternatives, with which the model is wrong as `said`."""
        left = dict(chosen)
        for candidate in chosen:
            if candidate.parts:
                del left[candidate]
                left |= self._covered[candidate]
                row = self._rows[candidate.key]
                row.result, row.reason = "taken back", f"the whole model was WRONG: {said}"
        for candidate in left:
            self._rows[candidate.key].result = ""
        return left

    def fresh(self, candidates: list[Candidate] = (), training: bool | None = None) -> nn.Module:
        """A scratch copy with these candidates swapped."""
        root = self._fresh(training)
        apply(root, candidates)
        return root.model

    def _fresh(self, training: bool | None = None) -> Root:
        """A scratch copy in a mode; None is the one that was asked for."""
        training = self.setting.training if training is None else training
        made = scratch(self._model)
        return Root(made if made.training == training else made.train(training))

    def _try_out(self) -> None:
        training, model = self.setting.training, self._fresh().model
        try:
            outputs = self.setting.outputs(model, training)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model may raise anything
            said = str(error).strip().split("\n")[0].removesuffix(", but expected one of:")
            raise ValueError(
                "example_inputs: expected inputs that run through the model, but it raised "
                f"{type(error).__name__}: {said}"
            ) from error
        finite = all(output.isfinite().all() for output in outputs)
        if self.options.verify and not finite and (name := self.setting.not_finite()):
            raise ValueError(
                f"example_inputs: expected finite values, got NaN or infinity in {name}, which "
                "reaches the output, so that nothing can be verified; pass typical data, or "
                "verify=False"
            )
        if not outputs:
            wanted = "an output that needs a gradient" if training else "a floating output"
            raise ValueError(f"model: expected {wanted}, got none")
        if training and not any(p.requires_grad for p in self._model.parameters()):
            raise ValueError(
                "training: expected a parameter that needs a gradient, got none; use training=False"
            )

    def _leave_the_root(self) -> None:
        reason = "is the model itself, which inplace=True cannot replace; use inplace=False"
        for candidate in [each for each in self.found if each.slots[0].place == ""]:
            self.found.remove(candidate)
            self._skipped.append(Skipped(candidate.name, candidate.pattern, reason))

    def _observe(self) -> dict[Slot, Seen]:
        """What each slot gets. With training both modes are verified, each with gradients."""
        training, check = self.setting.training, None
        if self.options.verify:

            def check(*arguments):
                return verify.check_slot(*arguments, gradients=training)

        found = {}
        for mode in (training, False) if training and check else (training,):
            try:
                seen = self._observe_in(mode, check)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a model may ask a layer for what its replacement does not have
                self._leave_what_fails(mode)
                seen = self._observe_in(mode, check)
            for candidate in self._left():
                _note_checks(self._rows[candidate.key], candidate, seen, mode == training)
            found = found or seen
        return found

    def _observe_in(self, mode: bool, check) -> dict[Slot, Seen]:
        self.progress.start(
            f"{'verifying' if check else 'looking at'} the candidates in "
            f"{'training' if mode else 'inference'}",
            sum(len(each.slots) for each in self._left()),
        )
        found = {}
        for candidates in self._groups():
            edits = apply(self._fresh(mode), candidates, fused=False)
            found |= observe(edits, candidates, self.setting_in(mode), check, self.progress)
        return found

    def _leave_what_fails(self, mode: bool) -> None:
        """Finds the candidates with which, one at a time, the model does not run."""
        for candidate in self._left():
            root = self._fresh(mode)
            apply(root, [candidate], fused=False)
            try:
                self.setting_in(mode).outputs(root.model, False)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # as above
                row, said = self._rows[candidate.key], str(error).strip().split("\n")[0]
                row.result = UNSUPPORTED
                row.reason = f"the model does not run with it: {type(error).__name__}: {said}"

    def _left(self) -> list[Candidate]:
        """The candidates with nothing against them so far."""
        return [each for each in self.found if not self._rows[each.key].result]

    def _groups(self) -> list[list[Candidate]]:
        """The same in groups without overlap: what has no parts, then the alternatives."""
        left = self._left()
        groups = [each for each in left if not each.parts], [each for each in left if each.parts]
        return [group for group in groups if group]

    def setting_in(self, mode: bool) -> Setting:
        return replace(self.setting, training=mode)

    def _choose(self, seen: dict[Slot, Seen]) -> dict[Candidate, Comparison]:
        """The candidates that are right and faster, and their times. Equal shapes are measured
        once.

        An alternative must also be faster than those of its parts that are chosen, as one module.
        """
        chosen: dict[Candidate, Comparison] = {}
        known: dict[tuple, Comparison] = {}  # whose intervals take a while to compute
        for group in self._groups():
            parts = {
                each.key: [part for part in chosen if part.key in each.parts] for each in group
            }
            times = self._measure(group, seen, parts)
            for candidate in group:
                if compared := self._compare(candidate, seen, times, parts[candidate.key], known):
                    taken = parts[candidate.key]
                    self._covered[candidate] = {part: chosen.pop(part) for part in taken}
                    for part in taken:
                        self._rows[part.key].result = "covered"
                    chosen[candidate] = compared
        return chosen

    def _compare(
        self,
        candidate: Candidate,
        seen: dict[Slot, Seen],
        times: dict[tuple, dict[str, Times] | str],
        parts: list[Candidate],
        known: dict[tuple, Comparison],
    ) -> Comparison | None:
        """The times before and after, which the row gets; None if the candidate is not faster."""
        row = self._rows[candidate.key]
        slots = [seen[slot] for slot in candidate.slots]
        row.calls = sum(slot.calls for slot in slots)
        row.shapes = [slot.shape for slot in slots]
        taken = [times[_kind(slot, parts)] for slot in slots]
        if failures := [each for each in taken if isinstance(each, str)]:
            row.result, row.reason = UNSUPPORTED, failures[0]
            return None

        def against(name: str) -> Comparison:
            terms = [(s.calls, t[name], t["after"]) for s, t in zip(slots, taken, strict=True)]
            equal = name, *((slot.calls, _kind(slot, parts)) for slot in slots)
            return known.setdefault(equal, Comparison(terms))

        compared = against("before")
        row.us = {clock: list(compared.us(clock)) for clock in compared.clocks}
        row.ratio = {clock: compared.ratio(clock).as_dict() for clock in compared.clocks}
        if not compared.is_faster(self.deciding, self.options.min_gain):
            row.result = "not faster"
            return None
        others = against("parts") if parts else None
        if others and not others.is_faster(self.deciding, self.options.min_gain):
            row.result = "parts as fast"
            ratios = ((clock, others.ratio(clock)) for clock in others.clocks)
            row.reason = "its parts, swapped separately, are as fast: " + ", ".join(
                f"{clock} time {ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
                for clock, ratio in ratios
            )
            return None
        return compared

    def _measure(
        self,
        candidates: list[Candidate],
        seen: dict[Slot, Seen],
        parts: dict[str, list[Candidate]],
    ) -> dict[tuple, dict[str, Times] | str]:
        """For each kind of slot: the times before and after, and with its parts swapped if some
        were chosen; or why there are no times."""
        root, other = self._fresh(), self._fresh()
        apply(other, chain.from_iterable(parts.values()))
        kinds = {
            _kind(seen[slot], parts[each.key]): (each, slot)
            for each in candidates
            for slot in each.slots
        }
        inputs = {each.kind: each for each in seen.values() if each.inputs}
        self.progress.start("measuring each shape", len(kinds))
        times: dict[tuple, dict[str, Times] | str] = {}
        for kind, (candidate, slot) in kinds.items():
            self.progress.now(f"measuring {slot.place}")
            here = inputs[seen[slot].kind]
            try:
                before, after = slot.make(root.model)
                modules = {"before": before, "after": after}
                if parts[candidate.key]:
                    layers = slot.place, *candidate.idle, slot.end
                    modules["parts"] = Chain(*map(other.model.get_submodule, layers))
                times[kind] = measure.sample_slot(modules, here.inputs, here.setting)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a module of the user's may raise anything
                times[kind] = f"cannot be measured: {type(error).__name__}: {error}"[:200]
            self.progress.advance()
        return times


def _kind(slot: Seen, parts: list[Candidate]) -> tuple:
    """Equal for slots that take the same time, and whose parts do."""
    return slot.kind, tuple(part.pattern for part in parts)


def _note_checks(row: Row, candidate: Candidate, seen: dict[Slot, Seen], must: bool) -> None:
    """Notes the worst check of a candidate's slots, and why it cannot be swapped.

    `must`: whether the inputs must reach it.
    """
    for slot in candidate.slots:
        here = seen.get(slot)
        if row.result:
            return
        if here is None:
            row.result = "not reached" if must else ""
        elif here.failure:
            row.result, row.reason = UNSUPPORTED, here.failure
        elif here.check:
            check = here.check
            if not check.passed:
                row.result, row.reason = "WRONG", str(check)
            if row.allowed is None or check.error * row.allowed > row.error * check.allowed:
                row.error, row.allowed = check.error, check.allowed
