"""benchmarks/optimize_models.py: its table, and how it goes on and stops."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest
from torch import nn

import fusewise
from optimize_models import IMAGE, Stem, draw, inject

__all__ = ["inject"]

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "optimize_models.py"
if not PROGRAM.is_file():
    pytest.skip("there are no benchmarks here", allow_module_level=True)
spec = importlib.util.spec_from_file_location("optimize_models_program", PROGRAM)
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)

FASTER, SLOWER = "torchvision:resnet18", "timm:resnet18"
KEYS = [(FASTER, "training"), (SLOWER, "training")]


@pytest.fixture
def out(tmp_path, inject):
    """With the reports of a model that gains, and of one whose swaps are taken back."""
    for (model, mode), swapped in zip(KEYS, (500, 2000), strict=True):
        inject(swapped=swapped)
        _, report = fusewise.optimize(Stem(nn.Identity()), draw(IMAGE), training=True)
        folder = program.folder_of(model, mode, tmp_path)
        folder.mkdir()
        report.to_json(folder / "report.json")
    return tmp_path


def on_a_gpu(report):
    """As a report with both clocks, memory, torch.compile and a graph."""
    whole = {name: {**times, "gpu": times["wall"]} for name, times in report["whole"].items()}
    for factor, name in ((0.8, "compiled"), (0.4, "swapped + graph")):
        whole[name] = {"wall": {"median": factor * whole["original"]["wall"]["median"]}}
    whole["original"]["peak_bytes"], whole["swapped"]["peak_bytes"] = 3_000_000, 2_000_000
    ratio = report["ratio"] | {"gpu": report["ratio"]["wall"]}
    return {**report, "whole": whole, "ratio": ratio}


def test_the_table(out):
    reports = program.all_reports("cpu", out)
    assert list(reports) == KEYS
    found = program.table(reports, "wall", "Wall time")
    rows = [dict(zip(found.header, row, strict=True)) for row in found.rows]
    assert [row["original ms"] for row in rows] == ["1.00", "1.00"]
    assert [row["swapped ms"] for row in rows] == ["0.50", "2.00"]
    assert [row["returned"] for row in rows] == ["swapped", "original"]
    assert [row["swaps"] for row in rows] == ["1 of 1", "1 of 1"]
    assert [row["original / swapped"] for row in rows] == ["2.00", "0.50"]
    assert not {"compiled ms", "MB before"} & rows[0].keys()
    # The one whose swaps were taken back counts as it is.
    (mean,) = program.means(reports, "wall")
    assert mean == "- training, original / swapped: 1.41 (2 models, at least 1.00)"
    page = program.write_summary(reports, out).read_text()
    assert "Wall time of a step" in page and "GPU time" not in page and mean in page


def test_the_table_of_a_gpu(out):
    reports = {key: on_a_gpu(report) for key, report in program.all_reports("cpu", out).items()}
    found = program.table(reports, "gpu", "GPU time")
    assert "compiled ms" not in found.header and "after" in found.header
    found = program.compact(reports)
    first = dict(zip(found.header, found.rows[0], strict=True))
    assert first["gpu before"] == "1.00" and first["gpu after"] == "0.50"
    assert first["wall best"] == "0.40" and (first["MB before"], first["MB after"]) == ("3", "2")
    assert any("compiled / swapped" in line for line in program.means(reports, "wall"))


def test_what_is_left(out):
    assert not program.is_left(FASTER, "training", out, compiled=False)
    assert program.is_left(FASTER, "training", out, compiled=True)
    assert program.is_left(FASTER, "inference", out, compiled=False)
    (program.folder_of(FASTER, "training", out) / "report.json").write_text("{")
    assert program.is_left(FASTER, "training", out, compiled=False)


def test_commands_are_understood(tmp_path, monkeypatch):
    from fusewise import cli
    from fusewise.rewrite import command

    seen = []
    monkeypatch.setattr(command, "run", lambda chosen, _: seen.append(chosen) or exit())
    for device in program.MODELS:
        model = next(iter(program.MODELS[device]))
        made = program.command_of(model, "training", device, tmp_path, compiled=True)
        with pytest.raises(SystemExit):
            cli.main(made[3:])
        assert seen[-1].train and seen[-1].compile and seen[-1].model == model
        assert seen[-1].graph == seen[-1].amp == (device == "cuda")


def test_a_run_that_fails_or_takes_too_long(tmp_path):
    def run(text, seconds):
        return program.run([sys.executable, "-c", text], tmp_path / "run", seconds)

    assert run("print('fine')", 60) == ""
    assert "s  fine" in (tmp_path / "run" / "log.txt").read_text()
    assert run("print('so far'); raise SystemExit(3)", 60) == "exit code 3: so far"
    begin = time.monotonic()
    slow = "import time; print('so far', flush=True); time.sleep(60)"
    assert run(slow, 1.0) == "stopped after 1 s: so far"
    assert time.monotonic() - begin < 30


def test_it_goes_on(out, monkeypatch, capsys):
    ran = []

    def run(command, folder, seconds):
        ran.append((command[4], "--train" in command))
        if "fails" in ran[-1][0]:
            return "exit code 1: no"
        folder.mkdir(exist_ok=True)
        report = program.read_report(*KEYS[0], out)
        (folder / "report.json").write_text(json.dumps(report))
        return ""

    monkeypatch.setattr(program, "run", run)
    models = dict.fromkeys((FASTER, SLOWER, "timm:fails"), "1,3,8,8")
    monkeypatch.setattr(program, "MODELS", {"cpu": models})

    def call(*arguments):
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["x", "--device=cpu", f"--out={out}", *arguments])
        program.main()
        return capsys.readouterr().out

    said = call("--minutes=0")
    assert not ran and "INCOMPLETE: 4 runs are left" in said and "resnet18" in said
    said = call("--filter=resnet18", "--mode=inference")
    assert ran == [(FASTER, False), (SLOWER, False)] and "INCOMPLETE" not in said
    said = call()
    assert ran == [("timm:fails", True), ("timm:fails", False)]
    assert "exit code 1: no" in said and "INCOMPLETE: 2 runs are left" in said
