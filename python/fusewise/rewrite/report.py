"""What `fusewise.optimize` found, decided and measured."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import nn

from ..bench.environment import busy_machine
from ..report import Section, Table, write_page
from ..report.terminal import lines as terminal_lines

UNSUPPORTED = "unsupported"
_CLOCKS = {"gpu": "GPU", "wall": "wall"}
ORIGINAL, SWAPPED = "original", "swapped"
COMPILED, BOTH = "compiled", "swapped + compiled"
GRAPHED = " + graph"


@dataclass
class Row:
    """One candidate."""

    name: str
    """The module's name in the model."""
    pattern: str
    result: str = ""
    """"swapped", "covered" (by a larger candidate that is faster), "not faster", "parts as
    fast" (if they are swapped separately), "taken back", "WRONG", "not reached" or
    "unsupported"."""
    reason: str = ""
    """What is unsupported, wrong or as fast, in a sentence."""
    calls: int = 0
    """Calls of fused modules in a step."""
    shapes: list[list[int]] = field(default_factory=list)
    """Of the first input of each fused module."""
    us: dict[str, list[float]] = field(default_factory=dict)
    """By clock: time of all its calls in a step, before and after, in µs."""
    ratio: dict[str, dict] = field(default_factory=dict)
    """By clock: before over after, its 95 % interval, and the verdict."""
    error: float | None = None
    """The largest error of the tensor that comes closest to its bound, and the bound."""
    allowed: float | None = None
    alternative: bool = False
    """Whether it does the work of other candidates."""


@dataclass
class Report:
    """The report of `fusewise.optimize`. Times are in µs.

    `print(report)` shows it as tables; `to_dict`, `to_json` and `to_html` give it in other forms.

    Example:
        >>> import os, tempfile, torch, fusewise
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> fused, report = fusewise.optimize(model, torch.randn(4, 8), verify=False)
        >>> [row.pattern for row in report.rows], len(report.swapped) in (0, 1)
        (['Linear + activation'], True)
        >>> sentences, tables = report.lines(), report.tables()  # what print(report) shows
        >>> page = report.to_html(os.path.join(tempfile.mkdtemp(), "report.html"))
        >>> report.to_json().startswith("{") and "rows" in report.to_dict()
        True
        >>> type(report.restore()[1])
        <class 'torch.nn.modules.activation.ReLU'>
    """

    setting: dict
    """Device, mode, autocast, shapes of the inputs, min_gain."""
    environment: dict
    rows: list[Row]
    whole: dict[str, dict] = field(default_factory=dict)
    """By variant ("original", "swapped", …): median, quartiles and samples by clock, and the peak
    of GPU memory."""
    predicted_us: dict[str, float] = field(default_factory=dict)
    """By clock: the time of a step that follows from the candidates' times by Amdahl's law."""
    ratio: dict[str, dict] = field(default_factory=dict)
    """By clock: original over swapped, for the whole model."""
    returned: str = ORIGINAL
    """The variant that was returned."""
    conclusion: str = ""
    command: str = ""
    """The command line, if there was one."""
    _restore: Callable[[], nn.Module] | None = field(default=None, repr=False, compare=False)

    @property
    def swapped(self) -> list[Row]:
        """The candidates that were swapped."""
        return [row for row in self.rows if row.result == "swapped"]

    def restore(self) -> nn.Module:
        """The original model, with the parameters, buffers and modes of the present one.

        After `inplace=True` the swaps are undone in the model itself.
        """
        if self._restore is None:
            raise RuntimeError("restore: this report was read or copied; it knows no model")
        return self._restore()

    def to_dict(self) -> dict:
        """Everything as numbers, strings, lists and dicts."""
        found = {name: value for name, value in vars(self).items() if name != "_restore"}
        return {**found, "rows": [asdict(row) for row in self.rows]}

    def to_json(self, path: str | Path | None = None) -> str:
        """The same as JSON, also written to a file if `path` is given."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_html(self, path: str | Path) -> Path:
        """Writes a self-contained page. Needs jinja2, which comes with `fusewise[bench]`."""
        path = Path(path)
        facts = self.environment | self.setting
        section = Section("What was swapped, and what it gave", self.lines(), self.tables())
        write_page(path, "fusewise.optimize", self.command or self._call(), facts, [section])
        return path

    def __str__(self) -> str:
        width = shutil.get_terminal_size((100, 24)).columns
        parts = [*self.lines(), *self.tables()]
        return "\n".join(line for part in parts for line in terminal_lines(part, width))

    def lines(self) -> list[str]:
        """The result in a few sentences."""
        swaps = len(self.swapped)
        # A larger candidate counts in place of its parts if it was swapped.
        rows = [row for row in self.rows if not row.alternative or row.result == "swapped"]
        count = sum(row.result != "covered" for row in rows)
        found = [f"{swaps} of {count} candidates swapped. {self.conclusion}"]
        for clock, ratio in self.ratio.items():
            low, high = ratio["interval"]
            predicted = self.predicted_us[clock]
            before, after = (self.whole[name][clock]["median"] for name in (ORIGINAL, SWAPPED))
            found.append(
                f"{_CLOCKS[clock]} time of a step: {_ms(before)} ms before, {_ms(after)} ms after, "
                f"{ratio['ratio']:.2f}x [{low:.2f}, {high:.2f}]; predicted by Amdahl's law from "
                f"the candidates: {_ms(predicted)} ms, {before / predicted:.2f}x."
            )
        warned = self.setting["device"] == "cpu" and self.whole
        return found + (busy_machine(self.environment) if warned else [])

    def tables(self) -> list[Table]:
        """The variants of the whole model, the candidates, and the reasons."""
        found = [self._variants()] if self.whole else []
        found += [self._candidates()] if self.rows else []
        reasons = [[_name(row), row.reason] for row in self.rows if row.reason]
        return [*found, Table("Why not", ["module", "reason"], reasons, 2)] if reasons else found

    def _variants(self) -> Table:
        clocks = [clock for clock in _CLOCKS if clock in next(iter(self.whole.values()))]
        header = ["variant", "", *(f"{_CLOCKS[clock]} ms" for clock in clocks), "peak MB"]
        rows = []
        for name, times in self.whole.items():
            if "wrong" in times:
                rows.append([name, f"WRONG: {times['wrong']}", *[""] * len(clocks), ""])
                continue
            peak = times["peak_bytes"]
            rows.append(
                [
                    name,
                    "returned" if name == self.returned else "",
                    *(_ms(times[clock]["median"]) for clock in clocks),
                    f"{peak / 1e6:.0f}" if peak is not None else "",
                ]
            )
        return Table("A step of the whole model", header, rows, 2).without_empty_columns()

    def _candidates(self) -> Table:
        clocks = [clock for clock in _CLOCKS if any(clock in row.us for row in self.rows)]
        header = ["module", "pattern", "result", "calls"]
        for clock in clocks:
            header += [f"{_CLOCKS[clock]} ms before", "after", "ratio", "interval"]
        rows = []
        for row in self.rows:
            cells = [_name(row), row.pattern, row.result]
            cells.append(str(row.calls or ""))
            for clock in clocks:
                if clock in row.us:
                    low, high = row.ratio[clock]["interval"]
                    cells += [_ms(us) for us in row.us[clock]]
                    cells += [f"{row.ratio[clock]['ratio']:.2f}", f"{low:.2f} to {high:.2f}"]
                else:
                    cells += [""] * 4
            rows.append(cells)
        return Table("Candidates", header, rows, text_columns=3).without_empty_columns()

    def _call(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.setting.items())
        return f"fusewise.optimize({settings})"


def _name(row: Row) -> str:
    return row.name or "(the model)"


def _ms(us: float) -> str:
    return f"{us / 1e3:.3g}" if math.isfinite(us) else ""
