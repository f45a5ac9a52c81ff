"""Results as text: lines, tables, Markdown, a plot. Everything here starts from results.json."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from .baselines import OURS

CLOCKS = {
    "gpu": "GPU time (what the kernels cost)",
    "wall": "Wall time (what a user waits, launches included)",
}


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    rows: list[list[str]]


def write(results: dict, folder: Path) -> list[Path]:
    """results.json, summary.md and, where matplotlib is there, speedup.png."""
    written = [folder / "results.json", folder / "summary.md"]
    written[0].write_text(json.dumps(results, indent=1) + "\n")
    written[1].write_text(markdown(results))
    try:
        plot(results, folder / "speedup.png")
        written.append(folder / "speedup.png")
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
    return written


def one_line(row: dict) -> str:
    """A row as it is done, losses as plain as wins."""
    name = f"{row['case']} {row['mode']}"
    if "failed" in row:
        return f"{name}: {row['failed']}"
    clock = next(iter(_clocks(row)))
    parts = [f"{name}: {_us(_median(row, OURS, clock))} µs, {_share(row, clock)} of the floor"]
    parts += [f"against {name} {_ratio(row, name, clock)}" for name in row["against"]]
    return ", ".join(parts)


def tables(results: dict) -> list[Table]:
    """One table for each clock, sums first."""
    found = []
    for clock, title in CLOCKS.items():
        everything = results["sums"] + results["rows"]
        rows = [row for row in everything if _counts_for(row, clock, results["device"])]
        if not rows:
            continue
        header = ["case", "mode", "implementation", "floor µs", "fusewise µs", "of floor"]
        header += [f"against {name}" for name in results["baselines"]]
        memory = clock == "gpu"
        if memory:
            header.append("peak MB, eager's")
        cells = [_cells(row, clock, results["baselines"], memory) for row in rows]
        found.append(Table(title, header, cells))
    return found


def verdicts(results: dict) -> list[str]:
    """How often faster, same and slower, for each baseline and clock."""
    lines = []
    here = results["environment"]
    if results["device"] == "cpu" and here["load"] > here["cores"] / 2:
        lines.append(
            f"BUSY MACHINE: load {here['load']} on {here['cores']} cores at the start; "
            "other work makes these figures unsteady"
        )
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
                lines.append(f"{clock} against {name}: {counts}")
    failed = [row for row in results["rows"] if "failed" in row]
    lines += [f"NOT MEASURED: {one_line(row)}" for row in failed]
    if results["interrupted"]:
        lines.append("INTERRUPTED: what was done until then")
    return lines


def markdown(results: dict) -> str:
    lines = ["# Benchmark", "", f"`{results['command']}`", ""]
    lines += [f"- {key}: {value}" for key, value in results["environment"].items()]
    if "copy_bytes_per_second" in results:
        bandwidth = results["copy_bytes_per_second"] / 1e9
        lines.append(f"- copy bandwidth, measured, read and written: {bandwidth:.1f} GB/s")
    lines += ["", *(f"- {line}" for line in verdicts(results)), ""]
    for table in tables(results):
        lines += [f"## {table.title}", "", _markdown_row(table.header)]
        lines.append(_markdown_row(["---"] * 3 + ["---:"] * (len(table.header) - 3)))
        lines += [_markdown_row(row) for row in table.rows]
        lines.append("")
    lines += [
        "Ratios are the baseline's time over ours: above 1, ours is faster. *same*: the 95 % "
        "interval of the ratio holds 1. Floor: the bytes that must move at the measured copy "
        "bandwidth.",
        "",
    ]
    return "\n".join(lines)


def show(results: dict) -> None:
    """The tables on the terminal, or as Markdown where the output is not one."""
    if sys.stdout.isatty():
        try:
            _show_rich(results)
            return
        except ImportError:
            pass
    print(markdown(results))


def _show_rich(results: dict) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    styles = {"faster": "green", "SLOWER": "bold red", "WRONG": "bold red"}
    for table in tables(results):
        shown = RichTable(title=table.title)
        for i, name in enumerate(table.header):
            shown.add_column(name, justify="left" if i < 3 else "right")
        for row in table.rows:
            style = {cell: next((styles[s] for s in styles if s in cell), "") for cell in row}
            shown.add_row(*(Text(cell, style[cell]) for cell in row))
        console.print(shown)
    for line in verdicts(results):
        console.print(line, markup=False, style="bold red" if line[:3].isupper() else None)


def plot(results: dict, path: Path) -> None:
    """Ratios to every baseline, with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results["sums"] + results["rows"] if "against" in row]
    if not rows:
        return
    clock = next(iter(_clocks(rows[0])))
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.28 * len(rows)))
    for offset, name in enumerate(results["baselines"]):
        places, values, left, right = [], [], [], []
        for place, row in enumerate(rows):
            if clock in row["against"].get(name, {}):
                ratio = row["against"][name][clock]
                places.append(place + 0.2 * (offset - 1))
                values.append(ratio["ratio"])
                left.append(max(0, ratio["ratio"] - ratio["interval"][0]))
                right.append(max(0, ratio["interval"][1] - ratio["ratio"]))
        axes.errorbar(values, places, xerr=[left, right], fmt="o", markersize=4, label=name)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    ticks = [t for t in (0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 30, 100) if t < axes.get_xlim()[1]]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), [" ".join(_names(row)) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"{clock} time of the baseline over ours; right of the line, ours is faster")
    axes.legend()
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _counts_for(row: dict, clock: str, device: str) -> bool:
    if "failed" in row:
        return clock == ("gpu" if device == "cuda" else "wall")
    return clock in _clocks(row)


def _cells(row: dict, clock: str, baselines: list[str], memory: bool) -> list[str]:
    name, mode = _names(row)
    floor = _us(row["floor"]["us"])
    if "failed" in row:
        blank = ["-"] * (len(baselines) + memory)
        return [name, mode, row["failed"], floor, "-", "-", *blank]
    implementation = " / ".join(dict.fromkeys(row.get("implementation", {}).values()))
    cells = [name, mode, implementation, floor, _us(_median(row, OURS, clock)), _share(row, clock)]
    cells += [_ratio(row, baseline, clock) for baseline in baselines]
    if memory:
        peaks = (row["contenders"].get(who, {}).get("peak_bytes") for who in (OURS, "eager"))
        cells.append(", ".join("-" if peak is None else f"{peak / 1e6:.1f}" for peak in peaks))
    return cells


def _names(row: dict) -> tuple[str, str]:
    if "cases" in row:
        return f"{row['group']}, sum of {row['count']}", row["mode"]
    return row["case"], row["mode"]


def _ratio(row: dict, baseline: str, clock: str) -> str:
    if baseline not in row["against"]:
        return row["contenders"].get(baseline, {}).get("unavailable", "-")
    found = row["against"][baseline][clock]
    verdict = "SLOWER" if found["verdict"] == "slower" else found["verdict"]
    return f"{found['ratio']:.2f}x {verdict}"


def _clocks(row: dict) -> list[str]:
    return [clock for clock in CLOCKS if clock in row["contenders"][OURS]]


def _median(row: dict, name: str, clock: str) -> float:
    return row["contenders"][name][clock]["median"]


def _share(row: dict, clock: str) -> str:
    return f"{row['floor']['us'] / _median(row, OURS, clock):.0%}"


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
