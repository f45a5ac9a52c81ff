"""The list of small bugs is true of the tree: `make mutants` can plant each of them."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "tools" / "mutants.py").is_file():
    pytest.skip("there are no tools here", allow_module_level=True)


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


def test_every_entry_fits_its_file_and_names_a_test(mutants):
    assert not mutants.problems(mutants.read_list())


def test_all_families_and_layers_have_some(mutants):
    found = mutants.read_list()
    assert len(found) >= 100
    families = {mutant.family for mutant in found}
    assert families >= {"linear_act", "mlp", "squeeze_excite", "autoencoder", "safetensors"}
    files = [mutant.file for mutant in found]
    parts = ("functional", "_ops", "models", "nn", "bench", "profile")
    package = (f"python/fusewise/{part}" for part in parts)
    for layer in ("src/cpu", "src/common", "bindings", *package, "examples"):
        assert sum(file.startswith(layer) for file in files) >= 3, layer


@pytest.fixture
def tree(tmp_path):
    """A small tree with one file, and tests of both kinds."""
    (tmp_path / "tests" / "python").mkdir(parents=True)
    (tmp_path / "tests" / "cpp").mkdir()
    (tmp_path / "tests" / "python" / "test_a.py").write_text("def test_b():\n    pass\n")
    (tmp_path / "tests" / "cpp" / "test_a.cpp").write_text("TEST_P(Suite,\n       Name) {}\n")
    (tmp_path / "a.py").write_text("one = 1\ntwo = 1 + 1\n")
    return tmp_path


GOOD = {
    "name": "a",
    "family": "f",
    "file": "a.py",
    "before": "one = 1",
    "after": "one = 2",
    "test": "test_a.py::test_b[cpu-x]",
}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"before": "1"}, "a: a.py: '1' appears 3 times, expected once"),
        ({"before": "three"}, "a: a.py: 'three' appears 0 times, expected once"),
        ({"file": "b.py"}, "a: b.py: there is no such file"),
        ({"after": "one = 1"}, "a: changes nothing"),
        ({"test": "test_a.py::test_c"}, "a: there is no test test_a.py::test_c"),
        ({"test": "test_c.py::test_b"}, "a: there is no test test_c.py::test_b"),
        ({"test": "Suite.Other"}, "a: there is no test Suite.Other"),
    ],
)
def test_a_stale_entry_is_named(mutants, tree, change, said):
    def problems(*entries):
        (tree / "tests" / "mutants.json").write_text(json.dumps(entries))
        return mutants.problems(mutants.read_list(tree), tree)

    assert problems(GOOD, GOOD | {"name": "b", "test": "Suite.Name"}) == []
    (found,) = problems(GOOD | change)
    assert found.startswith(said)
    assert problems(GOOD, GOOD) == ["a: the name appears 2 times, expected once"]


def test_a_survivor_is_told(mutants):
    """In the summary, with what let it live; of the others, what killed them."""
    a, b = (mutants.Mutant(**(GOOD | {"name": name})) for name in ("first", "second"))
    outcomes = [
        mutants.Outcome(a, mutants.KILLED, 1.0),
        mutants.Outcome(b, mutants.SURVIVED, 2.0, "test_b passes"),
    ]
    text = "\n".join(mutants.summary(outcomes, 3.0))
    assert "1 killed, 1 survived, 0 broken, 0 not run; 2 in all, 3 s." in text
    assert "| second | a.py | survived: test_b passes |" in text
    assert "| first | f | 1.0 | test_a.py::test_b[cpu-x] |" in text
    assert "| f | 1 | 2 |" in text
