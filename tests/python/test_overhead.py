"""`fusewise bench overhead`: with clocks that nobody had to wait for, and once as it is."""

import pytest
import torch

from fusewise import cli
from fusewise.bench import measure, overhead, schema
from fusewise.bench.baselines import OURS
from fusewise.bench.compare import compare, worse
from fusewise.bench.families import FAMILIES
from fusewise.bench.families.family import BOTH, FORWARD

pytestmark = pytest.mark.any_device


class FakeTimer:
    """Every call of ours takes `ours` µs and every empty operator 4; both run once."""

    ours = 10.0

    def __init__(self, call, device):
        (*results,) = call(0)
        assert all(isinstance(tensor, torch.Tensor) for tensor in results)
        empty = results[0].dim() == 0  # the empty operators' results are scalars
        self.us = 4.0 if empty else self.ours

    def __call__(self):
        return self.us


def measured(monkeypatch, ours):
    monkeypatch.setattr(FakeTimer, "ours", ours)
    monkeypatch.setattr(overhead, "HostTimer", FakeTimer)
    return overhead.run("cpu", ["bench", "overhead"])


def test_every_operator_has_both_directions(monkeypatch):
    results = measured(monkeypatch, 10.0)
    assert not schema.problem(results)
    assert [(row["family"], row["mode"]) for row in results["rows"]] == [
        (family, mode) for family in FAMILIES for mode in (FORWARD, BOTH)
    ]
    for row in results["rows"]:
        assert row["contenders"][OURS]["wall"]["median"] == 10.0
        assert row["against"]["empty"]["wall"]["ratio"] == 0.4


def test_the_table_says_ours_and_the_empty_operator(monkeypatch):
    table = overhead.table(measured(monkeypatch, 10.0))
    assert table.rows == [[family, "10", "4", "2.50", "10", "4", "2.50"] for family in FAMILIES]


def test_two_runs_can_be_compared(monkeypatch):
    old, new = measured(monkeypatch, 10.0), measured(monkeypatch, 12.0)
    assert len(worse(compare(old, new))) == 2 * len(FAMILIES)
    assert worse(compare(new, old)) == []


def test_a_slower_machine_is_no_slower_operator(monkeypatch):
    """The empty operator moved as ours did."""
    old, new = measured(monkeypatch, 10.0), measured(monkeypatch, 12.0)
    for row in new["rows"]:
        times = row["contenders"]["empty"]["wall"]
        times["samples"] = [1.2 * sample for sample in times["samples"]]
    assert worse(compare(old, new)) == []


def test_the_device_is_waited_for_outside_of_the_clock(monkeypatch):
    """Each call takes 1 s to enqueue, and the GPU 100 s for it."""
    now, queue, longest = 0.0, 0, 0

    def synchronize():
        nonlocal now, queue, longest
        longest = max(longest, queue)
        now += 100.0 * queue
        queue = 0

    def call(_):
        nonlocal now, queue
        now += 1.0
        queue += 1

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    timer = measure.HostTimer(call, "cuda")
    assert timer() == pytest.approx(1e6)
    assert queue == 0 and longest == 10


def test_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(overhead, "_ROUNDS", 5)
    monkeypatch.setattr(measure, "_SAMPLE_SECONDS", 1e-3)
    assert cli.main(["bench", "overhead", "--device", "cpu", "--out", str(tmp_path)]) == 0
    results = schema.read(tmp_path / "results.json")
    assert results["set"] == "overhead" and len(results["rows"]) == 2 * len(FAMILIES)
    said = capsys.readouterr().out
    assert all(family in said for family in FAMILIES)
    assert "fwd+bwd µs" in (tmp_path / "summary.md").read_text()
