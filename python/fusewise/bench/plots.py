"""The plots of a family: each row's ratios and share of the floor, and time against size."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 - the backend must be chosen first

from ..report import Plot  # noqa: E402
from . import verdict  # noqa: E402
from .baselines import OURS  # noqa: E402
from .tables import names  # noqa: E402
from .verdict import CLOCKS  # noqa: E402

_MOST_ROWS = 200
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_FINE_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4)
# Distinguishable without colours too. A family's own baselines get the looks in _MORE.
LOOKS = {
    OURS: ("o", "#0b57a4"),
    "eager": ("s", "#c25e00"),
    "compile": ("^", "#2f7d4a"),
    "naive": ("x", "#6d737c"),
}
_MORE = (("D", "#8e44ad"), ("v", "#b03a2e"), ("P", "#16808c"), ("<", "#6b5b2e"), ("d", "#333333"))


def ratios(results: dict, family: str) -> list[Plot]:
    """One plot, or none if nothing was measured or the plot would be too long to read."""
    rows = _measured(results, family)
    if not rows or len(rows) > _MOST_ROWS:
        return []
    caption = (
        "How many times faster ours is, with 95 % intervals; in the red part it is slower. Hollow "
        "points are yardsticks, not rivals. For values beyond the right edge see the tables. The "
        "last panel shows the floor as a share of our time."
    )
    return [Plot(f"{family}-ratios", caption, _ratios(results, rows))]


def sizes(results: dict, family: str) -> list[Plot]:
    rows = [row for row in _measured(results, family) if "case" in row]
    if not rows:
        return []
    clock = verdict.main_clock(results)
    caption = (
        f"The {CLOCKS[clock]} against the bytes that must move. Where points stop falling to the "
        "left, only the cost of a call remains."
    )
    return [Plot(f"{family}-sizes", caption, _sizes(results, rows, clock))]


def _measured(results: dict, family: str) -> list[dict]:
    return [row for row in verdict.family_rows(results, family) if "against" in row]


def _ratios(results: dict, rows: list[dict]):
    clocks = [
        clock
        for clock in CLOCKS
        if any(clock in each for r in rows for each in r["against"].values())
    ]
    figure, panels = pyplot.subplots(
        1,
        len(clocks) + 1,
        figsize=(11.5 if len(clocks) > 1 else 9, 1.3 + 0.22 * len(rows)),
        sharey=True,
        squeeze=False,
        layout="constrained",
        gridspec_kw={"width_ratios": [*(2 for _ in clocks), 1]},
    )
    handles = {}
    for axes, clock in zip(panels[0], clocks, strict=False):
        for name in results["baselines"]:
            found = [
                (place, row["against"][name][clock])
                for place, row in enumerate(rows)
                if clock in row["against"].get(name, {})
            ]
            if found:
                handles[name] = _marks(axes, results, name, found)
        ratio_axis(axes, _range(results, rows, clock))
        axes.set_xlabel(f"times faster, {CLOCKS[clock]}")
    _shares(panels[0][-1], rows, verdict.main_clock(results))
    panels[0][0].set_yticks(range(len(rows)), [" ".join(names(row)) for row in rows], fontsize=8)
    panels[0][0].set_ylim(len(rows) - 0.4, -0.6)
    _finish(figure, handles)
    return figure


def _marks(axes, results: dict, name: str, found: list[tuple[int, dict]]):
    """Draws a baseline's ratios, each on the line of its row."""
    marker, colour = _look(results, name)
    return axes.errorbar(
        [ratio["ratio"] for _, ratio in found],
        [place for place, _ in found],
        xerr=[
            [max(0, ratio["ratio"] - ratio["interval"][0]) for _, ratio in found],
            [max(0, ratio["interval"][1] - ratio["ratio"]) for _, ratio in found],
        ],
        fmt=marker,
        color=colour,
        markersize=5,
        markerfacecolor="none" if verdict.is_yardstick(name) else colour,
        linewidth=1,
    )


def _range(results: dict, rows: list[dict], clock: str) -> tuple[float, float]:
    """The x range: includes every loss, and on the faster side only the headline's rivals."""
    found = {
        name: [row["against"][name][clock] for row in rows if clock in row["against"].get(name, {})]
        for name in results["baselines"]
    }
    lows = [ratio["interval"][0] for ratios in found.values() for ratio in ratios]
    first = verdict.headline_rivals(results)
    highs = [ratio["interval"][1] for name in first for ratio in found[name]]
    return min([*lows, 1]) / 1.1, max([*highs, 1]) * 1.1


def ratio_axis(axes, ends: tuple[float, float]) -> None:
    """A logarithmic axis of ratios, on which what is below 1 is red."""
    low, high = ends
    axes.set_xscale("log")
    axes.axvspan(low, 1, color="#b3261e", alpha=0.08)
    axes.axvline(1, color=pyplot.rcParams["axes.edgecolor"], linewidth=1)
    axes.set_xlim(low, high)
    ticks = [tick for tick in (_FINE_TICKS if high / low < 6 else _TICKS) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.tick_params(labeltop=True)
    axes.grid(alpha=0.25)


def _shares(axes, rows: list[dict], clock: str) -> None:
    shares = [100 * row["floor"]["us"] / row["contenders"][OURS][clock]["median"] for row in rows]
    end = max(100, *shares)
    axes.barh(range(len(rows)), shares, color=LOOKS[OURS][1], height=0.6)
    for place, share in enumerate(shares):
        axes.text(1.04 * end, place, f"{share:.0f}%", fontsize=7, va="center")
    axes.axvline(100, color="black", linewidth=1, linestyle="--")
    axes.set_xlim(0, 1.3 * end)
    axes.set_xticks([0, 50, 100])
    axes.tick_params(labeltop=True)
    axes.set_xlabel(f"% of floor, {CLOCKS[clock]}")


def _megabytes(row: dict) -> float:
    """Megabytes that a call touches. Older files only have those that cross memory."""
    return row["floor"].get("touched_bytes", row["floor"]["bytes"]) / 1e6


def _sizes(results: dict, rows: list[dict], clock: str):
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, panels = pyplot.subplots(
        1,
        len(modes),
        figsize=(max(6, 4 * len(modes)), 4.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    handles = {}
    for axes, mode in zip(panels[0], modes, strict=True):
        single = [row for row in rows if row["mode"] == mode]
        for name in (OURS, *results["baselines"]):
            points = [
                (_megabytes(row), row["contenders"][name][clock]["median"])
                for row in single
                if clock in row["contenders"].get(name, {})
            ]
            if points:
                marker, colour = _look(results, name)
                handles[name] = axes.scatter(
                    *zip(*points, strict=True),
                    marker=marker,
                    color=colour,
                    s=22,
                    zorder=3 if name == OURS else 2,
                )
        floors = sorted((_megabytes(row), row["floor"]["us"]) for row in single)
        handles["floor"] = axes.scatter(
            *zip(*floors, strict=True), marker="_", color="black", s=60, linewidth=1.2
        )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(mode, fontsize=10)
        axes.set_xlabel("MB read and written")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel(f"{CLOCKS[clock]}, µs")
    _finish(figure, handles)
    return figure


def _finish(figure, handles: dict) -> None:
    """Adds one legend outside all panels, then fixes the layout once for every output format."""
    where = {"loc": "outside upper left", "ncols": 8, "fontsize": 8, "frameon": False}
    if handles:
        figure.legend(handles.values(), handles.keys(), **where)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def _look(results: dict, name: str) -> tuple[str, str]:
    """Marker and colour."""
    if name in LOOKS:
        return LOOKS[name]
    own = [each for each in results["baselines"] if each not in LOOKS]
    return _MORE[own.index(name) % len(_MORE)]
