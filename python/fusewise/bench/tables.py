"""The rows of a family as tables: the most important columns first."""

import itertools
from collections.abc import Callable
from dataclasses import replace

from ..report import Table
from . import verdict
from .baselines import OURS
from .families.family import BOTH
from .verdict import CLOCKS

# A column: its heading, and a function that returns the cell of a row.
_Column = tuple[str, Callable[[dict], str]]


def family_table(results: dict, family: str) -> Table:
    """All columns that have figures, the most important first."""
    return _table(results, family, _main_columns(results) + _other_columns(results))


def main_table(results: dict, family: str) -> Table:
    """Only the columns that fit on a page."""
    return _table(results, family, _main_columns(results))


def _table(results: dict, family: str, columns: list[_Column]) -> Table:
    rows = verdict.family_rows(results, family)
    cells = [[*names(row), *(cell(row) for _, cell in columns)] for row in rows]
    header = ["case", "direction", *(heading for heading, _ in columns)]
    means = [
        f"{times_text(score.mean)} {score.rival}"
        for score in verdict.scores(results, family)
        if score.clock == verdict.main_clock(results)
    ]
    title = f"{family}: times faster, {', '.join(means)}" if means else family
    return Table(title, header, cells, text_columns=2, keep=4).without_empty_columns()


def _main_columns(results: dict) -> list[_Column]:
    main = verdict.main_clock(results)
    found = []
    for clock in [main, *(clock for clock in CLOCKS if clock != main)]:
        said = "" if clock == main else "wall "
        found.append((f"{'GPU' if clock == 'gpu' else clock} µs", _time_cell(clock)))
        found += [
            (f"{said}vs {name}", _ratio_cell(name, clock))
            for name in verdict.headline_rivals(results)
        ]
        if clock == main:
            found.append(("of floor", lambda row: _share(row, main)))
    return [*found, ("host µs", _host), ("empty µs", _empty)]


def _other_columns(results: dict) -> list[_Column]:
    """The remaining columns. CUDA graphs have no GPU time, so they are compared by wall time."""
    main = verdict.main_clock(results)
    known = verdict.headline_rivals(results)
    found = []
    for name in (name for name in results["baselines"] if name not in known):
        by_main = any(main in row.get("against", {}).get(name, {}) for row in results["rows"])
        heading = f"vs {name}" if by_main else f"wall vs {name}"
        found.append((heading, _ratio_cell(name, main if by_main else "wall")))
    return [
        ("±", lambda row: _spread(row, main)),
        *found,
        ("kernels", _contender_cell(OURS, "kernels", "{:.0f}", 1)),
        ("eager's", _contender_cell("eager", "kernels", "{:.0f}", 1)),
        ("peak MB", _contender_cell(OURS, "peak_bytes", "{:.3g}", 1e6)),
        ("eager's MB", _contender_cell("eager", "peak_bytes", "{:.3g}", 1e6)),
    ]


def names(row: dict) -> tuple[str, str]:
    name = f"{row['group']}, sum of {row['count']}" if "cases" in row else row["case"]
    return name, "fwd+bwd" if row["mode"] == BOTH else row["mode"]


def _time_cell(clock: str):
    def cell(row: dict) -> str:
        if "failed" in row:
            return "FAILED"
        return us_text(median(row, clock)) if clock in row["contenders"][OURS] else "-"

    return cell


def _ratio_cell(name: str, clock: str):
    return lambda row: ratio_text(row, name, clock)


def ratio_text(row: dict, name: str, clock: str) -> str:
    found = row.get("against", {}).get(name, {}).get(clock)
    if not found:
        return "-"
    said = times_text(found["ratio"])
    if verdict.is_yardstick(name):
        return said
    if said == "1.00x" and found["verdict"] != "same":  # show why there is a verdict
        said = f"{found['ratio']:.3f}x"
    return said + {"same": " same", "slower": " SLOWER"}.get(found["verdict"], "")


def _contender_cell(who: str, key: str, form: str, unit: float):
    def cell(row: dict) -> str:
        value = row.get("contenders", {}).get(who, {}).get(key)
        return "-" if value is None else form.format(value / unit)

    return cell


def _share(row: dict, clock: str) -> str:
    if "failed" in row or clock not in row["contenders"][OURS]:
        return "-"
    return f"{row['floor']['us'] / median(row, clock):.0%}"


def _spread(row: dict, clock: str) -> str:
    times = row.get("contenders", {}).get(OURS, {}).get(clock, {})
    if "quartiles" not in times:
        return "-"
    low, high = times["quartiles"]
    return f"{(high - low) / 2 / times['median']:.1%}"


def _host(row: dict) -> str:
    if not (host := row.get("host")):
        return "-"
    # The two clocks are measured one after the other, so their difference can be below 0.
    overhead = max(0.0, host["overhead_us"])
    return f"{us_text(overhead)} ({overhead / median(row, 'wall'):.0%})"


def _empty(row: dict) -> str:
    if not (host := row.get("host")):
        return "-"
    return us_text(host["empty_us"]) + (" graph" if verdict.only_a_graph_helps(row) else "")


def median(row: dict, clock: str) -> float:
    return row["contenders"][OURS][clock]["median"]


def times_text(ratio: float) -> str:
    return f"{ratio:.2f}x"


def interval_text(ratio: dict) -> str:
    low, high = ratio["interval"]
    return f"{low:.3f} to {high:.3f}"


def us_text(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def more_tables(results: dict, family: str) -> list[Table]:
    """The detailed tables: other baselines, intervals, implementations, floors and correctness."""
    rows = [row for row in results["rows"] if row["family"] == family]
    others = _table(results, family, _other_columns(results))
    found = [replace(others, title="Other baselines, kernels and memory at the peak")]
    intervals = [
        [*names(row), CLOCKS[clock], name, times_text(ratio["ratio"]), interval_text(ratio)]
        for row in verdict.family_rows(results, family)
        for name, clocks in row.get("against", {}).items()
        for clock, ratio in clocks.items()
    ]
    header = ["case", "direction", "clock", "against", "times faster", "95 % interval"]
    found.append(Table("Ratios with the intervals that decide", header, intervals, 4))
    ran = [
        [*names(row), " × ".join(map(str, row["shape"])), row["dtype"], row["layout"], _chosen(row)]
        for row in rows
    ]
    header = ["case", "direction", "shape", "dtype", "layout", "implementation"]
    found.append(Table("What ran", header, ran, 6))
    floors = [
        [
            *names(row),
            row["floor"].get("bound", "-"),
            row["check"]["tensor"] if "check" in row else row["failed"],
            f"{row['floor']['bytes'] / 1e6:.3g}",
            f"{row['floor']['operations'] / 1e6:.3g}",
            us_text(row["floor"]["us"]),
            *(
                f"{row['check'][key]:.2g}" if "check" in row else "-"
                for key in ("error", "allowed")
            ),
        ]
        for row in rows
    ]
    header = ["case", "direction", "bound by", "nearest to its bound", "MB", "million operations"]
    header += ["floor µs", "error", "allowed"]
    found.append(Table("Floors and correctness", header, floors, 4))
    return [table for table in found if table.rows and len(table.header) > 2]


def model_tables(results: dict) -> list[Table]:
    """The means by model, in a table for each clock and rival; none if this was no sweep."""
    entries = results.get("models", [])
    found = []
    for clock, rival in itertools.product(CLOCKS, verdict.rivals(results)):
        own = [entry for entry in entries if (entry["clock"], entry["against"]) == (clock, rival)]
        if not own:
            continue
        batches = sorted({entry["batch"] for entry in own})
        means: dict[tuple, dict] = {}
        for entry in own:
            means.setdefault((entry["model"], entry["mode"]), {})[entry["batch"]] = entry
        rows = [
            [
                model,
                "fwd+bwd" if mode == BOTH else mode,
                *(_mean_text(by_batch.get(batch)) for batch in batches),
                *(str(sum(entry[key] for entry in by_batch.values())) for key in _COUNTS),
            ]
            for (model, mode), by_batch in means.items()
        ]
        title = (
            f"By model, {CLOCKS[clock]}: times faster than {rival}, geometric mean over its blocks"
        )
        header = ["model", "direction", *(f"batch {batch}" for batch in batches), *_COUNTS]
        found.append(Table(title, header, rows, text_columns=2))
    return found


_COUNTS = ("blocks", "slower")


def _mean_text(entry: dict | None) -> str:
    if entry is None:
        return "-"
    return times_text(entry["mean"]) + (" SLOWER" if entry["mean"] < 1 else "")


def _chosen(row: dict) -> str:
    chosen = (choice["chosen"] for choice in row.get("implementation", {}).values())
    return " / ".join(dict.fromkeys(chosen)) or "-"
