"""The plots of a benchmark: ratios, shares of the floor, time against size."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402 - after the choice of what draws

from ..report import Plot  # noqa: E402
from .baselines import OURS  # noqa: E402
from .report import CLOCKS, main_clock, names  # noqa: E402

_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 30, 50, 100, 200, 500, 1000)
# Tell apart without colours too. Those of a family's own get what is left.
_MARKERS = {OURS: "o", "eager": "s", "compile": "^", "naive": "x"}
_COLOURS = {OURS: "#0b57a4", "eager": "#d9822b", "compile": "#3b8f57", "naive": "#8a8f98"}
_MORE = (("D", "#8e44ad"), ("v", "#b03a2e"), ("P", "#16808c"), ("<", "#6b5b2e"), ("*", "#333333"))


def _look(results: dict, name: str) -> tuple[str, str]:
    """Marker and colour."""
    if name in _MARKERS:
        return _MARKERS[name], _COLOURS[name]
    own = [each for each in results["baselines"] if each not in _MARKERS]
    return _MORE[own.index(name) % len(_MORE)]


def plots(results: dict) -> list[Plot]:
    rows = [row for row in results["sums"] + results["rows"] if "against" in row]
    if not rows:
        return []
    pyplot.close("all")
    clock = main_clock(rows[0])
    found = []
    if compared := [row for row in rows if row["against"]]:
        caption = (
            "How many times as long each baseline takes, with 95 % intervals. Left of the line, "
            "ours is slower."
        )
        found.append(Plot("speedup", caption, _ratios(results, compared)))
    caption = (
        f"Which share of its {clock} time ours would need at the floor. At 100 % nothing faster is "
        "possible but from a cache"
    )
    if results["device"] == "cpu":
        caption += ". On a CPU a copy is not the fastest that memory can do"
    return [
        *found,
        Plot("floor", f"{caption}.", _shares(rows, clock)),
        Plot(
            "size",
            f"{CLOCKS[clock]} against the bytes that must move. Points on the dashed line are "
            "at the floor; where points stop falling to the left, calling is all that costs.",
            _sizes(results, rows, clock),
        ),
    ]


def _ratios(results: dict, rows: list[dict]):
    clocks = [clock for clock in CLOCKS if clock in rows[0]["contenders"][OURS]]
    figure, panels = pyplot.subplots(
        1, len(clocks), figsize=(4 + 5 * len(clocks), _height(rows)), sharey=True, squeeze=False
    )
    for axes, clock in zip(panels[0], clocks, strict=True):
        present = [
            name
            for name in results["baselines"]
            if any(clock in row["against"].get(name, {}) for row in rows)
        ]
        for i, name in enumerate(present):
            marker, colour = _look(results, name)
            found = [
                (place + 0.22 * (i - (len(present) - 1) / 2), row["against"][name][clock])
                for place, row in enumerate(rows)
                if clock in row["against"].get(name, {})
            ]
            values = [ratio["ratio"] for _, ratio in found]
            axes.errorbar(
                values,
                [place for place, _ in found],
                xerr=[
                    [max(0, r["ratio"] - r["interval"][0]) for _, r in found],
                    [max(0, r["interval"][1] - r["ratio"]) for _, r in found],
                ],
                fmt=marker,
                color=colour,
                markersize=4,
                label=name,
            )
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.axvspan(min(low, 0.9), 1, color="#b3261e", alpha=0.07)
        axes.set_xlim(min(low, 0.9), max(high, 1.1))
        ticks = [tick for tick in _TICKS if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(f"{clock} time of the baseline over ours")
        if present:
            axes.legend(loc="best", fontsize=8)
        axes.grid(axis="x", alpha=0.3)
    _name_rows(panels[0][0], rows)
    figure.tight_layout()
    return figure


def _shares(rows: list[dict], clock: str):
    figure, axes = pyplot.subplots(figsize=(9, _height(rows)))
    shares = [100 * row["floor"]["us"] / row["contenders"][OURS][clock]["median"] for row in rows]
    bars = axes.barh(range(len(rows)), shares, color=_COLOURS[OURS], height=0.6)
    axes.bar_label(bars, [f"{share:.0f}%" for share in shares], fontsize=7, padding=2)
    axes.axvline(100, color="black", linewidth=1, linestyle="--")
    axes.set_xlim(0, max(110, 1.08 * max(shares)))
    axes.set_xlabel(f"floor over {clock} time of ours, %")
    _name_rows(axes, rows)
    figure.tight_layout()
    return figure


def _sizes(results: dict, rows: list[dict], clock: str):
    modes = list(dict.fromkeys(row["mode"] for row in rows if "case" in row))
    figure, panels = pyplot.subplots(
        1, len(modes), figsize=(6 * len(modes), 4.6), sharey=True, squeeze=False
    )
    panels = panels[0]
    bandwidth = results["ceilings"]["copy_bytes_per_second"]
    for axes, mode in zip(panels, modes, strict=True):
        single = [row for row in rows if row["mode"] == mode and "case" in row]
        for name in (OURS, *results["baselines"]):
            points = [
                (row["floor"]["bytes"] / 1e6, row["contenders"][name][clock]["median"])
                for row in single
                if clock in row["contenders"].get(name, {})
            ]
            if points:
                marker, colour = _look(results, name)
                style = {"marker": marker, "color": colour, "s": 22, "label": name}
                axes.scatter(*zip(*points, strict=True), zorder=3 if name == OURS else 2, **style)
        ends = [pick(row["floor"]["bytes"] for row in single) for pick in (min, max)]
        floor = [end / bandwidth * 1e6 for end in ends]
        axes.plot([end / 1e6 for end in ends], floor, "k--", linewidth=1, label="floor")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(mode, fontsize=10)
        axes.set_xlabel("MB that must move")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    panels[0].set_ylabel(f"{clock} time, µs")
    figure.tight_layout()
    return figure


def _height(rows: list[dict]) -> float:
    return 1.2 + 0.3 * len(rows)


def _name_rows(axes, rows: list[dict]) -> None:
    axes.set_yticks(range(len(rows)), [" ".join(names(row)) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
