"""The report of `fusewise.optimize`, its variants, patterns of the user's own, and the command."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fusewise
from fusewise import cli
from fusewise.nn import BatchNormAct2d
from fusewise.rewrite import register
from fusewise.rewrite.registry import _OWN
from optimize_models import IMAGE, ROWS, Head, Stem, draw, inject

__all__ = ["inject"]

ROOT = Path(__file__).parents[2]


def report_of(**times):
    model = Stem(nn.Identity())
    model.extra = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())
    _, report = fusewise.optimize(model, draw(IMAGE))
    return report


def test_the_report_in_all_forms(inject, tmp_path):
    report = report_of()
    text = str(report)
    assert "1 of 2 candidates swapped. The model that was returned is 1.43 times as fast" in text
    assert "Candidates" in text and "not reached" in text and "A step of the whole model" in text
    assert max(map(len, text.splitlines())) <= 100

    found = report.to_dict()
    assert json.loads(report.to_json(tmp_path / "report.json")) == json.loads(json.dumps(found))
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(found))
    first = found["rows"][0]
    assert (first["name"], first["result"], first["calls"]) == ("bn1", "swapped", 1)
    assert first["shapes"] == [[4, 8, 12, 12]]
    assert first["ratio"]["wall"]["ratio"] == pytest.approx(2, rel=1e-2)
    assert first["error"] <= first["allowed"]
    assert found["setting"]["inputs"] == [[4, 3, 14, 14]]
    assert set(found["whole"]) == {"original", "swapped"}
    assert found["whole"]["original"]["peak_bytes"] is None
    assert found["environment"]["torch"] == torch.__version__
    assert "_restore" not in found

    pytest.importorskip("jinja2")
    page = report.to_html(tmp_path / "report.html").read_text()
    assert "bn1" in page and "not reached" in page and "fusewise.optimize(device=cpu" in page


def test_reasons_are_in_a_table_of_their_own(inject):
    model = Stem(nn.Identity())
    model.bn1.register_forward_hook(lambda *_: None)
    _, report = fusewise.optimize(model, draw(IMAGE))
    assert [table.title for table in report.tables()] == ["Candidates", "Why not"]
    assert "has hooks" in str(report)


def test_a_busy_machine_is_mentioned(inject, monkeypatch):
    from fusewise.bench import environment

    assert "BUSY" not in str(report_of())
    monkeypatch.setattr(environment, "load", lambda: 100.0)
    assert "BUSY MACHINE" in str(report_of())


def test_a_copy_of_the_report_knows_no_model(inject):
    report = report_of()
    report._restore = None
    with pytest.raises(RuntimeError, match="^restore: "):
        report.restore()


# --- torch.compile and CUDA graphs ------------------------------------------------------------


@pytest.fixture
def light_compile(monkeypatch):
    """torch.compile without its code generation."""
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile(module, backend="eager"))


def is_compiled(module):
    return module._compiled_call_impl is not None


@pytest.mark.parametrize(
    "times, returned, said",
    [
        ({"swapped": 700, "compiled": 800, "swapped + compiled": 600}, "swapped + compiled", ""),
        ({"swapped": 700, "compiled": 500, "swapped + compiled": 600}, "compiled", "alone is"),
        ({"swapped": 700, "compiled": 800, "swapped + compiled": 900}, "swapped", ""),
        ({"swapped": 1100, "compiled": 1200, "swapped + compiled": 1300}, "original", "taken back"),
        ({"swapped": 1100, "compiled": 1200, "swapped + compiled": 900}, "swapped + compiled", ""),
    ],
)
def test_the_fastest_of_four_variants(inject, light_compile, times, returned, said):
    inject(**times)
    model = Stem(nn.Identity())
    new, report = fusewise.optimize(model, draw(IMAGE), compile=True)
    assert report.returned == returned and said in report.conclusion
    assert list(report.whole) == ["original", "swapped", "compiled", "swapped + compiled"]
    assert is_compiled(new) == ("compiled" in returned)
    assert (type(new.bn1) is BatchNormAct2d) == ("swapped" in returned)
    assert [row.result for row in report.rows] == [
        "swapped" if "swapped" in returned else "taken back"
    ]
    assert list(new.state_dict()) == list(model.state_dict())
    assert not is_compiled(model)
    torch.testing.assert_close(new(draw(IMAGE)), copy.deepcopy(model)(draw(IMAGE)))


def test_compile_in_place_is_undone(inject, light_compile):
    inject(compiled=1, **{"swapped + compiled": 2})
    model = Stem(nn.Identity())
    same, report = fusewise.optimize(model, draw(IMAGE), compile=True, inplace=True)
    assert same is model and is_compiled(model)
    assert report.restore() is model and not is_compiled(model)


def test_compile_where_nothing_is_swapped(inject, light_compile):
    inject(compiled=800)
    new, report = fusewise.optimize(nn.Sequential(nn.Linear(6, 4)), draw(ROWS), compile=True)
    assert report.returned == "compiled" and is_compiled(new)


def test_a_compiled_variant_that_is_wrong_is_not_returned(inject, light_compile, monkeypatch):
    from fusewise.bench.accuracy import Check
    from fusewise.rewrite import verify_model

    check_model = verify_model.check_model

    def check(theirs, ours, *rest, **options):
        if is_compiled(ours):
            return Check("outputs", 1.0, 0.1, "off by 1 where 0.1 is allowed")
        return check_model(theirs, ours, *rest, **options)

    monkeypatch.setattr(verify_model, "check_model", check)
    _, report = fusewise.optimize(Stem(nn.Identity()), draw(IMAGE), compile=True)
    assert report.returned == "swapped"
    assert "off by 1" in report.whole["compiled"]["wrong"]
    assert "WRONG" in str(report)


def test_a_compiler_that_fails(inject, monkeypatch):
    def fails(module):
        module.forward = lambda x: 1 / 0

    monkeypatch.setattr(nn.Module, "compile", fails)
    _, report = fusewise.optimize(Stem(nn.Identity()), draw(IMAGE), compile=True, verify=False)
    assert report.returned == "swapped"
    assert report.whole["compiled"]["wrong"] == "ZeroDivisionError: division by zero"


class Captured(nn.Module):
    """Stands for `fusewise.graphed`, which needs a GPU."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("us, returned", [(300, "swapped + graph"), (900, "swapped")])
def test_graph(inject, monkeypatch, us, returned):
    from types import ModuleType

    from fusewise.rewrite.options import Options

    stand_in = ModuleType("fusewise.graphed")
    stand_in.graphed = lambda model, *inputs: Captured(model)
    monkeypatch.setitem(__import__("sys").modules, "fusewise.graphed", stand_in)
    monkeypatch.setattr(Options, "check_setting", lambda *_: None)
    inject(**{"swapped + graph": us})
    new, report = fusewise.optimize(Stem(nn.Identity()), draw(IMAGE), graph=True)
    assert report.returned == returned
    assert isinstance(new, Captured) == (us == 300)
    assert [row.result for row in report.rows] == ["swapped"]


# --- patterns of the user's own ----------------------------------------------------------------


@pytest.fixture
def no_patterns_afterwards():
    yield
    _OWN.clear()


def test_the_samples_of_the_documentation(inject, no_patterns_afterwards, few_threads):
    pytest.importorskip("torchvision")
    text = (ROOT / "docs" / "optimize.md").read_text()
    for sample in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        names = {"__name__": "sample"}
        exec(sample, names)
        assert names["report"].swapped
        if "@register" in sample:
            pattern, call = sample[sample.index("@register") :].strip().split("\n\n\n")
            assert len(pattern.splitlines()) <= 10
            assert [row.result for row in names["report"].rows] == ["swapped"]


def test_subclasses_of_a_registered_class_are_left_alone(inject, no_patterns_afterwards):
    class Mine(nn.Identity):
        pass

    class Sub(Mine):
        pass

    @register(Mine)
    def convert(module):
        return nn.Identity()

    _, report = fusewise.optimize(Stem(Mine(), Sub()), draw(IMAGE))
    assert [(row.name, row.pattern) for row in report.rows] == [
        ("bn1", "BatchNorm + activation + max-pool"),
        ("blocks.0", "Mine"),
    ]


@pytest.mark.parametrize(
    "arguments, said",
    [(("ReLU", id), "kind: expected a class of modules, got 'ReLU'"),
     ((int, id), "kind: expected a class of modules"),
     ((nn.ReLU, 3), "convert: expected a function, got 3")],
)  # fmt: skip
def test_wrong_patterns(arguments, said):
    with pytest.raises(TypeError, match=f"^{said}"):
        register(*arguments)


def test_a_pattern_of_the_user_comes_before_ours(inject, no_patterns_afterwards):
    se = pytest.importorskip("torchvision").ops.SqueezeExcitation
    register(se, lambda module: module)
    _, report = fusewise.optimize(Stem(se(8, 4)), draw(IMAGE))
    assert "SqueezeExcitation" in [row.pattern for row in report.rows]


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def model_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_net.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())\n"
    )
    return "tiny_net:net"


def test_the_command(inject, model_file, capsys):
    command = ["optimize", model_file, "--input", "2,3,8,8", "--device", "cpu"]
    command += ["--train", "--amp", "--channels-last", "--min-gain", "1.5", "--out", "out"]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "1 of 1 candidates swapped" in said
    assert "| 1 | BatchNorm + activation | swapped |" in said
    assert "verifying the candidates in training" in said
    assert "written to out: report.json" in said
    found = json.loads(Path("out/report.json").read_text())
    assert found["command"].startswith("fusewise optimize tiny_net:net --input 2,3,8,8")
    assert found["setting"] | {"min_gain": 1.5, "amp": "bfloat16"} == found["setting"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--input", "2,4,8,8"], "tiny_net:net: example_inputs: expected inputs that run through"),
        (["--input", "2,3,8,8", "--min-gain", "0"], "tiny_net:net: min_gain: expected a number"),
        (["--input", "x"], "--input x: expected sizes"),
    ],
)
def test_wrong_use_of_the_command(inject, model_file, capsys, arguments, said):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["optimize", model_file, "--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"fusewise optimize: {said}")


def test_real_times_are_taken(tmp_path):
    """The one test that measures; what it decides does not matter."""
    torch.manual_seed(0)
    _, report = fusewise.optimize(Head(nn.ReLU()), draw(ROWS), training=True, min_gain=1e-9)
    (row,) = report.rows
    assert all(us > 0 for us in row.us["wall"])
    low, high = row.ratio["wall"]["interval"]
    assert low <= row.ratio["wall"]["ratio"] <= high
