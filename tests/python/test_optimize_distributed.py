"""`fusewise.optimize` in several processes: all decide alike, or all fail."""

import datetime
import os
import time

import pytest
import torch
from torch import nn

import fusewise
from fusewise.bench import environment
from fusewise.nn import BatchNormAct2d
from fusewise.rewrite import measure
from fusewise.rewrite.measure import Times
from leaving import leave
from optimize_models import IMAGE, Stem, draw

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

TIMEOUT = 60


def run(work, folder):
    """Calls work(rank) in two processes of a group."""
    torch.multiprocessing.spawn(_start, (work, str(folder / "store")), 2)


def _start(rank, work, store):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    environment.load = lambda: 0.0
    # Rank 0 finds ours faster, rank 1 would find it slower, if it was asked.
    sizes = {"before": 100, "after": 50 + 100 * rank, "original": 1000, "swapped": 700}

    def sample(calls, buffers, device, effort):
        return {
            name: Times({measure.WALL: [sizes[name] + 0.01 * i for i in range(15)]})
            for name in calls
        }

    measure.sample = sample
    torch.manual_seed(rank)
    work(rank)
    torch.distributed.destroy_process_group()
    leave()


def _alike(rank):
    model = Stem(nn.Identity())
    new, report = fusewise.optimize(model, draw(IMAGE))
    assert type(new.bn1) is BatchNormAct2d
    assert [row.result for row in report.rows] == ["swapped"]
    assert report.rows[0].us["wall"][1] < 60  # rank 0's times
    parallel = nn.parallel.DistributedDataParallel(new)
    parallel(draw(IMAGE) + rank).square().sum().backward()
    gathered = [torch.empty_like(new.bn1.weight.grad) for _ in range(2)]
    torch.distributed.all_gather(gathered, new.bn1.weight.grad)
    assert torch.equal(*gathered)

    with pytest.raises(TypeError, match="^model: expected a model that is not wrapped yet"):
        fusewise.optimize(parallel, draw(IMAGE))
    wrapped = nn.parallel.DistributedDataParallel(Stem(nn.Identity()))
    same, report = fusewise.optimize(wrapped, draw(IMAGE), inplace=True)
    assert same is wrapped and type(wrapped.module.bn1) is BatchNormAct2d
    wrapped(draw(IMAGE)).sum().backward()
    report.restore()
    assert type(wrapped.module.bn1) is nn.BatchNorm2d


def _refused(rank):
    model = Stem(nn.Identity() if rank == 0 else nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
    with pytest.raises(RuntimeError, match="^model: expected the same model on all ranks"):
        fusewise.optimize(model, draw(IMAGE))
    x = draw(IMAGE) if rank == 0 else draw(IMAGE)[:, :1]
    said = "^model: rank 1 failed to prepare it: ValueError" if rank == 0 else "^example_inputs: "
    with pytest.raises((RuntimeError, ValueError), match=said):
        fusewise.optimize(Stem(nn.Identity()), x)

    def fails(*_):
        raise KeyboardInterrupt("stop")

    measure.sample = fails
    expected = KeyboardInterrupt if rank == 0 else RuntimeError
    with pytest.raises(expected, match="stop"):
        fusewise.optimize(Stem(nn.Identity()), draw(IMAGE))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Stem(nn.Identity()))
    with pytest.raises(ValueError, match="^model: bn1 shares its statistics with other processes"):
        fusewise.optimize(model, draw(IMAGE))


def _lose(rank, dying, at_once):
    """One process ends: before the call, or while it measures."""

    def sample(*_):
        os._exit(0)

    measure.sample = sample
    if at_once and rank == dying:
        os._exit(0)
    begin, model = time.monotonic(), Stem(nn.Identity())
    with pytest.raises(RuntimeError):
        fusewise.optimize(model, draw(IMAGE))
    assert time.monotonic() - begin < TIMEOUT - 5
    assert type(model.bn1) is nn.BatchNorm2d
    os._exit(0)  # there is no group any more that could be left


def _alike_until_rank_1_dies(rank):
    _alike(rank)
    _refused(rank)
    _lose(rank, 1, at_once=True)


def _rank_0_dies(rank):
    _lose(rank, 0, at_once=False)


@pytest.mark.parametrize("work", [_alike_until_rank_1_dies, _rank_0_dies])
def test_all_ranks_decide_alike_or_fail(tmp_path, work):
    """One group of processes does several things, because starting one takes seconds."""
    run(work, tmp_path)


def test_fully_shard_afterwards(tmp_path, monkeypatch):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    monkeypatch.setattr(environment, "load", lambda: 0.0)
    monkeypatch.setattr(
        measure,
        "sample",
        lambda calls, *_: {
            name: Times({measure.WALL: [100.0 / (1 + i) + 0.01 * j for j in range(15)]})
            for i, name in enumerate(calls)
        },
    )
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = Stem(nn.Identity())
        new, report = fusewise.optimize(model, draw(IMAGE))
        assert report.swapped
        expected = torch.autograd.grad(new(draw(IMAGE)).sum(), new.bn1.weight)[0]
        fully_shard(new, mesh=mesh)
        new(draw(IMAGE)).sum().backward()
        torch.testing.assert_close(new.bn1.weight.grad.full_tensor(), expected)
        with pytest.raises(TypeError, match="^model: expected plain parameters, got a DTensor"):
            fusewise.optimize(new, draw(IMAGE))
    finally:
        torch.distributed.destroy_process_group()
