"""Machines that announce AMX instructions and refuse them."""

import signal
import subprocess
from types import SimpleNamespace

import pytest

from fusewise import _amx


@pytest.fixture
def machine(monkeypatch):
    """Sets what the machine announces and how the trial ends; returns the trials that were run."""

    def set_up(announces, returncode):
        trials = []

        def run(command, **_):
            trials.append(command)
            return SimpleNamespace(returncode=returncode)

        # First set, so that whatever the test leaves there is undone.
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
        monkeypatch.setattr(_amx, "_announces_amx", lambda: announces)
        monkeypatch.setattr(subprocess, "run", run)
        _amx._a_product_dies.cache_clear()
        return trials

    yield set_up
    _amx._a_product_dies.cache_clear()


def test_a_trial_that_dies_limits_onednn(machine):
    trials = machine(True, -signal.SIGILL)
    assert _amx.avoid_broken_amx()
    assert _amx.os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"
    assert len(trials) == 1


@pytest.mark.parametrize("returncode", [0, 1])
def test_any_other_end_changes_nothing(machine, returncode):
    machine(True, returncode)
    assert not _amx.avoid_broken_amx()
    assert "ONEDNN_MAX_CPU_ISA" not in _amx.os.environ


def test_without_amx_nothing_is_tried(machine):
    trials = machine(False, -signal.SIGILL)
    assert not _amx.avoid_broken_amx()
    assert not trials


def test_what_the_user_has_set_stays(machine, monkeypatch):
    trials = machine(True, -signal.SIGILL)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not _amx.avoid_broken_amx()
    assert _amx.os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert not trials
