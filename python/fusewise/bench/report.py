"""Results as lines, tables, Markdown and a page. Everything here starts from results.json."""

import json
import sys
from collections import Counter
from pathlib import Path

from ..report import Section, Table, markdown_table, show_tables, write_page
from .baselines import BOUNDS, OURS
from .environment import busy_machine

CLOCKS = {
    "gpu": "GPU time (what the kernels cost)",
    "wall": "Wall time (what a user waits, launches included)",
}
LEGEND = (
    "Ratios are the baseline's time over ours: above 1, ours is faster. *same*: the 95 % interval "
    "of the ratio holds 1. Floor: the longer of the bytes that must move at the measured copy "
    "bandwidth and the operations at the measured matrix rate. ± is half the distance between the "
    "quartiles. Bounds: *products*, the matrix products alone, less than what ours computes, and "
    "*graphed*, ours as one CUDA graph."
)


def write(results: dict, folder: Path) -> list[Path]:
    """results.json, summary.md and, where matplotlib and jinja2 are there, plots and a page."""
    for name in ("report.html", "speedup.png", "floor.png", "size.png"):
        (folder / name).unlink(missing_ok=True)  # an earlier run's, which may not come again
    written = [folder / "results.json", folder / "summary.md"]
    written[0].write_text(json.dumps(results, indent=1) + "\n")
    written[1].write_text(markdown(results))
    try:
        from . import plots

        drawn = plots.plots(results)
        for plot in drawn:
            written.append(folder / f"{plot.name}.png")
            plot.figure.savefig(written[-1], dpi=110)
        _write_page(results, folder / "report.html", drawn)
        written.append(folder / "report.html")
    except ImportError as error:
        missing = f"{error.name} is not installed; it comes with fusewise[bench]"
        print(f"no plots and no page: {missing}", file=sys.stderr)
    return written


def _write_page(results: dict, path: Path, drawn: list) -> None:
    facts = results["environment"] | dict(_ceilings(results))
    legend = LEGEND.replace("*", "")
    sections = [Section("Verdicts", verdicts(results), plots=drawn)]
    sections.append(Section("Tables", [legend], [*tables(results), *_more_tables(results)]))
    title = f"fusewise bench on {results['environment'].get('gpu', results['environment']['cpu'])}"
    write_page(path, title, results["command"], facts, sections)


def one_line(row: dict) -> str:
    """A row as it is done, losses as plain as wins."""
    name = f"{row['case']} {row['mode']}"
    if "failed" in row:
        return f"{name}: {row['failed']}"
    clock = main_clock(row)
    parts = [f"{name}: {us_text(_median(row, OURS, clock))} µs, {_share(row, clock)} of the floor"]
    for name, clocks in row["against"].items():
        known = clock if clock in clocks else "wall"
        said = "" if known == clock else " in wall time"
        parts.append(f"against {name}{said} {_ratio(row, name, known)}")
    return ", ".join(parts)


def tables(results: dict) -> list[Table]:
    """One table for each clock, sums first."""
    found = []
    for clock, title in CLOCKS.items():
        everything = results["sums"] + results["rows"]
        rows = [row for row in everything if _counts_for(row, clock, results["device"])]
        if not rows:
            continue
        header = ["case", "mode", "implementation", "floor µs", "fusewise µs", "±", "of floor"]
        header += [f"vs {name}" for name in results["baselines"]]
        on_gpu = clock == "gpu"
        if on_gpu:
            header += ["kernels, eager's", "peak MB, eager's"]
        cells = [_cells(row, clock, results["baselines"], on_gpu) for row in rows]
        found.append(Table(title, header, cells, text_columns=3))
    return found


def verdicts(results: dict) -> list[str]:
    """How often faster, same and slower, for each baseline and clock."""
    lines = busy_machine(results["environment"]) if results["device"] == "cpu" else []
    for clock in CLOCKS:
        for name in results["baselines"]:
            found = [
                row["against"][name][clock]["verdict"]
                for row in results["rows"]
                if clock in row.get("against", {}).get(name, {})
            ]
            if found:
                counts = ", ".join(
                    f"{found.count(verdict)} {verdict}" for verdict in ("faster", "same", "slower")
                )
                lines.append(f"{clock} time against {name}: {counts}")
    lines += [
        f"SLOWER in {clock} time than {name}: {', '.join(losses)}"
        for clock in CLOCKS
        for name in results["baselines"]
        if name not in BOUNDS and (losses := _losses(results, name, clock))
    ]
    lines += _declined(results)
    failed = [row for row in results["rows"] if "failed" in row]
    lines += [f"NOT MEASURED: {one_line(row)}" for row in failed]
    if results["interrupted"]:
        lines.append("INTERRUPTED: what was done until then")
    return lines


def _declined(results: dict) -> list[str]:
    """Implementations that did not take a row, with the reasons, equal ones counted."""
    reasons = Counter(
        (row["family"], direction, name, reason)
        for row in results["rows"]
        for direction, choice in row.get("implementation", {}).items()
        for name, reason in choice["declined"].items()
    )
    return [
        f"{family} {direction}, {name} declined {count} of the rows: {reason}"
        for (family, direction, name, reason), count in reasons.items()
    ]


def _losses(results: dict, name: str, clock: str) -> list[str]:
    return [
        " ".join(names(row))
        for row in results["rows"]
        if row.get("against", {}).get(name, {}).get(clock, {}).get("verdict") == "slower"
    ]


def markdown(results: dict) -> str:
    lines = ["# Benchmark", "", f"`{results['command']}`", ""]
    lines += [f"- {key}: {value}" for key, value in results["environment"].items()]
    lines += [f"- {key}: {value}" for key, value in _ceilings(results)]
    lines += ["", *(f"- {line}" for line in verdicts(results)), ""]
    for table in tables(results):
        lines += markdown_table(table)
    return "\n".join([*lines, LEGEND, ""])


def show(results: dict) -> None:
    """The tables on the terminal, or the whole of summary.md where the output is not one."""
    if sys.stdout.isatty():
        show_tables(tables(results), verdicts(results))
    else:
        print(markdown(results))


def main_clock(row: dict) -> str:
    """GPU time where there is one."""
    return next(clock for clock in CLOCKS if clock in row["contenders"][OURS])


def names(row: dict) -> tuple[str, str]:
    if "cases" in row:
        return f"{row['group']}, sum of {row['count']}", row["mode"]
    return row["case"], row["mode"]


def _ceilings(results: dict):
    """What the floors were computed with."""
    if "ceilings" in results:
        bandwidth = results["ceilings"]["copy_bytes_per_second"] / 1e9
        yield "copy bandwidth, measured, read and written", f"{bandwidth:.1f} GB/s"
        rates = results["ceilings"]["matrix_operations_per_second"]
        found = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates.items())
        yield "matrix rate, measured, TFLOP/s", found


def _more_tables(results: dict) -> list[Table]:
    """For the page alone: intervals, where floors come from, how near is right, who declined."""
    rows = results["rows"]
    ratios = [
        [*names(row), name, clock, *_ratio_cells(ratio)]
        for row in results["sums"] + rows
        for name, clocks in row.get("against", {}).items()
        for clock, ratio in clocks.items()
    ]
    header = ["case", "mode", "baseline", "time", "verdict", "ratio", "95 % from", "to"]
    intervals = Table("Ratios with their intervals", header, ratios, text_columns=5)
    floors = [
        [
            *names(row),
            " × ".join(map(str, row["shape"])),
            row["dtype"],
            row["layout"],
            f"{row['floor']['bytes'] / 1e6:.3g}",
            f"{row['floor']['operations'] / 1e6:.3g}",
            us_text(row["floor"]["us"]),
            row["floor"]["bound"],
            *_check_cells(row),
        ]
        for row in rows
    ]
    header = ["case", "mode", "shape", "dtype", "layout", "MB", "million operations", "floor µs"]
    header += ["bound by", "nearest to its bound", "error", "allowed"]
    found = [intervals, Table("Floors and correctness", header, floors, text_columns=5)]
    declined = [
        [*names(row), direction, choice["chosen"], name, reason]
        for row in rows
        for direction, choice in row.get("implementation", {}).items()
        for name, reason in choice["declined"].items()
    ]
    if declined:
        header = ["case", "mode", "direction", "ran", "declined", "because"]
        found.append(Table("Why others did not run", header, declined, text_columns=6))
    return found


def _ratio_cells(ratio: dict) -> list[str]:
    figures = (f"{value:.3f}" for value in (ratio["ratio"], *ratio["interval"]))
    return [_word(ratio), *figures]


def _check_cells(row: dict) -> list[str]:
    if "check" not in row:
        return [row["failed"], "-", "-"]
    return [
        row["check"]["tensor"],
        f"{row['check']['error']:.2g}",
        f"{row['check']['allowed']:.2g}",
    ]


def _counts_for(row: dict, clock: str, device: str) -> bool:
    if "failed" in row:
        return clock == ("gpu" if device == "cuda" else "wall")
    return clock in row["contenders"][OURS]


def _cells(row: dict, clock: str, baselines: list[str], on_gpu: bool) -> list[str]:
    name, mode = names(row)
    floor = us_text(row["floor"]["us"])
    if "failed" in row:
        blank = ["-"] * (3 + len(baselines) + 2 * on_gpu)
        return [name, mode, row["failed"], floor, *blank]
    chosen = (choice["chosen"] for choice in row.get("implementation", {}).values())
    cells = [name, mode, " / ".join(dict.fromkeys(chosen)), floor]
    cells += [us_text(_median(row, OURS, clock)), _spread(row, clock), _share(row, clock)]
    cells += [_ratio(row, baseline, clock) for baseline in baselines]
    if on_gpu:
        cells.append(_ours_and_eagers(row, "kernels", "{:.0f}", 1))
        cells.append(_ours_and_eagers(row, "peak_bytes", "{:.1f}", 1e6))
    return cells


def _ours_and_eagers(row: dict, key: str, form: str, unit: float) -> str:
    found = (row["contenders"].get(who, {}).get(key) for who in (OURS, "eager"))
    return ", ".join("-" if value is None else form.format(value / unit) for value in found)


def _spread(row: dict, clock: str) -> str:
    times = row["contenders"][OURS][clock]
    if "quartiles" not in times:
        return "-"
    low, high = times["quartiles"]
    return f"{(high - low) / 2 / times['median']:.1%}"


def _ratio(row: dict, baseline: str, clock: str) -> str:
    if clock not in row["against"].get(baseline, {}):
        return row["contenders"].get(baseline, {}).get("unavailable", "-")
    found = row["against"][baseline][clock]
    word = "" if baseline in BOUNDS else f" {_word(found)}"
    return f"{found['ratio']:.2f}x{word}"


def _word(ratio: dict) -> str:
    return "SLOWER" if ratio["verdict"] == "slower" else ratio["verdict"]


def _median(row: dict, name: str, clock: str) -> float:
    return row["contenders"][name][clock]["median"]


def _share(row: dict, clock: str) -> str:
    return f"{row['floor']['us'] / _median(row, OURS, clock):.0%}"


def us_text(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
