"""`fusewise bench overhead`: the host time of every operator, next to that of an empty operator.

At a tiny size a call takes only host time: Python, torch's dispatcher and autograd, our checks and
our choice of an implementation, and on a GPU the launches. The time of an empty operator with the
same number of tensors is torch's part of that.
"""

import json
from pathlib import Path

from ..report import Table, markdown_table
from . import environment
from .baselines import OURS, caller
from .environment import busy_machine
from .families import FAMILIES, Family
from .families.family import MODES
from .host import empty_call
from .measure import HostTimer, interleave
from .runner import ratios
from .schema import VERSION
from .statistics import summary
from .tables import median, us_text
from .tasks import usable_device

EMPTY = "empty"
_ROUNDS, _BUDGET = 41, 1.0  # seconds for each timer


def run(device: str, arguments: list[str]) -> dict:
    """The contents of results.json: one row per operator and mode, in host wall time."""
    device = usable_device(device)
    return {
        "schema": VERSION,
        "command": environment.command(arguments),
        "environment": environment.describe(device),
        "device": device,
        "set": "overhead",
        "baselines": [EMPTY],
        "interrupted": False,
        "rows": [_row(family, mode, device) for family in FAMILIES.values() for mode in MODES],
        "sums": [],
    }


def _row(family: Family, mode: str, device: str) -> dict:
    case = family.tiny
    workload = family.build(case, device, 1)
    calls = {
        OURS: caller(workload.functions[OURS], workload, mode),
        EMPTY: empty_call(device, len(workload.inputs[0]) + len(workload.weights), mode),
    }
    timers = {name: HostTimer(call, device) for name, call in calls.items()}
    samples = interleave(timers, _ROUNDS, _BUDGET)
    row = {
        "family": family.name,
        "case": f"{family.name} {case.name}",
        "mode": mode,
        "shape": list(case.shape),
        "dtype": case.dtype_name,
        "layout": case.layout,
        "parameters": case.extra,
        "group": None,
        "count": 1,
        "contenders": {name: {"wall": summary(taken)} for name, taken in samples.items()},
    }
    return row | {"against": {EMPTY: ratios(row, EMPTY)}}


def table(results: dict) -> Table:
    """One line per operator. For both modes: our time, the empty operator's time, and the ratio."""
    rows = {(row["family"], row["mode"]): row for row in results["rows"]}
    lines = [
        [family, *(cell for mode in MODES for cell in _cells(rows[family, mode]))]
        for family in dict.fromkeys(family for family, _ in rows)
    ]
    header = ["operator", "forward µs", "empty µs", "ratio", "fwd+bwd µs", "empty µs", "ratio"]
    return Table(f"Host time of a call on {results['device']}", header, lines)


def _cells(row: dict) -> list[str]:
    empty = row["contenders"][EMPTY]["wall"]["median"]
    return [us_text(median(row, "wall")), us_text(empty), f"{median(row, 'wall') / empty:.2f}"]


def remarks(results: dict) -> list[str]:
    return busy_machine(results["environment"]) if results["device"] == "cpu" else []


def write(results: dict, folder: Path) -> list[Path]:
    written = [folder / "results.json", folder / "summary.md"]
    facts = [f"- {key}: {value}" for key, value in results["environment"].items()]
    lines = [*markdown_table(table(results)), *remarks(results), f"`{results['command']}`", ""]
    written[0].write_text(json.dumps(results, indent=1) + "\n")
    written[1].write_text("\n".join([*lines, *facts, ""]))
    return written
