"""Sharded parameters: FSDP2 around a module and inside of it, and tensor parallelism. One process
is enough: parameters are DTensors there, too."""

import pytest
import torch
import torch.distributed
from torch import nn

import fusewise
from fusewise.functional import linear_act, mlp, squeeze_excite
from test_parts import PART, pair, step

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

SAID = (
    "expected a plain tensor, got a DTensor, which fusewise does not take; apply fully_shard to "
    r"the whole fusewise module.* `with fusewise.implementation\(\"torch\"\):`"
)


@pytest.fixture
def mesh(device, tmp_path):
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{tmp_path / 'store'}",
        rank=0,
        world_size=1,
    )
    try:
        yield init_device_mesh(device, (1,))
    finally:
        torch.distributed.destroy_process_group()


def whole(gradients):
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]


@pytest.mark.parametrize("kind", PART)
def test_fully_shard_around_a_module(device, kind, mesh):
    """The fused operator runs, on gathered parameters, in a model that is sharded as well."""
    ours, theirs, x = pair(kind, device)
    model = nn.Sequential(ours)
    fully_shard(ours, mesh=mesh)
    fully_shard(model, mesh=mesh)
    records = fusewise.explain(model, x)
    assert records and "torch" not in {record.chosen for record in records}
    for _ in range(2):
        torch.testing.assert_close(whole(step(model, x)), list(step(theirs, x)))


@pytest.mark.parametrize("kind", ("squeeze_excite", "mlp", "autoencoder"))
def test_fully_shard_of_a_part(device, kind, mesh):
    ours, theirs, x = pair(kind, device)
    fully_shard(ours.get_submodule(PART[kind]), mesh=mesh)
    with pytest.raises(RuntimeError, match=f"^{PART[kind]}.weight: {SAID}"):
        ours(x)
    with fusewise.implementation("torch"):
        torch.testing.assert_close(whole(step(ours, x)), list(step(theirs, x)))


def test_tensor_parallel_layers(device, mesh):
    ours, theirs, x = pair("mlp", device)
    plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
    parallelize_module(ours, mesh, plan)
    with pytest.raises(RuntimeError, match=f"^layers.0.weight: {SAID}"):
        ours(x)
    with fusewise.implementation("torch"):
        torch.testing.assert_close(whole(step(ours, x)), list(step(theirs, x)))


@pytest.mark.parametrize("gradient", (True, False), ids=("grad", "no_grad"))
def test_functions_name_the_argument(device, mesh, gradient):
    def draw(*shape):
        return torch.randn(shape, device=device, requires_grad=gradient)

    def distributed(*shape):
        return distribute_tensor(draw(*shape), mesh, [Shard(0)])

    x, w = draw(3, 6), distributed(5, 6)
    image, small = draw(2, 6, 3, 5), draw(4, 6)
    everywhere = distribute_tensor(x, mesh, [Replicate()])
    for name, call in (
        ("w", lambda: linear_act(x, w)),
        ("x", lambda: linear_act(everywhere, draw(5, 6))),
        (r"weights\[0\]", lambda: mlp(x, [w])),
        (r"weights\[1\]", lambda: mlp(x, [draw(6, 6), w])),
        ("w2", lambda: squeeze_excite(image, small, None, distributed(6, 4), None, "silu")),
    ):
        with pytest.raises(RuntimeError, match=f"^{name}: {SAID}"):
            call()
