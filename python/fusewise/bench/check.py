"""`fusewise check`: every operator, dtype, layout and implementation against the reference."""

import fusewise

from ..report import Table
from . import accuracy
from .baselines import OURS, caller
from .cases import recast
from .families import FAMILIES, Family
from .families.family import BOTH, DTYPES, Case
from .measure import Call
from .progress import Progress
from .tasks import usable_device
from .verify import Verification


def run(device: str, progress: Progress) -> tuple[Table, list[str], bool]:
    """Returns the table, its summary, and whether every check passed."""
    device = usable_device(device)
    steps = [
        (family, dtype, layout)
        for family in FAMILIES.values()
        for dtype in DTYPES
        for layout in family.layouts
    ]
    progress.start(f"checking the operators on {device}", len(steps))
    rows = []
    for family, dtype, layout in steps:
        progress.now(f"{family.name} {dtype} {layout}")
        checks = _checks(family, recast(list(family.checked), dtype, layout), device)
        rows += [
            [family.name, dtype, layout, name, *_cells(found)] for name, found in checks.items()
        ]
        progress.advance()
    header = ["operator", "dtype", "layout", "forced", "verdict", "error", "allowed"]
    title = f"Checks against the reference on {device}; each row forces one implementation"
    table = Table(title, header, rows, text_columns=5, keep=5)
    wrong = sum(row[4] != "right" for row in rows)
    said = (
        f"{wrong} of {len(rows)} are WRONG: please report this with the output of `fusewise info`"
    )
    return table, [said if wrong else f"all {len(rows)} are right"], not wrong


def _checks(family: Family, cases: list[Case], device: str) -> dict[str, accuracy.Check]:
    """For each implementation, over the cases that it can run: a failed check, or the one closest
    to its bound."""
    found: dict[str, accuracy.Check] = {}
    for case in cases:
        workload = family.build(case, device, 1)
        verification = Verification(family, case, workload)
        ours = caller(workload.functions[OURS], workload, BOTH)
        for record in fusewise.explain(ours, 0):
            operator = record.operator + ("_backward" if record.direction == "backward" else "")
            for able in record.able:
                with fusewise.implementation(**{operator: able}):
                    check = _check(verification, ours)
                name = f"{record.direction} {able}"
                found[name] = _worse(found.get(name, check), check)
    return found


def _check(verification: Verification, call: Call) -> accuracy.Check:
    try:
        return verification.check(call, BOTH)
    except RuntimeError as error:  # record a failing kernel and go on
        return accuracy.Check("call", 0, 0, f"raised {str(error).splitlines()[0]}")


def _worse(a: accuracy.Check, b: accuracy.Check) -> accuracy.Check:
    if not (a.passed and b.passed):
        return b if a.passed else a
    return b if b.error * a.allowed > a.error * b.allowed else a


def _cells(check: accuracy.Check) -> list[str]:
    if not check.passed:
        return [f"WRONG: {check}", "-", "-"]
    return ["right", f"{check.error:.2g} ({check.tensor})", f"{check.allowed:.2g}"]
