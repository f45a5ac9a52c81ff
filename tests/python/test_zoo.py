"""The sweep over the Squeeze-and-Excitation blocks of common models: its cases, runs and report."""

import functools
import json
import math
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusewise import cli
from fusewise.bench import (
    environment,
    measure,
    plots,
    progress,
    report,
    runner,
    schema,
    statistics,
    tasks,
    yardsticks,
    zoo,
)
from fusewise.bench.baselines import caller
from fusewise.bench.cases import case_folder, select
from fusewise.bench.families import FAMILIES, squeeze_excite
from fusewise.bench.families.family import BOTH, FORWARD, MODES, Case, Traffic
from fusewise.bench.verify import Verification
from results import contender, gpu_results

FAMILY = FAMILIES["squeeze_excite"]
FILE = case_folder() / "squeeze_excite_zoo.json"
TOOLS = Path(__file__).parents[2] / "tools"
MIXED = {"activation": "relu", "gate": "hardsigmoid", "weights": "float32"}


def blocks():
    return select("squeeze_excite_zoo", "cuda", "zoo")


# --- the cases ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool():
    """The script that writes the file."""
    for name in ("torchvision", "timm"):
        pytest.importorskip(name)
    if not TOOLS.is_dir():
        pytest.skip("there are no tools here")
    sys.path.append(str(TOOLS))
    import squeeze_excite_zoo

    yield squeeze_excite_zoo
    sys.path.remove(str(TOOLS))


@pytest.mark.parametrize(
    "name", ["efficientnet_b0", "mobilenet_v3_small", "regnet_y_400mf", "mobilenetv3_large_100"]
)
def test_the_file_has_the_blocks_of_a_model(tool, name):
    found = tool.blocks(*tool.model(name))
    stored = {
        (case.shape, case.extra["reduced"], case.extra["activation"], case.extra["gate"]): count
        for case in blocks()
        if (count := case.models.get(name))
    }
    assert found == stored


def test_the_file_is_as_the_script_writes_it(tool):
    stored = json.loads(FILE.read_text())
    assert tool.text(stored) == FILE.read_text()
    assert list(stored["groups"]) == [*tool.TORCHVISION, *tool.TIMM]
    made = [
        (tuple(entry["shape"]), *(entry[key] for key in ("reduced", "activation", "gate")))
        for entry in stored["cases"]
    ]
    assert made == sorted(set(made))
    apart = tool.held_out(made)
    for block, entry in zip(made, stored["cases"], strict=True):
        models = entry["models"]
        assert entry == json.loads(json.dumps(tool.case(block, models, block in apart)))


def test_the_counts_add_up():
    groups = json.loads(FILE.read_text())["groups"]
    total = Counter()
    for case in blocks():
        total.update(case.models)
    said = {name: int(re.search(r"(\d+) blocks", text)[1]) for name, text in groups.items()}
    assert total == said
    assert said["efficientnet_b4"] == 32 and said["seresnet50"] == 16
    of_torchvision = {name for name, text in groups.items() if text.startswith("torchvision")}
    assert len(blocks()) == 171
    assert sum(bool(of_torchvision & case.models.keys()) for case in blocks()) == 167
    assert sum(case.held_out for case in blocks()) == 57


def test_the_file_has_the_blocks_of_efficientnet_b4_that_the_quick_set_has():
    known = {
        (case.shape[1:], case.extra["reduced"]): case.count
        for case in select("squeeze_excite", "cuda", "quick", "b4-*")
    }
    found = {
        (case.shape[1:], case.extra["reduced"]): case.models["efficientnet_b4"]
        for case in blocks()
        if "efficientnet_b4" in case.models
    }
    assert found == known


def test_the_sweep_has_every_block_at_every_batch():
    cases = [case for case, _ in zoo.sweep("cuda")]
    assert len({case.name for case in cases}) == len(cases)
    own = {(case.shape, case.extra["reduced"]) for case in cases if "@" not in case.name}
    every = {
        ((batch, *block.shape[1:]), block.extra["reduced"])
        for block in blocks()
        for batch in (1, 32, 256)
    }
    assert own == every
    assert all(
        (case.dtype_name, case.layout, case.extra["weights"])
        == ("float16", "channels_last", "float32")
        for case in cases
        if case.models
    )


def test_a_tenth_is_measured_in_each_other_dtype_and_layout():
    cases = [case for case, _ in zoo.sweep("cuda") if "@" in case.name]
    found = Counter(
        (case.dtype_name, case.extra.get("weights"), case.layout, bool(case.models))
        for case in cases
    )
    tenth = math.ceil(3 * len(blocks()) / 10)
    assert found == {
        ("float16", None, "channels_last", False): tenth,
        ("bfloat16", "float32", "channels_last", False): tenth,
        ("float32", None, "channels_last", False): tenth,
        ("float16", "float32", "contiguous", False): tenth,
    }
    assert any(case.held_out for case in cases)


def test_samples_and_order_are_random_and_the_same_in_every_run():
    names = [case.name for case, _ in zoo.sweep("cuda")]
    random.seed(1)
    assert names == [case.name for case, _ in zoo.sweep("cuda")]
    assert names != sorted(names)
    compared = [case for case, compared in zoo.sweep("cuda") if compared]
    assert len(compared) * len(MODES) == 60 and all(case.models for case in compared)
    on_cpu = [case for case, _ in zoo.sweep("cpu")]
    assert {case.shape[0] for case in on_cpu} == {1} and len(on_cpu) < 20


# --- half x with float32 weights ------------------------------------------------------------------


def mixed_case(dtype="float16", **extra):
    return Case("squeeze_excite", "", (2, 8, 5, 3), dtype, extra={"reduced": 3, **MIXED, **extra})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_eager_casts_float32_weights_as_under_autocast(dtype):
    case = mixed_case(dtype)
    workload = FAMILY.build(case, "cpu", 1)
    assert [t.dtype for t in workload.weights] == [torch.float32] * 4
    y, dx, *gradients = caller(workload.functions["eager"], workload, BOTH)(0)
    assert y.dtype == dx.dtype == case.dtype
    assert [t.dtype for t in gradients] == [torch.float32] * 4
    assert all(torch.equal(t, t.to(case.dtype).float()) for t in gradients)
    half = replace(workload, weights=tuple(t.to(case.dtype) for t in workload.weights))
    y_of_half, *_ = caller(half.functions["eager"], half, FORWARD)(0)
    assert torch.equal(y, y_of_half)


def at_kinks(case):
    """How many units of the case's data rounding may put on the other side of a kink."""
    workload = FAMILY.build(case, "cpu", 1)
    pooled, *weights = workload.inputs[0][0].mean((2, 3)), *workload.weights
    w1, b1, w2, b2 = (t.detach().double().flatten(1) if t.dim() > 1 else t for t in weights)
    z = pooled.double() @ w1.T + b1
    units = {case.extra["activation"]: z}
    units[case.extra["gate"]] = (
        getattr(torch.nn.functional, case.extra["activation"])(z) @ w2.T + b2
    )
    kinks = {"relu": (0,), "hardswish": (-3, 3), "hardsigmoid": (-3, 3)}
    room = 4 * torch.finfo(case.dtype).eps
    return {
        name: sum(((z - kink).abs() < room * (1 + abs(kink))).sum().item() for kink in kinks[name])
        for name, z in units.items()
        if name in kinks
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_decides_no_slope(dtype, monkeypatch):
    """There torch is off by a whole term, and the rule would allow twice that everywhere."""
    case = replace(mixed_case(dtype, reduced=120), shape=(64, 160, 7, 7))
    other = replace(case, extra=case.extra | {"activation": "hardswish", "gate": "sigmoid"})
    assert at_kinks(case) == {"relu": 0, "hardsigmoid": 0}
    assert at_kinks(other) == {"hardswish": 0}
    monkeypatch.setattr(squeeze_excite, "_KINKS", {})
    assert all(count > 0 for count in at_kinks(case).values())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("extra", [{}, {"activation": "hardswish", "gate": "sigmoid"}])
def test_the_check_sees_wrong_values_beside_float32_weights(extra, batch, dtype):
    case = replace(mixed_case(dtype, reduced=120, **extra), shape=(batch, 160, 7, 7))
    workload = FAMILY.build(case, "cpu", 1)
    verification = Verification(FAMILY, case, workload)
    for name in ("fusewise", "eager"):
        right = caller(workload.functions[name], workload, BOTH)(0)
        assert verification.check(lambda _, right=right: right, BOTH, name).passed
    for i, tensor in enumerate(right):
        wrong = [*right[:i], tensor.detach() * 1.06, *right[i + 1 :]]
        assert not verification.check(lambda _, wrong=wrong: wrong, BOTH).passed, i


def test_activation_and_gate_are_those_of_the_case():
    workload = FAMILY.build(mixed_case(), "cpu", 1)
    other = FAMILY.build(mixed_case(activation="silu"), "cpu", 1)
    (x,), weights = workload.inputs[0], workload.weights
    for name in ("fusewise", "eager"):
        with torch.no_grad():
            y, z = (w.functions[name](x, *weights) for w in (workload, other))
        assert not torch.equal(y, z), name
    assert FAMILY.build(mixed_case(), "cpu", 1).functions["naive"] == "GPU only"


def test_floors_count_the_weights_in_their_own_dtype():
    """x has 240 elements of 2 bytes; there are 59 weights and biases of 4."""
    assert FAMILY.traffic(mixed_case(), FORWARD) == Traffic(2 * 480, 4 * 59)
    expected = Traffic(4 * 480 + 4 * 59, 4 * 59, 480 + 4 * 59)
    assert FAMILY.traffic(mixed_case(), BOTH) == expected
    wide = replace(mixed_case(), dtype_name="float64")
    assert FAMILY.traffic(wide, FORWARD) == Traffic(2 * 8 * 240, 8 * 59)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def sweep(monkeypatch, tmp_path):
    """Runs a sweep over three tiny blocks, one of them held out; returns results.json."""
    monkeypatch.setattr(yardsticks, "cache_bytes", lambda device: 1 << 20)
    monkeypatch.setattr(yardsticks, "_LEAST_COPY", {"cpu": 1 << 20})
    monkeypatch.setattr(yardsticks, "_PRODUCT_SIZES", {"cpu": (64, 128)})
    monkeypatch.setattr(tasks, "_ZOO_EFFORT", tasks.Effort(5, 0.01, wall=False))
    monkeypatch.setattr(measure, "_SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(statistics, "_RESAMPLES", 40)
    monkeypatch.setattr(environment, "load", lambda: 0.0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots take seconds
    monkeypatch.delitem(sys.modules, "fusewise.bench.plots", raising=False)
    monkeypatch.delattr("fusewise.bench.plots", raising=False)
    tiny = [
        replace(
            mixed_case(),
            name=f"block{i}",
            shape=(1, 8, 3, 2 + i),
            models={"one": 1 + i, "two": 2},
            held_out=i == 0,
        )
        for i in range(3)
    ]
    monkeypatch.setattr(zoo, "select", lambda *_: tiny)
    monkeypatch.setattr(
        zoo, "_SIZES", {"cpu": zoo._Sizes(batches=(1, 2), blocks=None, others=0.1, compared=0)}
    )

    def run(*arguments, code=0):
        command = ["bench", "squeeze_excite", "--zoo", "--device", "cpu", "--out", str(tmp_path)]
        assert cli.main([*command, *arguments]) == code
        return schema.read(tmp_path / "results.json")

    return run


def measured(results):
    return {
        (row["case"], row["mode"]): row["contenders"]["fusewise"]["wall"]["samples"]
        for row in results["rows"]
    }


def test_a_sweep_that_was_stopped_goes_on(sweep, tmp_path, capsys):
    first = sweep("--minutes", "0.00001")
    assert len(first["rows"]) == 2 and first["left"] == 9 and not first["interrupted"]
    said = "INCOMPLETE: 9 cases are left; the same command goes on with them"
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "summary.md").read_text()
    second = sweep()
    assert second["left"] == 0 and len(second["rows"]) == 20
    assert "measuring; 2 rows were measured before" in capsys.readouterr().out
    assert measured(first).items() <= measured(second).items()
    assert measured(sweep()) == measured(second)
    assert all(row["floor"]["us"] > 0 for row in second["rows"])
    assert all(row["against"].keys() == {"eager"} for row in second["rows"])


def test_rows_are_measured_again_where_something_changed(sweep, monkeypatch):
    first = measured(sweep("--filter", "block0-n1"))
    monkeypatch.setattr(runner.environment, "sources", lambda: "other sources")
    second = measured(sweep("--filter", "block0-n1"))
    assert first.keys() == second.keys() and first != second
    assert measured(sweep("--filter", "block0-n1")) == second


@pytest.mark.parametrize("in_tree", [True, False])
def test_the_digest_of_the_sources_notices_what_is_measured(in_tree, monkeypatch, tmp_path):
    package = tmp_path / "python" / "fusewise"
    monkeypatch.setattr(environment, "__file__", str(package / "bench" / "environment.py"))
    if in_tree:
        (tmp_path / "include" / "fusewise").mkdir(parents=True)

    def noticed(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        digests = set()
        for text in ("first", "second"):
            path.write_text(text)
            digests.add(environment.sources())
        return len(digests) == 2

    for name in ("src/cuda/kernel.cu", "bindings/torch/call.cpp", "benchmarks/cases/zoo.json"):
        assert noticed(name) == in_tree
    assert noticed("python/fusewise/bench/runner.py")
    assert noticed("python/fusewise/_lib/library.so") != in_tree
    assert not noticed("python/fusewise/__pycache__/runner.pyc")
    assert not noticed("README.md")


def test_a_case_that_was_measured_by_half_is_measured_again(sweep, monkeypatch):
    class Impatient(progress.Progress):
        def row(self, row):
            super().row(row)
            if self._done == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress, "for_output", Impatient)
        first = sweep(code=130)
    assert len(first["rows"]) == 3 and first["interrupted"]
    (half,) = (key for key in measured(first) if key[0] == first["rows"][2]["case"])
    second = sweep()
    assert len(second["rows"]) == len(measured(second)) == 20 and not second["interrupted"]
    kept = {key: samples for key, samples in measured(first).items() if key != half}
    assert kept.items() <= measured(second).items()
    assert measured(second)[half] != measured(first)[half]


def test_a_failed_row_is_measured_again(sweep, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("fusewise.functional.squeeze_excite", lambda x, *_: x * 0.5)
        first = sweep("--filter", "block1-n1", code=1)
    assert all(row["failed"].startswith("WRONG") for row in first["rows"])
    assert not any("failed" in row for row in sweep("--filter", "block1-n1")["rows"])


def test_rows_are_saved_while_the_sweep_runs(sweep, monkeypatch, tmp_path):
    """A machine may go away without a signal."""
    monkeypatch.setattr(runner, "_SAVE_SECONDS", 0)
    right, saved = runner._measure, []

    def measure(*arguments):
        if (tmp_path / "results.json").exists():
            saved.append(len(schema.read(tmp_path / "results.json")["rows"]))
        yield from right(*arguments)

    monkeypatch.setattr(runner, "_measure", measure)
    sweep("--filter", "block0*|block1*")
    assert saved == list(range(2, 2 * len(saved) + 1, 2)) and len(saved) > 3


def test_other_results_are_no_part_of_a_sweep(sweep, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(gpu_results()))
    cases = {row["case"].split("@")[0] for row in sweep("--filter", "block0-n1")["rows"]}
    assert cases == {"block0-n1"}
    (tmp_path / "results.json").write_text("{")
    assert {row["case"] for row in sweep("--filter", "block2-n1")["rows"]} == {"block2-n1"}


def test_wall_time_on_a_gpu_only_where_it_is_asked_for(monkeypatch):
    class Timer:
        def __init__(self, call, buffers, device="cuda"):
            pass

        def __call__(self):
            return 1.0

        def kernels(self):
            return 1

    monkeypatch.setattr(runner, "LoopTimer", Timer)
    monkeypatch.setattr(runner, "GraphTimer", Timer)
    monkeypatch.setattr(runner, "peak_bytes", lambda call: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    workload = FAMILY.build(mixed_case(), "cpu", 1)

    def clocks(effort):
        timed = {"fusewise": None, "eager": None}
        found = runner._time(
            mixed_case(), FORWARD, timed, workload, "cuda", effort, progress.Progress()
        )
        assert found["fusewise"].keys() == found["eager"].keys()
        return found["eager"].keys() & {"gpu", "wall"}

    assert clocks(tasks.Effort(5, 0.1)) == {"gpu", "wall"}
    assert clocks(tasks.Effort(5, 0.1, wall=False)) == {"gpu"}


def test_half_a_second_of_gpu_time_a_row(monkeypatch):
    monkeypatch.setattr(tasks, "usable_device", lambda device: device)
    _, planned = tasks.plan(tasks.Options(("squeeze_excite",), "cuda", "zoo"))
    plain = [task for task in planned if not task.effort.wall]
    assert len(planned) - len(plain) == 30
    assert {task.baselines for task in plain} == {("eager",)}
    assert {task.effort.budget for task in plain} == {0.5 / 2}  # of ours and eager


# --- the report -----------------------------------------------------------------------------------


@functools.cache
def any_row():
    return gpu_results()["rows"][0]


def row(models, batch, eager, mode=FORWARD, held_out=False, **changes):
    """Ours takes 1 µs, eager as said."""
    made = {**any_row(), "mode": mode, "shape": [batch, 8, 3, 3], "group": None}
    made["contenders"] = {"fusewise": contender(1.0), "eager": contender(eager)}
    made["against"] = {"eager": runner.ratios(made, "eager")}
    made |= {"models": models} if models else {}
    return made | ({"held_out": True} if held_out else {}) | changes


def sweep_results(rows):
    named = [made | {"case": f"block{i}"} for i, made in enumerate(rows)]
    results = gpu_results() | {"rows": named, "sums": [], "set": "zoo", "left": 0}
    return results | {"baselines": ["eager", "compile"], "models": zoo.means(named)}


def test_means_by_model_count_each_block_as_often_as_the_model_has_it():
    rows = [
        row({"one": 3}, 32, 2.0),
        row({"one": 1, "two": 2}, 32, 0.5),
        row({"one": 1}, 1, 4.0),
        row({"one": 1}, 32, 8.0, mode=BOTH),
        row({}, 32, 100.0),
        {**row({"one": 9}, 32, 3.0), "against": {}},
    ]
    found = {
        (entry["model"], entry["mode"], entry["batch"]): entry
        for entry in zoo.means(rows)
        if entry["clock"] == "gpu"
    }
    assert found["one", FORWARD, 32]["mean"] == pytest.approx((2.0**3 * 0.5) ** (1 / 4))
    assert found["one", FORWARD, 32]["blocks"] == 2 and found["one", FORWARD, 32]["slower"] == 1
    assert found["two", FORWARD, 32]["mean"] == pytest.approx(0.5)
    assert found["one", FORWARD, 1]["mean"] == pytest.approx(4.0)
    assert found["one", BOTH, 32]["mean"] == pytest.approx(8.0)
    every = found[zoo.EVERY_MODEL, FORWARD, 32]["mean"]
    assert every == pytest.approx((2.0**3 * 0.5**3) ** (1 / 6))
    assert len(found) == 7


def test_the_report_shows_means_by_model_and_every_loss(tmp_path):
    rows = [
        row({"one": 1}, 1, 2.0),
        row({"one": 1}, 256, 0.5),
        row({"one": 1}, 256, 0.8, held_out=True),
    ]
    results = sweep_results(rows)
    assert not schema.problem(results)
    text = report.markdown(results)
    assert "## By model, GPU time: times faster than eager" in text
    assert "| one | forward | 2.00x | 0.63x SLOWER | 3 | 2 |" in text
    first, second = re.findall(r"^## (Losses.*)$", text, re.MULTILINE)
    assert first == "Losses: in 1 of 2 rows a rival is faster"
    assert second == "Losses among held-out blocks: in 1 of 1 rows a rival is faster"
    assert text.index(first) < text.index("| block1 |") < text.index(second)
    assert text.index(second) < text.index("| block2 |")
    written = {path.name: path for path in report.write(results, tmp_path)}
    page = written["report.html"].read_text()
    assert first in page and second in page and "By model, GPU time" in page
    assert schema.read(written["results.json"])["models"] == results["models"]


def test_a_terminal_shows_means_by_model_and_not_every_row():
    parts = report.terminal(sweep_results([row({"one": 1}, 1, 2.0)]))
    titles = [part.title.split(":")[0] for part in parts if not isinstance(part, str)]
    assert titles[1:] == ["By model, GPU time", "By model, wall time"]


def test_a_sweep_without_losses_says_so_for_held_out_blocks_too():
    rows = [row({"one": 1}, 1, 2.0), row({"one": 1}, 1, 2.0, held_out=True)]
    text = report.markdown(sweep_results(rows))
    assert "No losses: no rival is faster in any row." in text
    assert "No losses among held-out blocks: no rival is faster in any row." in text


def test_a_plot_of_a_thousand_rows_is_not_drawn():
    results = sweep_results([row({}, 1, 2.0)] * 201)
    assert plots.ratios(results, "squeeze_excite") == []
    assert len(plots.sizes(results, "squeeze_excite")) == 1
    results["rows"].pop()
    assert len(plots.ratios(results, "squeeze_excite")) == 1
