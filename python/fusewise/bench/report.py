"""Writes results to the terminal, as Markdown and as a web page. The only input is results.json."""

import sys
from collections import Counter
from pathlib import Path

from .. import report
from ..report import Bars, Plot, Section, Table, Tile, markdown_table, write_page
from . import schema, verdict
from .baselines import OURS
from .environment import busy_machine
from .families import FAMILIES
from .tables import (
    family_table,
    interval_text,
    main_table,
    median,
    model_tables,
    more_tables,
    names,
    ratio_text,
    times_text,
    us_text,
)
from .verdict import CLOCKS

LEGEND = (
    "Ratios say how many times faster ours is: the baseline's time divided by ours. *same*: the "
    "95 % interval of the ratio contains 1. *slower*, in capitals: all of it is below 1. *of "
    "floor*: the floor as a share of our time; the floor is the time that the bytes which must "
    "move, or the operations, need at the rates measured here. *±*: half the distance between the "
    "quartiles. *host µs*: wall time minus GPU time, and its share of the wall time; 0 where the "
    "GPU is never idle. *empty µs*: the wall time of an empty operator with as many tensors. "
    "*graph*: the empty operator takes more than half of our wall time, so only a CUDA graph would "
    "help. Yardsticks do not count in any verdict: *products* is the GEMMs alone, *layers* the "
    "same layers one by one, *graphed* ours as one CUDA graph."
)


def write(results: dict, folder: Path) -> list[Path]:
    """Writes results.json and summary.md; with matplotlib and jinja2 also plots and a page."""
    written = [folder / "results.json", folder / "summary.md"]
    schema.write(results, written[0])
    written[1].write_text(markdown(results))
    plotted = [f"{family}-{what}.png" for family in FAMILIES for what in ("ratios", "sizes")]
    for name in ("report.html", *plotted):
        (folder / name).unlink(missing_ok=True)  # left by an earlier run; this one may not write it
    try:
        from . import plots

        plots.pyplot.close("all")
        families = verdict.families(results)
        ratios = {family: plots.ratios(results, family) for family in families}
        sizes = {family: plots.sizes(results, family) for family in families}
        for plot in sum([*ratios.values(), *sizes.values()], []):
            written.append(folder / f"{plot.name}.png")
            plot.figure.savefig(written[-1], dpi=110)
        _write_page(results, folder / "report.html", ratios, sizes)
        written.append(folder / "report.html")
    except ImportError as error:
        missing = f"{error.name} is not installed; it comes with fusewise[bench]"
        print(f"no plots and no page: {missing}", file=sys.stderr)
    return written


def show(results: dict) -> None:
    """On a terminal: the headline, the losses and the families. Otherwise all of summary.md."""
    if sys.stdout.isatty():
        report.show(*terminal(results))
    else:
        print(markdown(results))


def terminal(results: dict) -> list[Table | str]:
    found = [headline(results), "", *remarks(results), *all_losses(results)]
    return [*found, *_tables(results), "", LEGEND.replace("*", "")]


def markdown(results: dict) -> str:
    lines = ["# Benchmark", ""]
    for part in (headline(results), *remarks(results), *all_losses(results), *_tables(results)):
        lines += [part, ""] if isinstance(part, str) else markdown_table(part)
    lines += [LEGEND, ""]
    if declined := _declined(results):
        lines += markdown_table(declined)
    lines += ["## Environment", "", f"`{results['command']}`", ""]
    lines += [f"- {key}: {value}" for key, value in _facts(results).items()]
    return "\n".join([*lines, ""])


def _tables(results: dict) -> list[Table]:
    """A table of each family's rows; after a sweep, which has too many, means by model."""
    if "models" in results:
        return model_tables(results)
    return [family_table(results, family) for family in verdict.families(results)]


def one_line(row: dict) -> str:
    """One finished row, win or loss. Floors are only known at the end of a run."""
    name = f"{row['case']} {row['mode']}"
    if "failed" in row:
        return f"{name}: {row['failed']}"
    clock = next(clock for clock in CLOCKS if clock in row["contenders"][OURS])
    parts = [f"{name}: {us_text(median(row, clock))} µs"]
    for baseline, clocks in row["against"].items():
        known = clock if clock in clocks else "wall"
        said = "" if known == clock else " in wall time"
        parts.append(f"against {baseline}{said} {ratio_text(row, baseline, known)}")
    return ", ".join(parts)


# --- summaries over all rows ---------------------------------------------------------------------


def headline(results: dict) -> Table:
    """How many rows are faster, same and slower, and the mean speed-up."""
    rows = [
        [
            f"{CLOCKS[score.clock]} vs {score.rival}",
            *map(str, (score.faster, score.same, score.slower)),
            times_text(score.mean),
        ]
        for score in verdict.scores(results)
    ]
    header = ["", "faster", "same", "slower", "times faster"]
    title = f"{len(results['rows'])} rows on {_machine(results)}, times faster is a geometric mean"
    return Table(title, header, rows)


def remarks(results: dict) -> list[str]:
    """Warnings for the headline: a busy machine, failed rows, an interrupted run."""
    lines = busy_machine(results["environment"]) if results["device"] == "cpu" else []
    failed = [row for row in results["rows"] if "failed" in row]
    lines += [f"NOT MEASURED: {one_line(row)}" for row in failed]
    lines += _wrong_rivals(results)
    if results["interrupted"]:
        lines.append("INTERRUPTED: only the rows that were finished before")
    if count := results.get("left"):
        lines.append(f"INCOMPLETE: {count} cases are left; the same command goes on with them")
    if count := sum(map(verdict.only_a_graph_helps, results["rows"])):
        lines.append(
            f"In {count} of {len(results['rows'])} rows an empty operator takes more than half of "
            "the wall time: only a CUDA graph would help there."
        )
    return lines


def _wrong_rivals(results: dict) -> list[str]:
    """Baselines that broke the accuracy rule somewhere and therefore have no times there."""
    lines = []
    for name in results["baselines"]:
        rows = [
            row
            for row in results["rows"]
            if row.get("contenders", {}).get(name, {}).get("unavailable", "").startswith("WRONG")
        ]
        if rows:
            reason = rows[0]["contenders"][name]["unavailable"].removeprefix("WRONG: ")
            cases = ", ".join(dict.fromkeys(row["case"] for row in rows))
            lines.append(
                f"WRONG, so without times: {name} in {len(rows)} of {len(results['rows'])} rows "
                f"({cases}). The first: {reason}"
            )
    return lines


def all_losses(results: dict) -> list[Table | str]:
    """The losses; those in held-out cases apart."""
    apart = [row for row in results["rows"] if row.get("held_out")]
    if not apart:
        return [losses(results)]
    others = [row for row in results["rows"] if not row.get("held_out")]
    where = " among held-out blocks"
    return [losses(results | {"rows": others}), losses(results | {"rows": apart}, where)]


def losses(results: dict, where: str = "") -> Table | str:
    found = verdict.losses(results)
    if not found:
        return f"No losses{where}: no rival is faster in any row."
    rows = [
        [
            *names(loss.row),
            f"{CLOCKS[loss.clock].removesuffix(' time')}, {loss.rival}",
            ratio_text(loss.row, loss.rival, loss.clock),
            interval_text(loss.ratio),
        ]
        for loss in found
    ]
    slow = len({id(loss.row) for loss in found})
    title = f"Losses{where}: in {slow} of {len(results['rows'])} rows a rival is faster"
    header = ["case", "direction", "against", "times faster", "95 % interval"]
    return Table(title, header, rows, text_columns=3, keep=4)


def _declined(results: dict) -> Table | None:
    """Implementations that declined a row, with the reasons; equal ones are counted together."""
    reasons = Counter(
        (row["family"], direction, name, reason)
        for row in results["rows"]
        for direction, choice in row.get("implementation", {}).items()
        for name, reason in choice["declined"].items()
    )
    rows = [[*key[:3], key[3], str(count)] for key, count in reasons.items()]
    header = ["family", "direction", "declined", "because", "rows"]
    return Table("Implementations that declined", header, rows, text_columns=4) if rows else None


def _facts(results: dict) -> dict:
    """The environment, and the measured rates that the floors were computed with."""
    found = dict(results["environment"])
    if "ceilings" in results:
        bandwidth = results["ceilings"]["copy_bytes_per_second"] / 1e9
        found["copy bandwidth, measured, read and written"] = f"{bandwidth:.1f} GB/s"
        rates = results["ceilings"]["matrix_operations_per_second"]
        said = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in rates.items())
        found["matrix rate, measured, TFLOP/s"] = said
    return found


def _machine(results: dict) -> str:
    return results["environment"].get("gpu", results["environment"]["cpu"])


# --- the page ------------------------------------------------------------------------------------


def _write_page(
    results: dict, path: Path, ratios: dict[str, list[Plot]], sizes: dict[str, list[Plot]]
) -> None:
    sections = [
        Section(
            "",
            [_intro(results), *remarks(results)],
            tiles=[_tile(score) for score in verdict.scores(results)],
            bars=_bars(results),
        ),
        *(
            Section("", [lost], box="good")
            if isinstance(lost, str)
            else Section("", tables=[lost], box="bad")
            for lost in all_losses(results)
        ),
        Section("", tables=model_tables(results)),
    ]
    for family in verdict.families(results):
        table = main_table(results, family)
        more = more_tables(results, family)
        sections += [
            Section(family, tables=[table], plots=ratios[family]),
            Section(f"More on {family}", tables=more, plots=sizes[family], folded=True),
        ]
    sections.append(Section("How to read this", [LEGEND.replace("*", "")]))
    if declined := _declined(results):
        sections.append(Section(declined.title, tables=[declined], folded=True))
    title = f"fusewise bench on {_machine(results)}"
    write_page(path, title, results["command"], _facts(results), sections)


def _intro(results: dict) -> str:
    here = results["environment"]
    families = verdict.families(results)
    return (
        f"{len(results['rows'])} rows of {', '.join(families)}; {here['date']}, commit "
        f"{here.get('commit', 'unknown')}. Each figure says how many times faster ours is, as the "
        "geometric mean over the rows. Same: the 95 % interval of a row's ratio contains 1."
    )


def _tile(score: verdict.Score) -> Tile:
    label = f"times faster than {score.rival}, {CLOCKS[score.clock]}"
    counts = {word: getattr(score, word) for word in ("faster", "same", "slower")}
    return Tile(f"{score.mean:.2f}", label, counts)


def _bars(results: dict) -> list[Bars]:
    """For each clock, one bar per family and rival."""
    found = []
    for clock, title in CLOCKS.items():
        groups = {
            family: {
                score.rival: score.mean
                for score in verdict.scores(results, family)
                if score.clock == clock
            }
            for family in verdict.families(results)
        }
        groups = {family: means for family, means in groups.items() if means}
        if groups:
            found.append(
                Bars(f"Times faster by family, {title}; the line is 1, the same speed", groups)
            )
    return found
