"""LINet under torch's tools: compile, checkpointing, several processes."""

import copy
import datetime

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from leaving import leave
from linet_cases import CLASSES, assert_equal, build, images, pair, statistics, step

pytestmark = pytest.mark.usefixtures("few_threads")


def gradient():
    return torch.randn(4, CLASSES, dtype=torch.float64)


def test_compile():
    """One graph in each mode; outputs, gradients and statistics are those of the plain call."""
    torch._dynamo.reset()
    channels = (3, 1)
    ours, reference = pair(channels=channels)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    blanked = torch.tensor([[False, True, False, False], [False, False, True, False]])
    for _ in range(2):
        x, dy = images(channels), gradient()
        for model in (compiled, reference):
            model.zero_grad()
        y, right = compiled(*x, blanked=blanked), reference(*x, blanked=blanked)
        torch.testing.assert_close(y, right)
        y.backward(dy), right.backward(dy)
        found, expected = (
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            for model in (ours, reference)
        )
        assert_equal({name: found[name] for name in expected}, expected)
    assert_equal(statistics(ours), statistics(reference))
    compiled.eval(), reference.eval()
    with torch.no_grad():
        x = images(channels)
        torch.testing.assert_close(compiled(*x), reference(*x))


def test_checkpointing():
    """The recomputation gives the same gradients, and updates the statistics again."""
    ours, _ = pair()
    again = copy.deepcopy(ours)
    x, dy = images(), gradient()
    blanked = torch.rand(3, 4) < 0.3
    right = step(ours, x, dy, blanked)
    found = step(Checkpointed(again), x, dy, blanked)
    assert_equal({name.removeprefix("model."): t for name, t in found.items()}, right)
    ours(*x, blanked=blanked)
    assert_equal(statistics(again), statistics(ours))


class Checkpointed(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *x, blanked):
        return checkpoint(self.model, *x, blanked=blanked, use_reentrant=False)


def test_nothing_is_kept_without_gradients():
    kept = []

    def keep(t):
        kept.append(t)
        return t

    ours = build()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        with torch.no_grad():
            y = ours(*images())
        assert not kept and not y.requires_grad
        ours.requires_grad_(False)
        y = ours(*images())
    assert not kept and not y.requires_grad
    with torch.inference_mode():
        assert ours(*images()).is_inference()


def _start(rank, work, store):
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit
    )
    work(rank)
    torch.distributed.destroy_process_group()
    leave()


def _data_parallel(rank):
    """Two steps with the default settings, in which DDP waits for a gradient of every parameter.
    The second process has no second stream at all."""
    torch.manual_seed(0)
    ours, reference = pair(channels=(3, 1))
    parallel = torch.nn.parallel.DistributedDataParallel(ours, broadcast_buffers=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (ours, reference)]
    for seed in range(2):
        torch.manual_seed(10 * seed + rank)
        x, dy = images((3, 1)), gradient()
        blanked = torch.tensor([[False], [rank == 1]]).expand(2, 4)
        right = step(reference, x, dy, blanked)
        for name, p in reference.named_parameters():
            torch.distributed.all_reduce(p.grad)
            p.grad /= 2
            right[name] = p.grad
        found = step(parallel, x, dy, blanked)
        assert_equal({name.removeprefix("module."): t for name, t in found.items()}, right)
        for optimizer in optimizers:
            optimizer.step()
    assert_equal(ours.state_dict(), reference.state_dict())


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_data_parallel(tmp_path):
    torch.multiprocessing.spawn(_start, (_data_parallel, str(tmp_path / "store")), 2)
