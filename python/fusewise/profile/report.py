"""Shows a profile on the terminal, and writes it as a page and as a trace."""

import sys
from pathlib import Path

from .. import report
from ..bench.environment import busy_machine
from ..report import Plot, Section, Table, write_page
from .advice import advise
from .analysis import LAUNCH_BOUND, ModuleKind, Profile, amdahl
from .record import write_trace

_FASTER = (2, 5, float("inf"))
_SMALLEST_SHARE = 0.005


def show(profile: Profile) -> None:
    report.show(*_lines(profile), _advice(profile), *_tables(profile))


def write(profile: Profile, folder: Path) -> list[Path]:
    """Writes the trace and, if matplotlib and jinja2 are installed, the page and its plots."""
    written = [folder / "trace.json.gz"]
    write_trace(profile.trace, written[0])
    try:
        drawn = _plots(profile)
        for plot in drawn:
            written.append(folder / f"{plot.name}.png")
            plot.figure.savefig(written[-1], dpi=110)
        sections = [
            Section("In short", _lines(profile), [_advice(profile)]),
            Section("Where a step goes", plots=drawn, tables=_tables(profile)),
        ]
        written.append(folder / "report.html")
        title = f"fusewise profile of {profile.model}"
        write_page(written[-1], title, profile.command, _facts(profile), sections)
    except ImportError as error:
        missing = f"{error.name} is not installed; it comes with fusewise[bench]"
        print(f"no page: {missing}", file=sys.stderr)
    return written


def _facts(profile: Profile) -> dict:
    rate = profile.ceilings.operations_per_second[profile.dtype]
    return profile.environment | {
        "copy bandwidth, measured, read and written": (
            f"{profile.ceilings.bytes_per_second / 1e9:.1f} GB/s"
        ),
        f"matrix rate, measured, {profile.dtype}": f"{rate / 1e12:.3g} TFLOP/s",
    }


def _lines(profile: Profile) -> list[str]:
    step = "forward and backward, no optimizer" if profile.train else "forward"
    low, high = profile.wall_spread
    lines = busy_machine(profile.environment) if profile.device == "cpu" else []
    lines += [
        f"A step ({step}) takes {_ms(profile.wall_us)} ms, half of the steps between {_ms(low)} "
        f"and {_ms(high)}, measured without the profiler."
    ]
    who = "kernels" if profile.device == "cuda" else "operators"
    idle = (
        f"In {_ms(profile.work_us)} ms of it {who} run ({profile.launches:.0f} of them); "
        f"{profile.idle:.0%} is idle"
    )
    if profile.device == "cpu":
        idle += ": Python between the operators."
    elif profile.idle > LAUNCH_BOUND:
        idle += (
            ": LAUNCH-BOUND. Keep the GPU busy first. Until then faster kernels change little, and "
            "the speed-ups given for classes of modules do not apply."
        )
    else:
        idle += ": not launch-bound."
    lines.append(idle)
    if profile.gaps:
        gaps = profile.gaps
        lines.append(
            f"Gaps between kernels, under the profiler: {gaps.count:.0f} a step, half of them "
            f"below {gaps.median_us:.1f} µs, the longest {gaps.largest_us:.0f} µs."
        )
    if profile.modules:
        lines.append(
            "Speed-ups are upper bounds by Amdahl's law, 1 / (1 - s + s / k). Those of a class of "
            f"modules are of the {_ms(profile.work_us)} ms in which {who} run; those of something "
            f"to try are of the whole step. {_ms(profile.outside_us)} ms of the work belong to no "
            "module. A class's time includes its inner modules, so the shares add up to more than "
            "100 %."
        )
    else:
        lines.append("No module inside the model was seen: a compiled model hides them.")
    return lines


def _tables(profile: Profile) -> list[Table]:
    total = sum(profile.kinds.values())
    found = [
        Table(
            "Kinds of work",
            ["kind", "ms a step", "share of work"],
            [
                [kind, _ms(us), f"{us / total:.1%}"]
                for kind, us in sorted(profile.kinds.items(), key=lambda item: -item[1])
            ],
        )
    ]
    header = ["class", "calls", "ms a step", "share of work", "floor ms", "of floor"]
    header += [f"whole, if {k:g}x as fast" for k in _FASTER[:-1]] + ["whole, if free"]
    rows = [
        [
            kind.name,
            str(kind.calls),
            _ms(kind.us),
            f"{kind.share:.1%}",
            _ms(kind.floor_us),
            f"{kind.floor_us / kind.us:.0%}",
            *(_times(amdahl(kind.share, k)) for k in _FASTER),
        ]
        for kind in _shown(profile)
    ]
    if rows:
        title = f"Kinds of modules (the whole: {_ms(profile.work_us)} ms of work, no idle time)"
        found.append(Table(title, header, rows))
    if profile.conversions:
        rows = [
            [name, f"{count:.1f}", _ms(us)] for name, (count, us) in profile.conversions.items()
        ]
        found.append(Table("Layout conversions by name", ["name", "a step", "ms a step"], rows))
    return found


def _shown(profile: Profile) -> list[ModuleKind]:
    return [kind for kind in profile.modules if kind.share >= _SMALLEST_SHARE]


def _advice(profile: Profile) -> Table:
    rows = [[item.what, item.why, _times(item.bound)] for item in advise(profile)]
    header = ["try", "because", "whole step, at most"]
    return Table("What to try first", header, rows, text_columns=2)


def _plots(profile: Profile) -> list[Plot]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")
    work = dict(sorted(profile.kinds.items(), key=lambda item: -item[1]))
    idle = {"idle": max(0.0, profile.wall_us - profile.work_us)}

    def bars(values: dict[str, float]):
        figure, axes = pyplot.subplots(figsize=(9, 1 + 0.34 * len(values)))
        times = [us / 1e3 for us in values.values()]
        colours = ["#b3261e" if name == "idle" else "#0b57a4" for name in values]
        drawn = axes.barh(range(len(values)), times, color=colours, height=0.65)
        axes.bar_label(drawn, [f"{us / profile.wall_us:.0%}" for us in values.values()], padding=3)
        axes.set_yticks(range(len(values)), list(values))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(times))
        axes.set_xlabel("ms per step, and the share of the wall time")
        return figure, axes

    figure, _ = bars(work | idle)
    found = [Plot("kinds", "What a step spends its time on, and how long it is idle.", figure)]
    if shown := _shown(profile):
        figure, axes = bars({kind.name: kind.us for kind in shown})
        for place, kind in enumerate(shown):
            ends = [place - 0.4, place + 0.4]
            axes.plot([kind.floor_us / 1e3] * 2, ends, color="#d9822b", linewidth=2)
        caption = "Time by class of module, inner modules included; the orange line is the floor."
        found.append(Plot("modules", caption, figure))
    for plot in found:
        plot.figure.tight_layout()
    return found


def _times(bound: float) -> str:
    return f"{bound:.2f}x" if bound < 1000 else "-"


def _ms(us: float) -> str:
    return f"{us / 1e3:.3g}"
