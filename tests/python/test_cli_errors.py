"""Bad input to the command line: one line that says what to do, and exit code 2."""

import json

import pytest

from fusewise import cli
from fusewise._usage import UsageError


@pytest.fixture
def fails(capsys, tmp_path, monkeypatch):
    """Runs a command in an empty folder; returns the one line that it must end with."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            cli.main(list(arguments))
        assert stopped.value.code == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1, said
        return said[0]

    return run


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "required: COMMAND"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["bench", "nonsense"], "family nonsense: unknown; there are: squeeze_excite"),
        (["bench", "--baseline", "nonsense"], "there are: eager, compile, naive"),
        (["bench", "--dtype", "int8"], "there are: float32, float16, bfloat16, float64"),
        (["bench", "--layout", "nhwc"], "there are: contiguous, channels_last"),
        (
            ["bench", "mlp", "--layout", "channels_last"],
            "there are: squeeze_excite, batch_norm_act, batch_norm_excite, autoencoder",
        ),
        (
            ["bench", "--filter", "nonsense"],
            "no case of squeeze_excite, batch_norm_act, batch_norm_excite, linear_act, mlp, "
            "autoencoder that matches",
        ),
        (["bench", "--filter", "nonsense"], "; --full has more cases"),
        (
            ["bench", "overhead", "mlp"],
            "overhead: takes no other family and no option but --device and --out",
        ),
        (["bench", "overhead", "--full"], "overhead: takes no other"),
        (["bench", "--zoo"], "--zoo: expected the family squeeze_excite alone"),
        (["bench", "squeeze-excite", "mlp", "--zoo"], "--zoo: expected the family squeeze_excite"),
        (["bench", "squeeze-excite", "--zoo", "--dtype", "float16"], "--zoo: takes no --cases"),
        (["bench", "squeeze-excite", "--zoo", "--minutes", "-1"], "a positive number, got -1"),
        (
            ["bench", "squeeze-excite", "--zoo", "--filter", "nonsense"],
            "no case of the zoo matches --filter nonsense",
        ),
        (["bench", "--minutes", "3"], "--minutes: only --zoo goes on where it stopped"),
        (["bench", "overhead", "--dtype", "float16"], "overhead: takes no other"),
        (["bench", "--out", "/proc/nowhere"], "name another folder"),
        (["bench", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["bench", "--cases", "missing.json"], "missing.json: cannot be read: No such file"),
        (["lesson", "nonsense"], "there are: asynchronous, naive-gemm, amdahl, layout"),
        (["compare", "missing.json", "other.json"], "missing.json: cannot be read: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(fails, arguments, said):
    assert said in fails(*arguments)


@pytest.mark.parametrize("command", [["bench"], ["check"], ["profile", "torch.nn:ReLU"]])
def test_no_gpu(fails, command, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = fails(*command, "--device", "cuda")
    assert said.startswith(f"fusewise {command[0]}: --device cuda: ") and "--device cpu" in said


CASES = """{
  "family": "squeeze_excite",
  "cases": [
    {"name": "a", "shape": [2, 4, 3, 3], "reduced": 2, "dtype": "float32"},
    {"name": "b", "shape": [2, 4, 3, 3],
     "reduced": 2, "dtype": "float32"}
  ]
}
"""


@pytest.mark.parametrize(
    "old, new, said",
    [
        ('"squeeze_excite"', '"nonsense"', ":2: field family: expected one of squeeze_excite"),
        ('"cases"', '"case"', ":3: field case: unknown"),
        ('"name": "b"', '"nane": "b"', ":5: field nane: unknown; there are: name, shape"),
        ('"name": "b"', '"name": "a"', ":4: field name: 'a' appears twice"),
        ("[2, 4, 3, 3],\n", "[2, 4, 3],\n", ":5: field shape: expected 4 positive numbers"),
        ("[2, 4, 3, 3],\n", "[2, 4, 0, 3],\n", ":5: field shape: expected 4 positive numbers"),
        ('"float32"}\n', '"int8"}\n', ":6: field dtype: expected one of float32"),
        (
            '"reduced": 2, "dtype": "float32"}\n',
            '"dtype": "float32"}\n',
            ":5: field reduced: missing",
        ),
        (
            '"reduced": 2, "dtype": "float32"}\n',
            '"reduced": "2"}\n',
            ":6: field reduced: expected a",
        ),
        ("  ]\n", "  ],\n", ":8: is not JSON"),
    ],
)
def test_a_wrong_field_of_a_case_file_is_named_with_its_line(fails, tmp_path, old, new, said):
    assert CASES.count(old) >= 1
    (tmp_path / "mine.json").write_text(CASES.replace(old, new))
    command = ["bench", "--device", "cpu", "--cases", "mine.json", "--out", "out"]
    assert f"mine.json{said}" in fails(*command)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "damaged, not JSON"),
        ("[]", "not a results.json"),
        ('{"schema": 1}', "has schema 1"),
        ('{"schema": 2}', "damaged: command is missing"),
    ],
)
def test_a_damaged_or_older_result(fails, tmp_path, text, said):
    (tmp_path / "old.json").write_text(text)
    assert said in fails("compare", "old.json", "old.json")


def test_a_result_that_is_not_text(fails, tmp_path):
    (tmp_path / "old.json").write_bytes(b"\xff\xfe\x00")
    assert fails("compare", "old.json", "old.json").endswith("is not text; expected JSON")


def test_debug_shows_where_an_error_came_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text(json.dumps([]))
    with pytest.raises(UsageError):
        cli.main(["compare", "old.json", "old.json", "--debug"])


BROKEN = """
def fails():
    raise ValueError("out of luck\\nand more")
def number():
    return 3
"""


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nonsense"], "expected MODULE:FACTORY"),
        (["no_such_module:net"], "no_such_module cannot be imported"),
        (["syntax_of_mine:net"], "importing syntax_of_mine failed: SyntaxError"),
        (["broken_of_mine:missing"], "broken_of_mine has no missing"),
        (["broken_of_mine:fails"], "the factory failed: ValueError: out of luck"),
        (["broken_of_mine:number"], "expected a factory of a torch.nn.Module, got int"),
        (["torch.nn:ReLU", "--input", "1,x"], "--input 1,x: expected sizes"),
        (["torch.nn:ReLU", "--input", "1,2:int9"], "--input 1,2:int9: expected sizes"),
        (["torch.nn:Conv2d"], "the factory failed: TypeError"),
        (["own_conv:net", "--input", "1,4,8,8"], "does not run with --input 1,4,8,8: RuntimeError"),
        (["torch.nn:ReLU", "--train"], "no output needs a gradient"),
        (["torch.nn:ReLU", "--out", "/proc/nowhere"], "name another folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_models(fails, tmp_path, arguments, said):
    (tmp_path / "broken_of_mine.py").write_text(BROKEN)
    (tmp_path / "syntax_of_mine.py").write_text("def")
    (tmp_path / "own_conv.py").write_text("import torch\nnet = torch.nn.Conv2d(3, 8, 3)")
    assert said in fails("profile", *arguments, "--device", "cpu")
