"""The whole model before and after, also compiled and as a CUDA graph if that is wanted."""

import torch
from torch import nn

from ..bench.statistics import summary
from ..profile.analysis import amdahl
from . import measure, verify_model
from .measure import WALL, Comparison, Times
from .report import BOTH, COMPILED, GRAPHED, ORIGINAL, SWAPPED, Report
from .setting import Setting


class Whole:
    """The variants of a model, and which one to return. `work` is the `Work` on the model."""

    def __init__(self, work, report: Report, chosen: dict):
        self._work, self._report, self._chosen = work, report, chosen
        self._kept: dict[str, nn.Module] = {}  # so that a variant is compiled once

    def judge(self) -> list:
        """Fills in the report, with the variant to return. Returns the candidates in it: if the
        model is wrong with a larger candidate, its parts instead."""
        options, progress = self._work.options, self._work.progress
        names = [SWAPPED] if self._chosen else []
        if options.compile:
            names += [COMPILED, *([BOTH] if self._chosen else [])]
        progress.start("the whole model", 1 + len(names))
        wrong = {}
        for name in names:
            progress.now(f"the whole model: checking {name}")
            said = self._problem(name)
            if said and name == SWAPPED and any(each.parts for each in self._chosen):
                self._chosen = self._work.without_alternatives(self._chosen, said)
                del self._kept[name]
                said = self._problem(name) if self._chosen else said
            if said:
                wrong[name] = said
            progress.advance()
        right = [name for name in (ORIGINAL, *names) if name not in wrong]
        progress.now(f"the whole model: measuring {', '.join(right)}")
        times = measure.sample_models(
            {name: self._variant(name) for name in right}, self._work.setting
        )
        progress.advance()
        self._note(times, wrong)
        if options.graph:
            self._try_graph()
        return list(self._chosen)

    def _variant(self, name: str) -> nn.Module:
        """A scratch copy in the mode that was asked for."""
        if name not in self._kept:
            self._kept[name] = self._made(name, self._work.setting.training)
        return self._kept[name]

    def _made(self, name: str, training: bool) -> nn.Module:
        model = self._work.fresh(self._chosen if name in (SWAPPED, BOTH) else [], training)
        if name in (COMPILED, BOTH):
            model.compile()
        return model

    def _problem(self, name: str) -> str:
        """Why a variant must not be returned, or ''."""
        return self._fails(name) or (self._wrong(name) if self._work.options.verify else "")

    def _fails(self, name: str) -> str:
        """Why a variant cannot run: a limitation of torch.compile, an attribute that is missing.
        With swaps also in the other mode, if the original runs in it."""
        training = self._work.setting.training
        if said := self._error_of(self._variant(name), training):
            return said
        if name != SWAPPED or self._error_of(self._made(ORIGINAL, not training)):
            return ""
        return self._error_of(self._made(name, not training))

    def _error_of(self, model: nn.Module, gradients: bool = False) -> str:
        try:
            with verify_model.same_buffers_afterwards(model):
                self._work.setting.outputs(model, gradients)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model or a compiler may raise anything
            return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
        return ""

    def _wrong(self, name: str) -> str:
        """What is wrong with a variant, in either mode if training is asked for."""
        setting = self._work.setting
        # To compile for the other mode as well would take minutes.
        both = setting.training and name == SWAPPED
        for mode in (True, False) if both else (setting.training,):
            ours = self._variant(name) if mode == setting.training else self._made(name, mode)
            check = verify_model.check_model(
                self._made(ORIGINAL, mode),
                ours,
                self._work.setting_in(mode),
                gradients=setting.training,
            )
            if not check.passed:
                return f"{check} ({'training' if mode else 'inference'})"
        return ""

    def _note(self, times: dict[str, Times], wrong: dict[str, str]) -> None:
        report, deciding = self._report, self._work.deciding
        report.whole = {name: _described(each) for name, each in times.items()}
        report.whole |= {name: {"wrong": said} for name, said in wrong.items()}
        against = {
            name: Comparison([(1, times[ORIGINAL], each)])
            for name, each in times.items()
            if name != ORIGINAL
        }
        if compared := against.get(SWAPPED):
            for clock in compared.clocks:
                report.predicted_us[clock] = self._predicted(times[ORIGINAL].median(clock), clock)
                report.ratio[clock] = compared.ratio(clock).as_dict()
        faster = [name for name, each in against.items() if each.is_faster(deciding)]
        measured = [c for c in (*deciding, WALL) if all(c in t.samples for t in times.values())]
        clock = measured[0]
        report.returned = min(faster, key=lambda name: times[name].median(clock), default=ORIGINAL)
        report.conclusion = self._conclusion(against, wrong, faster, clock)

    def _predicted(self, whole: float, clock: str) -> float:
        """The time of a step if nothing changes but the times of the candidates."""
        compared = self._chosen.values()
        before, after = map(sum, zip(*(each.us(clock) for each in compared), strict=True))
        return whole / amdahl(min(1.0, before / whole), before / after)

    def _conclusion(self, against, wrong, faster, clock) -> str:
        best = self._report.returned
        said = []
        if SWAPPED in wrong:
            said.append(f"The swaps were taken back: the whole model is WRONG, {wrong[SWAPPED]}.")
        elif SWAPPED in against and SWAPPED not in faster and best != BOTH:
            ratio = against[SWAPPED].ratio(clock)
            said.append(
                "The swaps were taken back: the whole model is not faster with them beyond the "
                f"noise of the measurement, {ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]."
            )
        if best == ORIGINAL:
            said.append("The model stays as it is.")
        else:
            gain = against[best].ratio(clock).value
            said.append(f"The model that was returned is {gain:.2f} times as fast ({best}).")
        if best == COMPILED:
            said.append("torch.compile of the original model alone is the fastest.")
        return " ".join(said)

    def _try_graph(self) -> None:
        report, setting = self._report, self._work.setting
        best = report.returned
        name = best + GRAPHED
        self._work.progress.now(f"the whole model: measuring {name}")
        try:
            models = {best: self._variant(best), name: as_graph(self._variant(best), setting)}
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError) as error:
            report.conclusion += f" It cannot be captured as a CUDA graph: {error}"
            return
        times = measure.sample_models(models, setting, captured=True)
        report.whole[name] = _described(times[name])
        if Comparison([(1, times[best], times[name])]).is_faster((WALL,)):
            report.returned = name
            report.conclusion += " As a CUDA graph it is faster still."


def as_graph(model: nn.Module, setting: Setting) -> nn.Module:
    """The model as CUDA graphs, in its mode and under the setting's autocast."""
    from ..graphed import graphed

    with setting.autocast(), torch.set_grad_enabled(setting.training):
        return graphed(model, *setting.args, **setting.kwargs)


def _described(times: Times) -> dict:
    found = {clock: summary(samples) for clock, samples in times.samples.items()}
    return {**found, "peak_bytes": times.peak_bytes}
