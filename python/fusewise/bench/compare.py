"""Compares two results of the benchmark: which rows are better or worse, beyond the noise."""

from ..report import Table
from .baselines import OURS
from .environment import busy_machine
from .statistics import Ratio, ratio_of_sums
from .tables import names, us_text
from .verdict import CLOCKS

# On a quiet machine, the medians of two runs of the same code sometimes differ by this much.
_ALWAYS = 0.02
# Contenders whose code did not change between the runs: torch's operators, or the empty operator.
_CONTROLS = ("eager", "empty")


def compare(old: dict, new: dict) -> dict:
    """`rows`: a verdict by clock for each common case. Also the cases that only one result has."""
    before, after = ({_key(row): row for row in results["rows"]} for results in (old, new))
    common = [key for key in before if key in after]
    return {
        "rows": [_row(before[key], after[key]) for key in common],
        "only_old": [" ".join(names(before[key])) for key in before if key not in after],
        "only_new": [" ".join(names(after[key])) for key in after if key not in before],
        "busy": [
            f"the {when} run: {line}"
            for when, results in (("old", old), ("new", new))
            if results["device"] == "cpu"
            for line in busy_machine(results["environment"])
        ],
        "changed": {
            key: (old["environment"].get(key), new["environment"].get(key))
            for key in old["environment"] | new["environment"]
            if key not in ("date", "load", "commit", "sources")
            and old["environment"].get(key) != new["environment"].get(key)
        },
    }


def worse(compared: dict) -> list[str]:
    return [
        row["name"]
        for row in compared["rows"]
        if any(found["verdict"] == "worse" for found in row["clocks"].values())
    ]


def tables(compared: dict) -> list[Table]:
    """One table per clock. Each verdict stands next to the two intervals that decide it."""
    found = []
    for clock, title in CLOCKS.items():
        rows = [
            [*row["names"], *_cells(row["clocks"][clock])]
            for row in compared["rows"]
            if clock in row["clocks"]
        ]
        if rows:
            header = ["case", "direction", "verdict", "old / new", "95 % interval", "same within"]
            header += ["old µs", "new µs", "control, old / new"]
            table = Table(title, header, rows, text_columns=3, keep=6)
            found.append(table.without_empty_columns())
    return found


def lines(compared: dict) -> list[str]:
    found = []
    for clock, title in CLOCKS.items():
        said = [
            row["clocks"][clock]["verdict"] for row in compared["rows"] if clock in row["clocks"]
        ]
        if said:
            counts = (f"{said.count(word)} {word}" for word in ("better", "same", "worse"))
            found.append(f"{title}: {', '.join(counts)}")
    if names_of_worse := worse(compared):
        found.append(f"WORSE: {', '.join(names_of_worse)}")
    found += compared["busy"] + [
        f"{key} differs: {then} in the old run, {now} in the new; read the verdicts with care"
        for key, (then, now) in compared["changed"].items()
    ]
    for when in ("old", "new"):
        if only := compared[f"only_{when}"]:
            found.append(f"only in the {when} run: {', '.join(only)}")
    return [
        *found,
        "better, worse: the whole 95 % interval of old / new lies outside of the range `same "
        f"within`. That range is {_ALWAYS:.0%} either way, or the interval of the control's "
        "old / new if that is wider. The control is eager or the empty operator.",
    ]


def _key(row: dict) -> tuple:
    return (
        *(row[key] for key in ("family", "case", "mode", "dtype", "layout")),
        *row["shape"],
        *row["parameters"].items(),
    )


def _row(old: dict, new: dict) -> dict:
    named = {"names": names(new), "name": " ".join(names(new))}
    if "failed" in old or "failed" in new:
        clock = next(
            (
                c
                for row in (old, new)
                for c in CLOCKS
                if c in row.get("contenders", {}).get(OURS, {})
            ),
            "wall",
        )
        verdict = "same" if "failed" in old and "failed" in new else "better"
        if "failed" in new and "failed" not in old:
            verdict = "worse"
        said = new.get("failed", f"before: {old.get('failed')}")
        return named | {"clocks": {clock: {"verdict": verdict, "said": said}}}
    clocks = {}
    for clock in CLOCKS:
        if _both_have(old, new, OURS, clock):
            known = (name for name in _CONTROLS if _both_have(old, new, name, clock))
            control = next((_change(old, new, name, clock) for name in known), None)
            clocks[clock] = _judge(_change(old, new, OURS, clock), control) | {
                "old": old["contenders"][OURS][clock]["median"],
                "new": new["contenders"][OURS][clock]["median"],
            }
    return named | {"clocks": clocks}


def _both_have(old: dict, new: dict, who: str, clock: str) -> bool:
    return all(clock in row["contenders"].get(who, {}) for row in (old, new))


def _change(old: dict, new: dict, who: str, clock: str) -> Ratio:
    samples = (row["contenders"][who][clock]["samples"] for row in (old, new))
    return ratio_of_sums([(1, *samples)])


def _judge(change: Ratio, control: Ratio | None) -> dict:
    """Better or worse only if the change exceeds 2 % and also exceeds the change of the control.

    The control's code did not change. The intervals only cover the noise within a run; the control
    shows the noise between the two runs.
    """
    low = min(1 - _ALWAYS, control.low if control else 1)
    high = max(1 + _ALWAYS, control.high if control else 1)
    verdict = "better" if change.low > high else "worse" if change.high < low else "same"
    return {"verdict": verdict, "change": change, "control": control, "same": (low, high)}


def _cells(found: dict) -> list[str]:
    verdict = "WORSE" if found["verdict"] == "worse" else found["verdict"]
    if "said" in found:
        return [f"{verdict}: {found['said']}", *["-"] * 6]
    change, control = found["change"], found["control"]
    return [
        verdict,
        f"{change.value:.3f}",
        f"{change.low:.3f} to {change.high:.3f}",
        "{:.3f} to {:.3f}".format(*found["same"]),
        us_text(found["old"]),
        us_text(found["new"]),
        f"{control.value:.3f}" if control else "-",
    ]
