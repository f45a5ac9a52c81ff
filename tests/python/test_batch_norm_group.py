"""Processes that share BatchNorm statistics give what one process gives with the whole batch."""

import copy
import datetime
import os
import pickle
import time

import pytest
import torch
from torch import nn

import fusewise
from fusewise.functional import batch_norm_act
from fusewise.nn import BatchNormAct2d, convert_sync_batchnorm
from leaving import leave

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

TIMEOUT = 4  # seconds, of the group that loses a process


def run(work, folder, *arguments):
    """Calls work(rank, *arguments) in two processes of a group."""
    torch.multiprocessing.spawn(_start, (work, str(folder / "store"), arguments), 2)


def _start(rank, work, store, arguments):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=TIMEOUT if work is _lose else 120),
    )
    work(rank, *arguments)
    if work is not _lose:
        torch.distributed.destroy_process_group()
    leave()


def _step(samples, group, options, dtype, layout, streams):
    """Results and gradients of some samples, and the statistics after the step."""
    torch.manual_seed(0)
    lead = (3,) * streams

    def image():
        t = torch.randn(*lead, 6, 8, 3, 3, dtype=dtype) * 3 + 7
        t = t[..., samples, :, :, :]
        return t.contiguous(memory_format=layout) if not streams else t

    x, residual, dy = image(), image(), image() - 7
    weight, bias = torch.rand(*lead, 8, dtype=dtype), torch.randn(*lead, 8, dtype=dtype)
    mean, var = torch.randn(*lead, 8, dtype=dtype), torch.rand(*lead, 8, dtype=dtype)
    tracked = torch.tensor([3, 0, 5]) if streams else torch.tensor(3)
    blanked = None
    if options.pop("blanked", False):
        blanked = (torch.arange(6) % 3 == 1).expand(*lead, 6)[..., samples].contiguous()
    if options.get("max_pool"):
        dy = dy[..., :2, :2]
    inputs = [t.requires_grad_() for t in (x, weight, bias, residual)]
    unpack = torch.Tensor.contiguous if options.pop("hooks", False) and group else lambda t: t
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = batch_norm_act(
            x,
            mean,
            var,
            weight,
            bias,
            residual if options.pop("residual", True) else None,
            training=True,
            num_batches_tracked=tracked,
            blanked=blanked,
            process_group=group,
            **options,
        )
    found = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    return {
        "local": [y, found[0], *[t for t in found[3:] if t is not None]],
        "summed": found[1:3],
        "same": [mean, var, tracked],
    }


CASES = {
    "plain": {},
    "silu without residual": {"activation": "silu", "residual": False},
    "identity": {"activation": "identity"},
    "cumulative average": {"momentum": None},
    "blanked": {"blanked": True, "activation": "hardswish"},
    "float32": {"dtype": torch.float32},
    "channels_last": {"layout": torch.channels_last, "activation": "relu6"},
    "max_pool": {"max_pool": True, "residual": False, "layout": torch.channels_last},
    "streams": {"streams": True, "blanked": True, "momentum": None},
    "hooks that change the layout": {"layout": torch.channels_last, "hooks": True},
}


def _equal_one_process(rank):
    for name, case in CASES.items():
        case = {"dtype": torch.float64, "layout": torch.contiguous_format, "streams": False} | case
        kind = [case.pop(key) for key in ("dtype", "layout", "streams")]
        whole = _step(slice(0, 6), None, dict(case), *kind)
        for cut in (2, 5, 6):  # with 6, the second process has no sample
            samples = (slice(0, cut), slice(cut, 6))[rank]
            part = _step(samples, torch.distributed.group.WORLD, dict(case), *kind)
            for t in part["summed"]:
                torch.distributed.all_reduce(t)
            for key, found in part.items():
                right = whole[key]
                if key == "local":
                    right = [t[..., samples, :, :, :] for t in right]
                # float32: sums of 54 terms, whose order differs.
                atol = 200 * torch.finfo(kind[0]).eps
                message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
                torch.testing.assert_close(
                    list(found), list(right), rtol=1e-6, atol=atol, msg=message
                )


def test_two_processes_equal_one_with_the_whole_batch(tmp_path):
    run(_equal_one_process, tmp_path)


def _modules(rank):
    group = torch.distributed.group.WORLD
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4), nn.Conv2d(4, 4, 1), nn.ReLU())
    model.insert(3, BatchNormAct2d(4, "identity", momentum=None))
    expected = copy.deepcopy(model)
    model = convert_sync_batchnorm(model)
    assert model[1].process_group is group
    assert copy.deepcopy(model)[1].process_group is group
    assert pickle.loads(pickle.dumps(model))[1].process_group is None
    x = torch.randn(4, 3, 5, 5)
    for _ in range(2):
        found, right = model(x[rank::2]), expected(x)
        torch.testing.assert_close(found, right[rank::2])
    for one, other in zip(model.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    # In eval mode nobody waits for anybody.
    model.eval(), expected.eval()
    if rank == 0:
        torch.testing.assert_close(model(x), expected(x))
    alone = BatchNormAct2d(3, track_running_stats=False, process_group=group).eval()
    if rank == 0:
        torch.testing.assert_close(
            alone(x), nn.functional.batch_norm(x, None, None, training=True).relu()
        )
    # One value per channel is enough where another process has more.
    y = BatchNormAct2d(3, process_group=group)(x[:1, :, :1, :1] if rank else x)
    assert y.isfinite().all()
    # Compiled with a graph break.
    torch._dynamo.reset()
    model.train()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    torch.testing.assert_close(compiled(x[rank::2]), model(x[rank::2]))
    records = fusewise.explain(model, x[rank::2])
    assert [record.operator for record in records] == ["batch_norm_act"] * 4
    # Torch's own operators have no such statistics, and there is no second backward.
    with fusewise.implementation("torch"), pytest.raises(RuntimeError, match="^process_group: "):
        model(x)
    t = x[rank::2].requires_grad_()
    with pytest.raises(RuntimeError, match="^process_group: there is no second backward"):
        torch.autograd.grad(model(t).square().sum(), t, create_graph=True)


def test_modules(tmp_path):
    run(_modules, tmp_path)


def _lose(rank, told):
    x = torch.randn(2, 3, 4, 4)
    norm = BatchNormAct2d(3, process_group=torch.distributed.group.WORLD)
    norm(x)
    if rank == 1:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        norm(x)
    assert time.monotonic() - start < 3 * TIMEOUT
    open(told, "w").close()
    os._exit(0)


def test_a_process_that_dies_is_an_error_for_the_others(tmp_path):
    told = tmp_path / "told"
    run(_lose, tmp_path, str(told))
    assert told.exists()


@pytest.fixture
def world(tmp_path):
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


def test_a_group_of_one_is_no_group(world):
    x = torch.randn(2, 3, 4, 4)
    y = batch_norm_act(x, None, None, training=True, process_group=world)
    assert torch.equal(y, batch_norm_act(x, None, None, training=True))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        batch_norm_act(x[:1, :, :1, :1], None, None, training=True, process_group=world)


def test_torchs_own_converter_leaves_ours_alone(world):
    """It converts the other layers. fusewise.nn's converts both."""
    model = nn.Sequential(nn.BatchNorm2d(3), BatchNormAct2d(3))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model[0]) is nn.SyncBatchNorm
    assert type(model[1]) is BatchNormAct2d and model[1].process_group is None
    model = convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3), BatchNormAct2d(3, "silu")))
    assert type(model[0]) is nn.SyncBatchNorm
    assert model[1].process_group is world and model[1].activation == "silu"
    assert type(convert_sync_batchnorm(nn.BatchNorm2d(3), world)) is nn.SyncBatchNorm


def test_mistakes():
    with pytest.raises(
        TypeError, match=r"^process_group: expected a torch.distributed.ProcessGrou"
    ):
        BatchNormAct2d(3, process_group="nccl")
    with pytest.raises(TypeError, match=r"^process_group: .* or None, got int$"):
        batch_norm_act(torch.zeros(2, 3, 4, 4), None, None, training=True, process_group=0)
    with pytest.raises(RuntimeError, match=r"^process_group: .*init_process_group first$"):
        convert_sync_batchnorm(nn.Sequential(BatchNormAct2d(3)))
    convert_sync_batchnorm(nn.Sequential(nn.ReLU()))
