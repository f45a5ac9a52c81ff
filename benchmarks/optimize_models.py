"""Runs `fusewise optimize` on common models, in training and inference, and makes a table.

    .venv/bin/python benchmarks/optimize_models.py --device cpu --out optimize-models

Each run has a process and a folder of its own, with its report and `log.txt`, which says when each
phase began. A run whose report is there is not repeated, unless the report lacks torch.compile,
which is now wanted. With `--minutes`, nothing new is started after that time; the next call goes
on. A run that takes longer than `--seconds` is stopped; the next call tries it again. `summary.md`
shows all reports that are there.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import geometric_mean

import torch

from fusewise.report import show
from fusewise.report.table import Table, markdown_table

CONVOLUTIONAL, OTHERS = (
    {
        "torchvision:efficientnet_b4": "32,3,380,380",
        "timm:seresnet50": "64,3,224,224",
        "torchvision:resnet50": "64,3,224,224",
        "torchvision:efficientnet_b0": "64,3,224,224",
        "torchvision:efficientnet_v2_s": "64,3,224,224",
        "torchvision:mobilenet_v3_large": "64,3,224,224",
        "torchvision:regnet_y_8gf": "64,3,224,224",
        "timm:efficientnet_b4": "32,3,380,380",
    },
    {
        "torchvision:vit_b_16": "64,3,224,224",
        "timm:mixer_b16_224": "64,3,224,224",
        "timm:convnext_tiny": "64,3,224,224",
    },
)
SMALL = (
    "torchvision:efficientnet_b0",
    "torchvision:mobilenet_v3_small",
    "torchvision:mobilenet_v3_large",
    "torchvision:regnet_y_400mf",
    "torchvision:resnet18",
    "timm:resnet18",
    "timm:seresnet18",
    "timm:efficientnet_b0",
)
MODELS = {"cuda": CONVOLUTIONAL | OTHERS, "cpu": dict.fromkeys(SMALL, "4,3,128,128")}
OPTIONS = {"cuda": ("--amp", "--channels-last", "--graph"), "cpu": ()}
MARGIN = 60  # seconds that the last run may take longer than --minutes
SECONDS = {"cuda": 400.0, "cpu": 1800.0}
MODES = {"training": ("--train",), "inference": ()}
VARIANTS = ("original", "compiled", "swapped", "swapped + compiled")
GRAPHS = tuple(f"{name} + graph" for name in VARIANTS)
CLOCKS = {"gpu": "GPU time", "wall": "Wall time"}


def folder_of(model: str, mode: str, out: Path) -> Path:
    return out / f"{model.replace(':', '-')}-{mode}"


def read_report(model: str, mode: str, out: Path) -> dict | None:
    """None if there is none yet."""
    try:
        return json.loads((folder_of(model, mode, out) / "report.json").read_text())
    except (OSError, ValueError):
        return None


def is_left(model: str, mode: str, out: Path, compiled: bool) -> bool:
    report = read_report(model, mode, out)
    return report is None or (compiled and not report["setting"]["compile"])


def command_of(model: str, mode: str, device: str, out: Path, compiled: bool) -> list[str]:
    command = [sys.executable, "-m", "fusewise", "optimize", model, "--device", device]
    command += ["--input", MODELS[device][model], *OPTIONS[device], *MODES[mode]]
    command += ["--compile"] if compiled else []
    return [*command, "--out", str(folder_of(model, mode, out))]


def run(command: list[str], folder: Path, seconds: float) -> str:
    """Why there is no result; empty if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, last = time.monotonic(), ""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that a timeout also ends the compiler's processes
    )
    timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        with (folder / "log.txt").open("w") as log:
            for line in process.stdout:
                log.write(f"{time.monotonic() - begin:7.1f} s  {line}")
                log.flush()
                last = line.strip() or last
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:  # interrupted
            os.killpg(process.pid, signal.SIGKILL)
    if code == -signal.SIGKILL and time.monotonic() - begin >= seconds:
        return f"stopped after {seconds:.0f} s: {last}"
    return f"exit code {code}: {last}" if code else ""


def table(reports: dict[tuple[str, str], dict], clock: str, title: str) -> Table:
    """Times in ms, and the peak of GPU memory before and after."""
    names = (*VARIANTS, *GRAPHS)
    header = ["model", "mode", "returned", "swaps", *(f"{name} ms" for name in names)]
    header += ["original / swapped", "interval", "MB before", "after"]
    rows = []
    for key, report in reports.items():
        whole, ratio = report["whole"], report["ratio"].get(clock)
        cells = [*key, report["returned"], swaps_of(report)]
        for name in names:
            times = whole.get(name, {}).get(clock)
            cells.append(f"{times['median'] / 1e3:.2f}" if times else "")
        cells.append(f"{ratio['ratio']:.2f}" if ratio else "")
        cells.append("{:.2f} to {:.2f}".format(*ratio["interval"]) if ratio else "")
        rows.append(cells + peaks_of(report))
    return Table(f"{title} of a step", header, rows, 3).without_empty_columns()


def means(reports: dict[tuple[str, str], dict], clock: str) -> list[str]:
    """How many times as fast the convolutional models are with their swaps. Where these were taken
    back, that is the original."""
    lines = []
    for mode in MODES:
        for rival in ("original", "compiled"):
            ratios = []
            for (model, own_mode), report in reports.items():
                whole = report["whole"]
                if own_mode != mode or model in OTHERS or clock not in whole.get(rival, {}):
                    continue
                gains = report["ratio"].get(clock, {}).get("verdict") == "faster"
                mine = "swapped" if gains else "original"
                ratios.append(whole[rival][clock]["median"] / whole[mine][clock]["median"])
            if ratios:
                lines.append(
                    f"- {mode}, {rival} / swapped: {geometric_mean(ratios):.2f} "
                    f"({len(ratios)} models, at least {min(ratios):.2f})"
                )
    return lines


def compact(reports: dict[tuple[str, str], dict]) -> Table:
    """What fits on a screen: original / swapped, in ms, and the best of all."""
    clocks = [
        clock
        for clock in CLOCKS
        if any(clock in times for report in reports.values() for times in report["whole"].values())
    ]
    header = ["model", "mode", "returned", "swaps"]
    header += [f"{clock} {name}" for clock in clocks for name in ("before", "after", "best")]
    rows = []
    for (model, mode), report in reports.items():
        whole = report["whole"]
        cells = [model.partition(":")[2], mode, report["returned"], swaps_of(report)]
        for clock in clocks:
            known = {
                name: times[clock]["median"] for name, times in whole.items() if clock in times
            }
            shown = [known.get("original"), known.get("swapped"), min(known.values(), default=None)]
            cells += ["" if us is None else f"{us / 1e3:.2f}" for us in shown]
        rows.append(cells + peaks_of(report))
    header += ["MB before", "MB after"]
    return Table("ms of a step", header, rows, 3).without_empty_columns()


def swaps_of(report: dict) -> str:
    """Candidates that are right and faster, also those that were taken back."""
    # What does the work of other candidates counts in their place if it was swapped.
    rows = [r for r in report["rows"] if not r["alternative"] or r["result"] == "swapped"]
    chosen = sum(row["result"] in ("swapped", "taken back") for row in rows)
    return f"{chosen} of {sum(row['result'] != 'covered' for row in rows)}"


def peaks_of(report: dict) -> list[str]:
    found = (report["whole"].get(name, {}).get("peak_bytes") for name in ("original", "swapped"))
    return [f"{peak / 1e6:.0f}" if peak else "" for peak in found]


def all_reports(device: str, out: Path) -> dict[tuple[str, str], dict]:
    keys = [(model, mode) for model in MODELS[device] for mode in MODES]
    return {key: report for key in keys if (report := read_report(*key, out))}


def write_summary(reports: dict[tuple[str, str], dict], out: Path) -> Path:
    lines = ["# optimize on whole models", ""]
    if reports:
        facts = next(iter(reports.values()))["environment"]
        plain = (str, int, float)
        lines += [f"- {name}: {value}" for name, value in facts.items() if isinstance(value, plain)]
    for clock, title in CLOCKS.items():
        if any(clock in times for report in reports.values() for times in report["whole"].values()):
            lines += ["", *markdown_table(table(reports, clock, title))]
            lines += ["Geometric means over the convolutional models:", "", *means(reports, clock)]
    if reports:
        lines += ["", "Commands:", "", *(f"    {report['command']}" for report in reports.values())]
    (out / "summary.md").write_text("\n".join(lines) + "\n")
    return out / "summary.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=tuple(MODELS), default=device)
    parser.add_argument("--filter", default="", help="only models with this in their name")
    parser.add_argument("--mode", choices=tuple(MODES), help="default: both")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile (GPU)")
    parser.add_argument("--minutes", type=float, default=600.0, help="of all runs")
    parser.add_argument("--seconds", type=float, help="after which a run is stopped")
    parser.add_argument("--out", type=Path, default=Path("optimize-models"), metavar="DIR")
    options = parser.parse_args()
    device, out, begin = options.device, options.out, time.monotonic()
    compiled = device == "cuda" and not options.no_compile
    seconds = options.seconds or SECONDS[device]
    wanted = [
        (model, mode)
        for model in MODELS[device]
        for mode in MODES
        if options.filter in model
        and mode in (options.mode or mode)
        and is_left(model, mode, out, compiled)
    ]
    out.mkdir(parents=True, exist_ok=True)
    failed = done = 0
    for model, mode in wanted:
        left = 60 * options.minutes - (time.monotonic() - begin)
        if left <= 0:
            break
        started = time.monotonic()
        command = command_of(model, mode, device, out, compiled)
        why = run(command, folder_of(model, mode, out), min(seconds, left + MARGIN))
        done, failed = done + 1, failed + bool(why)
        took, total = time.monotonic() - started, time.monotonic() - begin
        print(
            f"[{done}/{len(wanted)}, {total:.0f} s] {model}, {mode}: {took:.0f} s {why}".rstrip(),
            flush=True,
        )
    if missing := len(wanted) - done + failed:
        print(f"INCOMPLETE: {missing} runs are left; call it again", flush=True)
    reports = all_reports(device, out)
    path = write_summary(reports, out)
    if reports:
        show(compact(reports))
    print(path)


if __name__ == "__main__":
    main()
