"""The benchmark of LINet's step: its baselines compute the same, and a small run measures them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import linet_reference

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("few_threads")


def test_the_packed_baseline(monkeypatch):
    """Output and gradients are those of the model with a list of streams."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from linet_packed import PackedLINet

    plain = linet_reference.li_resnet18((3, 1), 5, 0.125).double()
    packed = PackedLINet(plain).double()
    x = [torch.randn(2, c, 40, 36, dtype=torch.float64) for c in (3, 1)]
    for training in (True, False):
        found = []
        for model in (packed.train(training), plain.train(training)):
            leaves = [t.clone().requires_grad_() for t in x]
            y = model(*leaves)
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
        for ours, right in zip(*found, strict=True):
            torch.testing.assert_close(ours, right)


def test_a_small_run(tmp_path):
    file = tmp_path / "step.json"
    command = [sys.executable, "benchmarks/linet_step.py", "--device=cpu", "--batch=1"]
    command += ["--size", "32", "64", "--rounds=2", "--seconds=5", f"--out={file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    models = json.loads(file.read_text())["models"]
    assert list(models) == ["fusewise", "list, NCHW", "list, NHWC", "packed, NHWC"]
    for name, row in models.items():
        assert row["wall"]["median"] > 0 and name in done.stdout
    assert "x fusewise's time" in done.stdout
