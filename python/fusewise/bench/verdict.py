"""Totals over the rows: how many are faster, same and slower, and which are losses.

"Same" is the row's own verdict: the 95 % interval of its ratio contains 1.
"""

from dataclasses import dataclass
from statistics import geometric_mean

from .baselines import BOUNDS, OURS

CLOCKS = {"gpu": "GPU time", "wall": "wall time"}
_FIRST = ("eager", "compile")
# These do only a part of the work, or call ours in another way.
_YARDSTICKS = ("products", "layers")


@dataclass(frozen=True)
class Score:
    """The totals of all rows that were measured by one clock against one rival."""

    clock: str
    rival: str
    faster: int
    same: int
    slower: int
    mean: float
    """Geometric mean of the speed-ups."""

    @property
    def total(self) -> int:
        return self.faster + self.same + self.slower


@dataclass(frozen=True)
class Loss:
    row: dict
    clock: str
    rival: str
    ratio: dict


def is_yardstick(name: str) -> bool:
    """Whether a baseline is only there for orientation and never counts in a verdict."""
    return name in BOUNDS or any(word in name for word in _YARDSTICKS)


def rivals(results: dict) -> list[str]:
    """All baselines that count in verdicts, eager and compile first."""
    found = [name for name in results["baselines"] if not is_yardstick(name)]
    return sorted(found, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))


def headline_rivals(results: dict) -> list[str]:
    """Eager and compile; other rivals only if neither is among the baselines."""
    found = rivals(results)
    return [name for name in found if name in _FIRST] or found


def families(results: dict) -> list[str]:
    return list(dict.fromkeys(row["family"] for row in results["rows"]))


def family_rows(results: dict, family: str) -> list[dict]:
    """The family's rows, after the sums of its groups."""
    rows = [row for row in results["rows"] if row["family"] == family]
    groups = {row["group"] for row in rows}
    return [row for row in results["sums"] if row["group"] in groups] + rows


def main_clock(results: dict) -> str:
    """GPU time on a GPU, wall time on a CPU."""
    return "gpu" if results["device"] == "cuda" else "wall"


def scores(results: dict, family: str | None = None) -> list[Score]:
    """For each clock and headline rival, over the rows of one family or of all, without sums."""
    found = []
    for clock in CLOCKS:
        for rival in headline_rivals(results):
            ratios = [
                row["against"][rival][clock]
                for row in results["rows"]
                if family in (None, row["family"]) and clock in _against(row, rival)
            ]
            if ratios:
                said = [ratio["verdict"] for ratio in ratios]
                counts = (said.count(word) for word in ("faster", "same", "slower"))
                mean = geometric_mean([ratio["ratio"] for ratio in ratios])
                found.append(Score(clock, rival, *counts, mean))
    return found


def losses(results: dict) -> list[Loss]:
    """Every row in which a rival is faster than ours, ordered by rival, clock and ratio."""
    found = [
        Loss(row, clock, rival, row["against"][rival][clock])
        for rival in rivals(results)
        for clock in CLOCKS
        for row in results["rows"]
        if _against(row, rival).get(clock, {}).get("verdict") == "slower"
    ]
    order = [*rivals(results), *CLOCKS]

    def place(loss: Loss) -> tuple:
        return order.index(loss.rival), order.index(loss.clock), loss.ratio["ratio"]

    return sorted(found, key=place)


def only_a_graph_helps(row: dict) -> bool:
    """Whether an empty operator with as many tensors takes more than half of the row's wall time.

    Then neither a faster kernel nor leaner host code can halve the time.
    """
    host = row.get("host")
    return bool(host) and host["empty_us"] > row["contenders"][OURS]["wall"]["median"] / 2


def _against(row: dict, rival: str) -> dict:
    return row.get("against", {}).get(rival, {})
