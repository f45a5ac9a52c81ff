"""The benchmark tells the truth: its verdicts, its checks, and what it writes."""

import dataclasses
import json
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusewise
from fusewise import bench, cli
from fusewise._ops import OPERATOR_NAMES
from fusewise._usage import UsageError
from fusewise.bench import accuracy, progress, report, runner, schema, tables, yardsticks
from fusewise.bench.baselines import caller
from fusewise.bench.cases import read, recast, select
from fusewise.bench.families import FAMILIES, autoencoder, squeeze_excite
from fusewise.bench.families.family import BOTH, FORWARD, GRAPHED, REDUCE_OVERHEAD, STEP
from fusewise.bench.statistics import summary
from fusewise.bench.verify import Verification
from results import gpu_results

pytestmark = pytest.mark.any_device

FAST = ["bench", "--device", "cpu", "--full", "--filter", "cpu-odd-1x17", "--baseline", "eager"]
FAMILY = FAMILIES["squeeze_excite"]

OUTPUTS = ("y", "dx", "dw1", "db1", "dw2", "db2")


@pytest.fixture(autouse=True)
def small_yardsticks(monkeypatch):
    """What the machine really reaches takes seconds to find out."""
    monkeypatch.setattr(yardsticks, "cache_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(yardsticks, "_LEAST_COPY", {"cpu": 1 << 20})
    monkeypatch.setattr(yardsticks, "_PRODUCT_SIZES", {"cpu": (64, 128)})


def small_case():
    return select("squeeze_excite", "cpu", "full", "cpu-odd-65x7")[0]


def test_the_blocks_of_efficientnet_b4_are_32():
    for size in ("quick", "full"):
        blocks = select("squeeze_excite", "cuda", size, "b4-*")
        assert sum(case.count for case in blocks) == 32
        assert {case.group for case in blocks} == {"efficientnet-b4"}


@pytest.mark.parametrize(
    "pattern, found",
    [
        ("b4-48x190", {"b4-48x190"}),
        ("48x190|pixel", {"b4-48x190", "single-48x190", "pixel-512"}),
        ("pixel-*|odd-?x*", {"pixel-512", "odd-3x33", "odd-1x17"}),
        ("nothing|odd-65", {"odd-65x7"}),
        ("nothing|none", set()),
    ],
)
def test_a_filter_takes_what_a_name_contains_or_matches_and_alternatives(pattern, found):
    assert {case.name for case in select("squeeze_excite", "cuda", "full", pattern)} == found


def test_the_reference_is_what_autograd_gives():
    case = small_case()
    workload = FAMILY.build(case, "cpu", 1)
    workload.inputs = [tuple(t.detach().double().requires_grad_() for t in workload.inputs[0])]
    workload.weights = tuple(t.detach().double().requires_grad_() for t in workload.weights)
    workload.gradients = [workload.gradients[0].double()]
    autograd = caller(workload.functions["eager"], workload, BOTH)(0)
    right = FAMILY.reference(case, workload)
    assert tuple(right) == OUTPUTS
    for found, (name, (value, scale, _)) in zip(autograd, right.items(), strict=True):
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
    for name, (value, scale, _) in FAMILY.reference(case, workload).items():
        assert value.dtype == (torch.float32 if name in ("y", "dx") else torch.float64)
        torch.testing.assert_close(value, whole[name].value.to(value.dtype))
        assert scale == pytest.approx(whole[name].scale)


def test_the_check_sees_wrong_values():
    case = small_case()
    workload = FAMILY.build(case, "cpu", 1)
    verification = Verification(FAMILY, case, workload)
    eager = caller(workload.functions["eager"], workload, BOTH)(0)

    def passes(outputs):
        return verification.check(lambda _: outputs, BOTH).passed

    assert passes(eager)
    for i in range(len(eager)):
        for spoil in (float("nan"), float("inf"), 2.0):
            spoiled = [output.detach().clone() for output in eager]
            spoiled[i].view(-1)[0] += spoil * spoiled[i].abs().max()
            assert not passes(spoiled), (OUTPUTS[i], spoil)
    assert not passes([eager[0][:1], *eager[1:]])


def test_what_eager_rounds_before_relu_is_no_mistake():
    """BatchNorm in bfloat16 with a residual: eager rounds the norm before it adds."""
    family = FAMILIES["batch_norm_act"]
    case = dataclasses.replace(
        family.tiny,
        shape=(8, 16, 12, 12),
        dtype_name="bfloat16",
        extra={"activation": "relu", "residual": "add"},
    )
    workload = family.build(case, "cpu", 1)
    verification = Verification(family, case, workload)
    (y,) = caller(workload.functions["eager"], workload, FORWARD)(0)

    def check(output, name):
        return verification.check(lambda _: (output,), FORWARD, name)

    assert check(y, "eager").passed
    assert "wrong side of relu's kink" in str(check(y, "compile"))
    assert not check(y * 1.1, "eager").passed


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "relu6", "hardswish"])
@pytest.mark.parametrize("variant", [None, "max-pool", "inference"])
def test_kinks_do_not_widen_batch_norms_rule(variant, activation, dtype):
    """Torch rounds v before the activation. Near a kink, its gradient may be dy off."""
    family = FAMILIES["batch_norm_act"]
    extra = {"activation": activation, "residual": "none"}
    if variant:
        extra["variant"] = variant
    case = dataclasses.replace(family.tiny, shape=(8, 16, 12, 13), dtype_name=dtype, extra=extra)
    workload = family.build(case, "cpu", 1)
    verification = Verification(family, case, workload)
    for mode in family.modes(case):
        for name in ("eager", "fusewise"):
            right = caller(workload.functions[name], workload, mode)(0)
            assert verification.check(lambda _, right=right: right, mode, name).passed
        for i, tensor in enumerate(right):
            wrong = [*right[:i], tensor.detach() * 1.1, *right[i + 1 :]]
            assert not verification.check(lambda _, wrong=wrong: wrong, mode).passed, i


def test_chains_of_batch_norm_and_excitation():
    """EfficientNet-B4 has 32. Eager runs under autocast beside float32 parameters; the parts are
    ours, and right too."""
    blocks = select("batch_norm_excite", "cuda", "quick", "b4-*")
    assert sum(case.count for case in blocks) == 32
    assert {case.group for case in blocks} == {"efficientnet-b4"}
    family = FAMILIES["batch_norm_excite"]
    assert "parts" in family.baselines
    for dtype, variant in (
        ("float32", {}),
        ("float16", {}),
        ("bfloat16", {"variant": "inference"}),
    ):
        for tiny in family.checked[-2:]:
            case = dataclasses.replace(tiny, dtype_name=dtype, extra=tiny.extra | variant)
            workload = family.build(case, "cpu", 1)
            assert {t.dtype for t in workload.weights} == {torch.float32}
            verification = Verification(family, case, workload)
            for mode in family.modes(case):
                for name in ("eager", "fusewise", "parts"):
                    right = caller(workload.functions[name], workload, mode)(0)
                    assert verification.check(lambda _, right=right: right, mode, name).passed
                    assert right[0].dtype == case.dtype


def test_batch_norms_variants_are_measured():
    cases = {case.name: case for case in select("batch_norm_act", "cuda", "full")}
    assert cases["stem-64x112-max-pool"].extra["variant"] == "max-pool"
    assert sum(case.extra.get("variant") == "inference" for case in cases.values()) == 4
    both = dataclasses.replace(
        cases["stem-64x112-max-pool"],
        shape=(1, 2, 3, 3),
        extra={"activation": "relu", "residual": "add", "variant": "max-pool"},
    )
    with pytest.raises(UsageError, match="residual: expected none with a max-pool"):
        FAMILIES["batch_norm_act"].build(both, "cpu", 1)


def test_a_run_writes_results_without_paths(tmp_path, capsys):
    assert cli.main([*FAST, "--out", str(tmp_path)]) == 0
    text = (tmp_path / "results.json").read_text()
    results = schema.read(tmp_path / "results.json")
    assert [row["mode"] for row in results["rows"]] == [FORWARD, BOTH]
    for row in results["rows"]:
        assert row["against"]["eager"]["wall"]["verdict"] in ("faster", "same", "slower")
        assert 0 < row["floor"]["us"] <= row["contenders"]["fusewise"]["wall"]["median"]
        assert row["host"] is None
        assert row["floor"]["bound"] in ("bytes", "operations")
        assert row["implementation"]["forward"]["chosen"]
    for name in ("summary.md", "report.html"):
        assert str(tmp_path) not in text + (tmp_path / name).read_text()
    assert "cpu-odd-1x17" in capsys.readouterr().out


def test_a_wrong_result_gets_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(fusewise.functional, "squeeze_excite", lambda x, *_: x * 0.5)
    assert cli.main([*FAST, "--out", str(tmp_path)]) == 1
    row = json.loads((tmp_path / "results.json").read_text())["rows"][0]
    assert row["failed"].startswith("WRONG: y: off by")
    assert "contenders" not in row


# --- train steps -------------------------------------------------------------------------------


def step_case(output, dtype="float64"):
    (case,) = select("autoencoder", "cpu", "full", "odd-sizes")
    extra = case.extra | {"output": output}
    return dataclasses.replace(case, shape=(7, 3, 33), dtype_name=dtype, extra=extra)


@pytest.mark.parametrize("output", autoencoder.LOSSES)
def test_the_reference_of_a_train_step_is_what_autograd_gives(output):
    family, case = FAMILIES["autoencoder"], step_case(output)
    assert family.modes(case) == (STEP,)
    workload = family.build(case, "cpu", 2)
    right = family.reference(case, workload)
    assert tuple(right) == ("loss", *(f"d{name}" for name in autoencoder.WEIGHTS))
    for name in ("fusewise", "eager"):
        step = caller(workload.functions[name], workload, STEP)
        for _ in range(2):  # gradients do not add up
            outputs = step(0)
        for found, (tensor, (value, scale, _)) in zip(outputs, right.items(), strict=True):
            torch.testing.assert_close(found, value, msg=lambda text, n=tensor: f"{n}: {text}")
            assert scale >= value.abs().max() * (1 - 1e-12)
    assert all(x.grad is None for (x,) in workload.inputs)


def test_a_train_step_has_rows_of_its_own(tmp_path):
    cases = [
        {"name": output, "shape": [5, 3, 33], "latent": 7, "slice_latent": 19, "output": output}
        | {"dtype": "float32"}
        for output in ("reconstruction", *autoencoder.LOSSES)
    ]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"family": "autoencoder", "cases": cases}))
    baselines = [f"--baseline={name}" for name in ("eager", REDUCE_OVERHEAD, GRAPHED)]
    arguments = ["--device", "cpu", "--cases", str(file), "--out", str(tmp_path)]
    assert cli.main(["bench", *arguments, *baselines]) == 0
    rows = schema.read(tmp_path / "results.json")["rows"]
    modes = [FORWARD, BOTH, STEP, STEP]
    assert [row["mode"] for row in rows] == modes
    assert all("wall" in row["against"]["eager"] for row in rows)
    said = [row["contenders"][GRAPHED]["unavailable"] for row in rows]
    assert said == ["train steps only"] * 2 + ["GPU only"] * 2
    assert rows[2]["check"]["tensor"] in ("loss", *(f"d{name}" for name in autoencoder.WEIGHTS))
    assert set(rows[2]["implementation"]) == {"forward", "backward"}


def test_eager_computes_no_more_than_the_output():
    workload = FAMILIES["autoencoder"].build(step_case("mse_loss"), "cpu", 1)
    seen = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[output].append(func.__name__)
            return func(*args, **(kwargs or {}))

    for output in autoencoder.OUTPUTS:
        seen[output] = []
        with Recorder(), torch.no_grad():
            autoencoder.eager(*workload.inputs[0], *workload.weights, output=output)
    products = {name: sum("mm" in op for op in ops) for name, ops in seen.items()}
    assert products == {"reconstruction": 5, "latent": 3, "score": 5}
    assert not any("pow" in op for op in seen["reconstruction"])


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_baseline_may_have_wall_time_alone(tmp_path):
    """A CUDA graph: no other graph can hold it."""
    results = gpu_results()
    results["baselines"].append(GRAPHED)
    for row in results["rows"]:
        row["contenders"][GRAPHED] = {"wall": summary([5.0] * 5)}
        row["against"][GRAPHED] = runner.ratios(row, GRAPHED)
        assert row["against"][GRAPHED].keys() == {"wall"}
    cases = select("squeeze_excite", "cuda", "quick", "b4-*")
    results["sums"] = list(runner.sums(results["rows"], cases))
    assert GRAPHED not in results["sums"][0]["against"]
    assert not schema.problem(results)
    table = tables.family_table(results, "squeeze_excite")
    assert table.rows[-1][table.header.index("wall vs graphed")] == "0.25x"
    assert "vs graphed" not in table.header
    assert "against graphed in wall time 0.25x" in report.one_line(results["rows"][0])
    assert tmp_path / "squeeze_excite-ratios.png" in report.write(results, tmp_path)
    for row in results["rows"]:
        row["against"] = {GRAPHED: row["against"][GRAPHED]}
    written = report.write(results | {"sums": []}, tmp_path)
    assert tmp_path / "squeeze_excite-ratios.png" in written


# --- what can go wrong -------------------------------------------------------------------------


def test_an_interrupt_keeps_what_was_done(monkeypatch):
    class Impatient(progress.Progress):
        def row(self, row):
            raise KeyboardInterrupt

    options = bench.Options(device="cpu", size="full", filter="cpu-odd-1x17", baselines=("eager",))
    results = bench.run(options, Impatient())
    assert results["interrupted"]
    assert len(results["rows"]) == 1
    assert "INTERRUPTED" in report.markdown(results)


def test_an_interrupt_before_the_first_row_leaves_older_results(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "Yardsticks", interrupted)
    (tmp_path / "results.json").write_text("older")
    assert cli.main([*FAST, "--out", str(tmp_path)]) == 130
    assert [path.read_text() for path in tmp_path.iterdir()] == ["older"]
    assert "before the first row, nothing written" in capsys.readouterr().err


@pytest.mark.filterwarnings("error::UserWarning")
def test_no_plot_of_an_earlier_run_is_left(tmp_path):
    """Nor a plot where there is nothing to plot; without baselines there are still the floors."""
    for name in ("mlp-ratios.png", "mine.png"):
        (tmp_path / name).write_text("older")
    results = gpu_results() | {"sums": [], "device": "cpu"}
    for row in results["rows"]:
        row["against"] = {}
    written = [path.name for path in report.write(results, tmp_path)]
    assert "squeeze_excite-ratios.png" in written
    assert {path.name for path in tmp_path.iterdir()} == {*written, "mine.png"}


def test_a_missing_library_is_named_with_its_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "fusewise.bench.plots", raising=False)
    monkeypatch.delattr("fusewise.bench.plots", raising=False)
    report.write(gpu_results(), tmp_path)
    said = capsys.readouterr().err
    assert "matplotlib is not installed; it comes with fusewise[bench]" in said


LARGE = {"name": "large", "shape": [8000, 9_600_000, 28, 28], "reduced": 2, "dtype": "float32"}


def cases_file(path, *cases):
    path.write_text(json.dumps({"family": "squeeze_excite", "cases": cases}))
    return ["bench", "--device", "cpu", "--baseline", "eager", "--cases", str(path)]


def test_a_case_that_does_not_fit_is_a_row(tmp_path):
    """The CPU's allocator raises a plain RuntimeError."""
    small = LARGE | {"name": "small", "shape": [2, 4, 3, 3]}
    command = cases_file(tmp_path / "cases.json", LARGE, small)
    assert cli.main([*command, "--out", str(tmp_path)]) == 1
    rows = schema.read(tmp_path / "results.json")["rows"]
    assert [row.get("failed") for row in rows] == ["out of memory"] * 2 + [None] * 2


def test_memory_that_runs_out_while_timing_is_a_row(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(runner, "_time", fail)
    assert cli.main([*FAST, "--out", str(tmp_path)]) == 1
    rows = schema.read(tmp_path / "results.json")["rows"]
    assert [row["failed"] for row in rows] == ["out of memory while measuring"] * 2


def test_an_error_keeps_what_was_done(tmp_path, monkeypatch):
    right = runner._time

    def fail(case, mode, *rest):
        if mode == BOTH:
            raise LookupError("nobody expected this")
        return right(case, mode, *rest)

    monkeypatch.setattr(runner, "_time", fail)
    with pytest.raises(LookupError, match="nobody expected this"):
        cli.main([*FAST, "--out", str(tmp_path)])
    results = schema.read(tmp_path / "results.json")
    assert results["interrupted"] and [row["mode"] for row in results["rows"]] == [FORWARD]


def test_a_busy_machine_is_said_on_a_cpu_only():
    results = gpu_results()
    results["environment"]["load"] = 1.5
    assert "BUSY" not in "".join(report.remarks(results))
    results["device"] = "cpu"
    assert "BUSY MACHINE: other processes used 1.5 of 2 cores" in report.remarks(results)[0]
    results["environment"]["load"] = 0.4
    assert "BUSY" not in "".join(report.remarks(results))


def test_info_names_versions_and_implementations(capsys):
    assert cli.main(["info"]) == 0
    shown = capsys.readouterr().out
    assert f"fusewise: {fusewise.__version__}" in shown
    for operator in OPERATOR_NAMES:
        for direction in ("forward", "backward"):
            assert f"{operator} {direction} on cpu, fastest first:" in shown
    assert "  portable: takes 32 of 32 sample calls" in shown
    assert 'every operator: "torch" runs' in shown


def test_check_passes_here_and_sees_a_wrong_operator(capsys, monkeypatch):
    assert cli.main(["check", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("checking the operators on cpu (")  # said before the first check
    assert "Checks against the reference on cpu; each row forces one implementation" in shown
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        for layout in ("contiguous", "channels_last"):
            assert f"| squeeze_excite | {dtype} | {layout} | forward portable | right |" in shown

    right = fusewise.functional.squeeze_excite
    monkeypatch.setattr(fusewise.functional, "squeeze_excite", lambda *t: right(*t) * 1.01)
    assert cli.main(["check", "--device", "cpu"]) == 1
    assert "are WRONG" in capsys.readouterr().out


def test_cases_of_a_file_in_another_dtype_and_layout(tmp_path):
    file = tmp_path / "mine.json"
    case = {"name": "a", "shape": [2, 4, 3, 3], "reduced": 2, "dtype": "float32"}
    cases = [
        case,
        case | {"name": "b", "layout": "channels_last"},
        case | {"name": "c", "count": 3},
    ]
    cases[2]["shape"] = [2, 8, 3, 3]
    file.write_text(json.dumps({"family": "squeeze_excite", "cases": cases}))
    found = read(file, "cpu", "quick")
    assert [(c.name, c.layout, c.count) for c in found] == [
        ("a", "contiguous", 1), ("b", "channels_last", 1), ("c", "contiguous", 3)
    ]  # fmt: skip
    changed = recast(found, "bfloat16", "channels_last")
    # b is a, once a is in channels_last too.
    assert [c.name for c in changed] == ["a@bfloat16@channels_last", "c@bfloat16@channels_last"]
    assert {(c.dtype, c.layout) for c in changed} == {(torch.bfloat16, "channels_last")}
    grouped = [dataclasses.replace(c, group="g") for c in found]
    assert [c.count for c in recast(grouped, None, "channels_last")] == [2, 3]

    arguments = ["--cases", str(file), "--baseline", "eager", "--dtype", "float64", "--filter", "a"]
    assert cli.main(["bench", *arguments, "--device", "cpu", "--out", str(tmp_path)]) == 0
    rows = schema.read(tmp_path / "results.json")["rows"]
    assert {(row["case"], row["dtype"]) for row in rows} == {("a@float64", "float64")}


def test_a_report_shows_losses_sums_kernels_and_memory(tmp_path):
    results = gpu_results()
    (total,) = results["sums"]
    assert total["count"] == 32
    assert total["contenders"]["fusewise"]["gpu"]["median"] == pytest.approx(64.0)
    text = report.markdown(results)
    assert "| GPU time vs eager | 0 | 0 | 12 | 0.50x |" in text
    assert "| GPU time vs compile | 12 | 0 | 0 | 2.00x |" in text
    assert (
        "| efficientnet-b4, sum of 32 | forward | 64 | 0.50x SLOWER | 2.00x | 50% | 640 |" in text
    )
    assert "| b4-48x190 | forward | GPU, eager | 0.50x SLOWER | 0.500 to 0.500 |" in text
    assert "| squeeze_excite | forward | cluster | the planes are small | 12 |" in text
    table = tables.family_table(results, "squeeze_excite")
    found = dict(zip(table.header, table.rows[-1], strict=True))
    assert (found["kernels"], found["eager's"]) == ("2", "2")
    assert (found["peak MB"], found["eager's MB"]) == ("1", "1")
    assert "vs naive" not in found  # it was not built, so it has no figure
    written = {path.name: path for path in report.write(results, tmp_path)}
    for name in ("squeeze_excite-ratios.png", "squeeze_excite-sizes.png"):
        assert written[name].read_bytes().startswith(b"\x89PNG")
    page = written["report.html"].read_text()
    assert "the planes are small" in page and "0.50x SLOWER" in page
