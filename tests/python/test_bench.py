"""The benchmark tells the truth: its verdicts, its checks, and what it writes."""

import dataclasses
import json

import pytest
import torch

import fusewise
from fusewise import bench, cli
from fusewise.bench import accuracy, progress, report, runner
from fusewise.bench.baselines import caller
from fusewise.bench.cases import select
from fusewise.bench.families import FAMILIES, squeeze_excite
from fusewise.bench.families.family import BOTH, FORWARD
from fusewise.bench.statistics import ratio_of_sums

FAST = ["bench", "--device", "cpu", "--full", "--filter", "cpu-odd-1x17", "--baseline", "eager"]
FAMILY = FAMILIES["squeeze_excite"]


def small_case():
    return select("squeeze_excite", "cpu", "full", "cpu-odd-65x7")[0]


@pytest.mark.parametrize(
    ("baseline", "ours", "verdict"),
    [
        ([2.0, 2.1, 2.2], [1.0, 1.1, 1.2], "faster"),
        ([1.0, 1.1, 1.2], [2.0, 2.1, 2.2], "slower"),
        ([1.0, 1.5, 2.0], [1.1, 1.4, 1.9], "same"),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], "same"),
    ],
)
def test_verdicts(baseline, ours, verdict):
    ratio = ratio_of_sums([(1, baseline, ours)])
    assert ratio.verdict == verdict
    assert ratio.low <= ratio.value <= ratio.high


def test_sums_weigh_every_case_by_its_count():
    ratio = ratio_of_sums([(3, [2.0] * 5, [1.0] * 5), (1, [2.0] * 5, [5.0] * 5)])
    assert ratio.value == pytest.approx((3 * 2 + 2) / (3 * 1 + 5))


def test_the_blocks_of_efficientnet_b4_are_32():
    for size in ("quick", "full"):
        blocks = select("squeeze_excite", "cuda", size, "b4-*")
        assert sum(case.count for case in blocks) == 32
        assert {case.group for case in blocks} == {"efficientnet-b4"}


def test_the_reference_is_what_autograd_gives():
    case = small_case()
    workload = FAMILY.build(case, "cpu", 1)
    workload.inputs = [tuple(t.detach().double().requires_grad_() for t in workload.inputs[0])]
    workload.weights = tuple(t.detach().double().requires_grad_() for t in workload.weights)
    workload.gradients = [workload.gradients[0].double()]
    autograd = caller(workload.functions["eager"], workload, BOTH)(0)
    right = FAMILY.reference(case, workload)
    assert tuple(right) == FAMILY.outputs
    for found, (name, (value, scale)) in zip(autograd, right.items(), strict=True):
        torch.testing.assert_close(found, value, msg=lambda text, n=name: f"{n}: {text}")
        assert scale >= value.abs().max() * (1 - 1e-12)


@pytest.mark.parametrize("shape", [(3, 5, 4, 7), (1, 3, 40, 2), (2, 30, 3, 3), (50, 3, 2, 2)])
def test_the_reference_in_pieces(monkeypatch, shape):
    """Large half data: cut along any dimension, and images in fp32."""
    case = dataclasses.replace(small_case(), shape=shape, dtype_name="float16")
    workload = FAMILY.build(case, "cpu", 1)
    whole = FAMILY.reference(case, workload)
    monkeypatch.setattr(accuracy, "_PIECE", 50)
    monkeypatch.setattr(squeeze_excite, "_LARGE", 50)
    for name, (value, scale) in FAMILY.reference(case, workload).items():
        assert value.dtype == (torch.float32 if name in ("y", "dx") else torch.float64)
        torch.testing.assert_close(value, whole[name].value.to(value.dtype))
        assert scale == pytest.approx(whole[name].scale)


def test_the_check_sees_wrong_values():
    case = small_case()
    workload = FAMILY.build(case, "cpu", 1)
    expected = FAMILY.reference(case, workload)
    eager = caller(workload.functions["eager"], workload, BOTH)(0)

    def passes(outputs):
        return accuracy.check(FAMILY.outputs, outputs, eager, expected).passed

    assert passes(eager)
    for i in range(len(eager)):
        for spoil in (float("nan"), float("inf"), 2.0):
            spoiled = [output.detach().clone() for output in eager]
            spoiled[i].view(-1)[0] += spoil * spoiled[i].abs().max()
            assert not passes(spoiled), (FAMILY.outputs[i], spoil)
    assert not passes([eager[0][:1], *eager[1:]])


def test_the_floor_counts_each_byte_once():
    case = small_case()
    n, channels, height, width = case.shape
    reduced = case.extra["reduced"]
    plane = n * channels * height * width
    weights = 2 * channels * reduced + channels + reduced
    assert FAMILY.bytes_moved(case, FORWARD) == 4 * (2 * plane + weights)
    assert FAMILY.bytes_moved(case, BOTH) == 4 * (5 * plane + 3 * weights)


def test_a_run_writes_results_without_paths(tmp_path, capsys):
    assert cli.main([*FAST, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "results.json").read_text()
    results = json.loads(text)
    assert [row["mode"] for row in results["rows"]] == [FORWARD, BOTH]
    for row in results["rows"]:
        assert row["against"]["eager"]["wall"]["verdict"] in ("faster", "same", "slower")
        assert row["floor"]["us"] > 0
        assert row["implementation"]["forward"]
    assert str(tmp_path) not in text + (tmp_path / "summary.md").read_text()
    assert "cpu-odd-1x17" in capsys.readouterr().out


def test_a_wrong_result_gets_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(fusewise.functional, "squeeze_excite", lambda x, *_: x * 0.5)
    assert cli.main([*FAST, "--out", str(tmp_path)]) == 1
    row = json.loads((tmp_path / "results.json").read_text())["rows"][0]
    assert row["failed"].startswith("WRONG: y: off by")
    assert "contenders" not in row


def test_an_interrupt_keeps_what_was_done(monkeypatch):
    class Impatient(progress.Progress):
        def row(self, row):
            raise KeyboardInterrupt

    options = bench.Options(device="cpu", size="full", filter="cpu-odd-1x17", baselines=("eager",))
    results = bench.run(options, Impatient())
    assert results["interrupted"]
    assert len(results["rows"]) == 1
    assert "INTERRUPTED" in report.markdown(results)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["bench", "nonsense"],
        ["bench", "--baseline", "nonsense"],
        ["bench", "--filter", "nonsense"],
        ["bench", "--out", "/proc/nowhere"],
        ["bench", "--device", "tpu"],
    ],
    ids=" ".join,
)
def test_bad_arguments_get_one_line_and_code_2(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_info_names_versions_and_implementations(capsys):
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert f"fusewise: {fusewise.__version__}" in shown
    for direction in ("forward", "backward"):
        assert f"squeeze_excite {direction} on cpu, fastest first:" in shown


def test_a_report_shows_losses_sums_and_memory(tmp_path):
    """A run as a GPU would give it: two clocks, a group, a baseline that is not there."""

    def contender(gpu):
        times = {
            clock: {"median": gpu * factor, "samples": [gpu * factor] * 5}
            for clock, factor in (("gpu", 1), ("wall", 10))
        }
        return {**times, "peak_bytes": 1_000_000}

    blocks = select("squeeze_excite", "cuda", "quick", "b4-*")
    rows = [
        {
            "family": "squeeze_excite",
            "case": case.name,
            "mode": FORWARD,
            "group": case.group,
            "count": case.count,
            "implementation": {"forward": "general"},
            "floor": {"bytes": 1000, "us": 1.0},
            "contenders": {
                runner.OURS: contender(2.0),
                "eager": contender(1.0),
                "compile": contender(4.0),
                "naive": {"unavailable": "not built"},
            },
        }
        for case in blocks
    ]
    for row in rows:
        row["against"] = {name: runner.ratios(row, name) for name in ("eager", "compile")}
    results = {
        "command": "fusewise bench",
        "environment": {"load": 0.0, "cores": 2},
        "device": "cuda",
        "baselines": ["eager", "compile", "naive"],
        "interrupted": False,
        "rows": rows,
        "sums": list(runner.sums(rows, blocks)),
    }
    (total,) = results["sums"]
    assert total["count"] == 32
    assert total["contenders"]["fusewise"]["gpu"]["median"] == pytest.approx(64.0)
    text = report.markdown(results)
    assert "| efficientnet-b4, sum of 32 | forward |  | 32 | 64 | 50% | 0.50x SLOWER |" in text
    assert "2.00x faster | not built | 1.0, 1.0 |" in text
    assert "gpu against eager: 0 faster, 0 same, 12 slower" in text
    report.write(results, tmp_path)
    assert (tmp_path / "speedup.png").stat().st_size > 1000
