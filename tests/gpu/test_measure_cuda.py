"""What the benchmark, the profile and the lessons measure on a GPU, where no CPU can stand in."""

import pytest
import torch
from torch import nn

from fusewise import cli, lessons
from fusewise.bench import schema
from fusewise.bench.families.family import STEP
from fusewise.bench.measure import GraphTimer, Replay
from fusewise.bench.progress import Progress
from fusewise.bench.yardsticks import measure_ceilings
from fusewise.profile import Options, kinds, run
from gpu_helpers import needs_gpu

pytestmark = needs_gpu


def test_kernels_are_counted_a_call():
    x = torch.ones(1 << 20, device="cuda")
    for kernels in (1, 2, 5):

        def call(_, kernels=kernels):
            y = x
            for _ in range(kernels):
                y = y * 1.5
            return y

        for buffers in (1, 3):
            assert GraphTimer(call, buffers).kernels() == kernels


def test_a_copy_by_the_driver_is_no_kernel():
    x = torch.ones(1 << 20, device="cuda")
    y = torch.empty_like(x)
    assert GraphTimer(lambda _: y.copy_(x), 1).kernels() == 0


def test_ceilings_are_there_for_every_dtype():
    found = measure_ceilings("cuda", {"float16", "bfloat16"})
    assert found.bytes_per_second > 0
    assert set(found.operations_per_second) == {"float16", "bfloat16", "float32"}


def test_a_row_has_kernels_memory_and_both_clocks(tmp_path):
    arguments = ["bench", "--filter", "b4-960x12", "--baseline", "eager", "--device", "cuda"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    for row in schema.read(tmp_path / "results.json")["rows"]:
        ours, eager = row["contenders"]["fusewise"], row["contenders"]["eager"]
        assert {"gpu", "wall", "peak_bytes", "kernels"} <= ours.keys()
        assert 0 < ours["kernels"] < eager["kernels"]
        assert row["floor"]["us"] <= min(ours["gpu"]["median"], ours["wall"]["median"])
        assert row["host"]["empty_us"] > 0
        assert row["host"]["overhead_us"] == ours["wall"]["median"] - ours["gpu"]["median"]


def test_a_replay_computes_what_the_call_does():
    x = [torch.randn(100, device="cuda") for _ in range(3)]
    call = Replay(lambda i: (x[i] * 2, x[i].sum()), 3)
    for _ in range(2):
        for i in (0, 2, 1):
            doubled, total = call(i)
            assert torch.equal(doubled, x[i] * 2) and torch.equal(total, x[i].sum())
            x[i].normal_()  # replayed, it sees what is there by then
            doubled, total = call(i)
            assert torch.equal(doubled, x[i] * 2) and torch.equal(total, x[i].sum())


def test_a_train_step_as_it_is_and_graphed(tmp_path):
    arguments = ["bench", "autoencoder", "--full", "--device", "cuda", "--filter", "step-32"]
    arguments += ["--baseline", "eager", "--baseline", "graphed"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    (row,) = schema.read(tmp_path / "results.json")["rows"]
    assert row["mode"] == STEP
    assert {"gpu", "wall", "peak_bytes", "kernels"} <= row["contenders"]["fusewise"].keys()
    assert row["contenders"]["graphed"].keys() == {"wall"}
    assert row["against"]["eager"].keys() == {"gpu", "wall"}


def test_reduce_overhead_has_wall_time(tmp_path):
    arguments = ["bench", "autoencoder", "--full", "--device", "cuda", "--filter", "rows-32"]
    arguments += ["--baseline", "reduce-overhead"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    forward, both = schema.read(tmp_path / "results.json")["rows"]
    assert forward["contenders"]["reduce-overhead"].keys() == {"wall"}
    assert both["contenders"]["reduce-overhead"] == {"unavailable": "forward only"}


class Net(nn.Module):
    """Large enough that its kernels are seen, with a module that fusewise has an operator for."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("amp", [False, True])
def test_a_profile(tmp_path, monkeypatch, train, amp):
    monkeypatch.chdir(tmp_path)
    options = Options(f"{__name__}:Net", ("8,64,56,56",), "cuda", train=train, amp=amp)
    found = run(options, Progress())
    assert 0 <= found.idle < 1 and found.gaps is not None
    assert sum(found.kinds.values()) == pytest.approx(found.work_us)
    assert {kinds.CONVOLUTION, kinds.NORMALISATION} <= found.kinds.keys()
    names = {kind.name: kind for kind in found.modules}
    assert {"Conv2d", "BatchNorm2d"} <= names.keys()
    assert names["Conv2d"].share + names["BatchNorm2d"].share <= 1
    assert found.trace["traceEvents"]


def test_without_waiting_only_the_launch_is_timed():
    assert lessons.run("asynchronous", "cuda").seen
