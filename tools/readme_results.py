"""Draws the README's picture, docs/images/speedups-*.svg, and prints its table of results.

    .venv/bin/python tools/readme_results.py

Both are made from the results that RESULTS names. The picture has one mark for each row of the
benchmarks and one line for each family and rival. Its files are the same whenever the results and
matplotlib are.
"""

import io
import math
import re
from pathlib import Path

from fusewise.bench import schema, verdict
from fusewise.bench.baselines import OURS
from fusewise.bench.plots import LOOKS, pyplot, ratio_axis
from fusewise.bench.verdict import CLOCKS, Score
from fusewise.report import Table, markdown_table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "images"
RESULTS = {
    "Squeeze-and-\nExcitation": "2026-11-16-h200/squeeze_excite",
    "BatchNorm +\nactivation": "2026-11-18-h200/batch_norm",
    "Linear +\nactivation": "2026-11-16-h200/linear",
    "Autoencoder": "2026-11-16-h200/autoencoder",
}
SQUEEZE_EXCITE, BATCH_NORM, LINEAR, AUTOENCODER = RESULTS
SHORT = {"forward": "forward", "forward+backward": "fwd+bwd"}
BOTH = tuple(SHORT)
# The rows of the table: what it is, the results, the name of the case or of the group, the modes.
TABLE = (
    ("Squeeze-and-Excitation, EfficientNet-B4, fp16", SQUEEZE_EXCITE, "efficientnet-b4", BOTH),
    ("BatchNorm + activation, ResNet-50, fp16", BATCH_NORM, "resnet-50", BOTH),
    ("BatchNorm + activation, EfficientNet-B4, fp16", BATCH_NORM, "efficientnet-b4", BOTH),
    ("Linear + relu, 1024 × 784 × 2048, bf16", LINEAR, "1024x784x2048-bf16", BOTH[1:]),
    ("Linear + relu, 8192 × 4096 × 4096, bf16", LINEAR, "8192x4096x4096-bf16", BOTH[1:]),
    ("Linear + relu, 65536 × 1024 × 1024, bf16", LINEAR, "65536x1024x1024-bf16", BOTH[1:]),
    ("MLP, 8192 × 4096, 4 layers, bf16", LINEAR, "8192x4096-4x4096-bf16", BOTH[1:]),
    ("Autoencoder, 512 rows, fp32", AUTOENCODER, "rows-512", BOTH),
    ("Autoencoder, 65536 rows, fp32", AUTOENCODER, "rows-65536", BOTH),
)
RIVALS = {"eager": "eager", "compile": "torch.compile"}
INK = {"light": "#1f2328", "dark": "#e6edf3"}
SHADE = {"light": 0.08, "dark": 0.3}  # of the red part
COLOURS = {
    "light": {rival: LOOKS[rival][1] for rival in RIVALS},
    "dark": {"eager": "#f0a35e", "compile": "#6cc68a"},
}


def read(folder: str) -> dict:
    return schema.read(ROOT / "docs" / "results" / folder / "results.json")


def table() -> str:
    """The README's table of results, as Markdown."""
    rows = []
    for what, family, name, modes in TABLE:
        results = read(RESULTS[family])
        for row in results["sums"] + results["rows"]:
            if name == row.get("case", row["group"]) and row["mode"] in modes:
                rows.append([what, SHORT[row["mode"]], *_cells(row)])
    against = [f"vs {rival}" for rival in RIVALS]
    header = ["", "", "GPU µs", *against, "wall µs", *against]
    return "\n".join(markdown_table(Table("", header, rows, 2))[2:-1])


def _cells(row: dict) -> list[str]:
    """By clock: our time, and how many times faster than each rival it is."""
    found = []
    for clock in CLOCKS:
        us = row["contenders"][OURS][clock]["median"]
        found.append(f"{us:.0f}" if us >= 100 else f"{us:.1f}")
        for rival in RIVALS:
            ratio = row["against"].get(rival, {}).get(clock)
            same = " (same)" if ratio and ratio["verdict"] == "same" else ""
            found.append(f"{ratio['ratio']:.2f}{same}" if ratio else "–")
    return found


def lines() -> list[tuple[str, str, dict]]:
    """For each line of the picture: family, rival, and by clock the score and all ratios."""
    found = []
    for family, folder in RESULTS.items():
        results = read(folder)
        scores = {(score.clock, score.rival): score for score in verdict.scores(results)}
        for rival in RIVALS:
            each = {
                clock: (scores[clock, rival], _ratios(results, clock, rival)) for clock in CLOCKS
            }
            found.append((family, rival, each))
    return found


def _ratios(results: dict, clock: str, rival: str) -> list[float]:
    against = [row.get("against", {}).get(rival, {}) for row in results["rows"]]
    return sorted(ratios[clock]["ratio"] for ratios in against if clock in ratios)


def picture(look: str) -> str:
    """The SVG for a light or a dark page."""
    ink = INK[look]
    style = {
        "axes.edgecolor": ink,
        "axes.labelcolor": ink,
        "font.size": 9,
        "svg.hashsalt": "fusewise",
        "text.color": ink,
        "xtick.color": ink,
        "ytick.color": ink,
    }
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(1, len(CLOCKS), figsize=(9, 3.5), sharey=True)
        found = lines()
        ratios = [r for *_, each in found for _, values in each.values() for r in values]
        for axes, clock in zip(panels, CLOCKS, strict=True):
            for place, (_, rival, each) in enumerate(found):
                _line(axes, place, COLOURS[look][rival], *each[clock])
            _frame(axes, CLOCKS[clock], (min(ratios) / 1.2, max(ratios) * 1.1))
            axes.patches[0].set_alpha(SHADE[look])
        _names(panels[0], found, COLOURS[look])
        figure.subplots_adjust(left=0.2, right=0.89, top=0.93, bottom=0.13, wspace=0.37)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return _shorter(out.getvalue())


def _shorter(svg: str) -> str:
    """Without indentation, and with two decimals of all but the scales of glyphs."""
    svg = re.sub(r" *\n *", "\n", svg)
    return re.sub(r"(?<!scale\()(?<!\d)\d+\.\d{3,}", lambda x: f"{float(x[0]):.2f}", svg)


def _height(place: int) -> float:
    """Pairs of lines, one pair for each family."""
    return place + 0.5 * (place // len(RIVALS))


def _line(axes, place: int, colour: str, score: Score, ratios: list[float]) -> None:
    y = _height(place)
    # One path with gaps. A path for each mark would double the file.
    xs = [x for ratio in ratios for x in (ratio, ratio, math.nan)]
    axes.plot(xs, [y - 0.36, y + 0.36, math.nan] * len(ratios), color=colour, linewidth=0.8)
    axes.plot(score.mean, y, "D", color=colour, markersize=6, markeredgecolor=INK["light"])
    text = f"{score.mean:.2f}   {score.slower} of {score.total}"
    axes.text(1.02, y, text, fontsize=8, va="center", transform=axes.get_yaxis_transform())


def _frame(axes, title: str, ends: tuple[float, float]) -> None:
    ratio_axis(axes, ends)
    axes.tick_params(labeltop=False, left=False)
    axes.set_xlabel(f"times faster, {title}")
    axes.text(1.02, 1.03, "mean  slower", fontsize=8, transform=axes.transAxes)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)


def _names(axes, found: list, colours: dict[str, str]) -> None:
    axes.set_ylim(_height(len(found) - 1) + 0.7, -0.7)
    axes.set_yticks([])
    for place, (family, rival, _) in enumerate(found):
        at = axes.get_yaxis_transform()
        y = _height(place)
        axes.text(
            -0.03, y, RIVALS[rival], color=colours[rival], ha="right", va="center", transform=at
        )
        if place % len(RIVALS) == 0:
            axes.text(-0.67, y + 0.5, family, va="center", transform=at)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for look in INK:
        path = FOLDER / f"speedups-{look}.svg"
        path.write_text(picture(look))
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size} bytes")
    print(table())
