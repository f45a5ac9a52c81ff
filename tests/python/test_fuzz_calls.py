"""The fuzzer runs, finds a planted error, and says how to have it again."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

import linear_reference
from fusewise.functional import linear_act

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools" / "fuzz_calls.py").is_file():
    pytest.skip("there are no tools here", allow_module_level=True)


OTHERS = "right only with other values"


@pytest.fixture
def fuzz(monkeypatch):
    """Its command line, in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # so that what it sets is undone
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("fuzz_calls", ROOT / "tools" / "fuzz_calls.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_calls_of_every_operator_are_right(fuzz, device, capsys):
    assert fuzz.main([f"--device={device}", "--seed=1", "--calls=12"]) == 0
    said = capsys.readouterr().out
    for operator in fuzz.OPERATORS:
        assert re.search(rf"{operator}: 12 calls, 0 failed, \d+ {OTHERS}, seed 1,", said)


def test_a_planted_error_is_found_and_can_be_had_again(fuzz, capsys, monkeypatch):
    def wrong(x, w, b, activation):
        y = linear_act(x, w, b, activation)
        return y * 1.05 if x.stride(-1) == 0 and x.shape[-1] > 1 else y

    with monkeypatch.context() as patch:
        patch.setattr(linear_reference.Case, "ours", staticmethod(wrong))
        assert fuzz.main(["linear_act", "--calls=40", "--seed=3"]) == 1
        said = capsys.readouterr().out
        assert re.search(rf"linear_act: 40 calls, [1-9]\d* failed, \d+ {OTHERS}, seed 3", said)
        # The call in full, the figures, and which implementations are wrong.
        assert re.search(r"y: off by \S+ where \S+ is allowed", said)
        assert re.search(r"  x: \w+ \[.*\], strides \[.*0\], offset \d+\n", said)
        assert re.search(r"  dy: \w+ \[.*\], strides \[.*\], offset \d+\n", said)
        assert re.search(r"  activation: \w+\n", said)
        assert re.search(r"  linear_act=\w+: y: off by", said)

        first = re.search(r"FAILED: AssertionError: (.*)\n", said).group(1)
        command = re.search(r"repeat: python3 tools/fuzz_calls.py (.*)", said).group(1)
        assert fuzz.main(shlex.split(command)) == 1
        again = capsys.readouterr().out
        assert f"FAILED: AssertionError: {first}\n" in again
        assert f"linear_act: 1 calls, 1 failed, 0 {OTHERS}, seed 3" in again
    assert fuzz.main(shlex.split(command)) == 0  # without the error


def test_a_small_error_counts_if_it_shows_again(fuzz, capsys, monkeypatch):
    """A larger one counts even if it does not."""

    def first_value(case):
        return case.x.flatten()[0].item()

    def breaking(error, bad):
        def check(case, *others):
            if first_value(case) in bad:
                raise AssertionError(f"y: off by {error} where 0.2 is allowed")

        return check

    seed = 3
    first, *_, last = (
        first_value(fuzz.drawn("linear_act", "cpu", seed, 0, redraw)[0])
        for redraw in range(fuzz.REDRAWS + 1)
    )
    assert first != last
    for error, bad, failed in ((0.3, [first], 0), (0.3, [first, last], 1), (0.5, [first], 1)):
        monkeypatch.setattr(fuzz, "check", breaking(error, bad))
        assert fuzz.main(["linear_act", "--calls=1", f"--seed={seed}"]) == failed
        said = capsys.readouterr().out
        assert f"linear_act: 1 calls, {failed} failed, {1 - failed} {OTHERS}, seed" in said
        assert ("not counted, because other values pass: y: off by 0.3" in said) == (failed == 0)


def test_each_run_has_a_seed_of_its_own(fuzz, capsys):
    for _ in range(2):
        assert fuzz.main(["linear_act", "--calls=0"]) == 0
    first, second = re.findall(r"seed (\d+)", capsys.readouterr().out)
    assert first != second


def test_calls_differ_in_all_that_is_drawn(fuzz):
    """And call I of a seed does not depend on those before it."""
    for operator in fuzz.OPERATORS:
        calls = [list(fuzz.described(fuzz.drawn(operator, "cpu", 5, i)[0])) for i in range(40)]
        assert calls[7] == list(fuzz.described(fuzz.drawn(operator, "cpu", 5, 7)[0]))
        text = "\n".join("\n".join(call) for call in calls)
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            assert f"x: {dtype} " in text, operator
        assert re.search(r"^(dy|gradient): .*strides \[.*\b0\b", text, re.MULTILINE), operator
        assert len({call[0] for call in calls}) > 30, operator


def test_an_unknown_operator_is_named(fuzz, capsys):
    with pytest.raises(SystemExit):
        fuzz.main(["convolution"])
    assert "unknown operator convolution; there are: squeeze_excite" in capsys.readouterr().err
