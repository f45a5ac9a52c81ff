"""A swapped BatchNorm + Squeeze-and-Excitation afterwards: copies, hooks, checkpoints, calls by
hand, sharding."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fusewise
from fusewise.nn import BatchNormAct2d, SqueezeExcitation
from optimize_models import IMAGE, Stem, draw, gated_block, inject, names_and_types, shaken

__all__ = ["inject"]

pytestmark = pytest.mark.usefixtures("few_threads")


@pytest.fixture
def swapped(inject):
    """A model and its swapped form, in training."""
    model = shaken(Stem(gated_block()))
    new, report = fusewise.optimize(model, draw(IMAGE))
    assert report.swapped[-1].pattern == "BatchNorm + Squeeze-and-Excitation"
    return model, new


def test_copies_and_compilation(swapped):
    _, new = swapped
    new.eval()
    again = pickle.loads(pickle.dumps(new))
    compiled = torch.compile(copy.deepcopy(new), backend="eager", fullgraph=True)
    with torch.no_grad():
        for each in (again, compiled):
            torch.testing.assert_close(each(draw(IMAGE)), new(draw(IMAGE)))
    again.blocks[0][0][1].weight.data.zero_()
    assert not torch.equal(again(draw(IMAGE)), new(draw(IMAGE)))


def test_a_second_call_finds_nothing(swapped):
    _, report = fusewise.optimize(swapped[1], draw(IMAGE))
    assert not report.rows


def test_hooks_on_the_convolutions_run(swapped):
    model, new = swapped
    seen = []
    for each in (model, new):
        each.blocks[0][1].fc1.register_forward_hook(lambda *_: seen.append(1))
        each.eval()
    torch.testing.assert_close(new(draw(IMAGE)), model(draw(IMAGE)))
    assert seen == [1, 1]


def test_parameters_of_two_dtypes_afterwards(swapped):
    """The norm stays in float32, as it often does in half precision."""
    _, new = swapped
    new.eval()
    expected = new(draw(IMAGE))
    new.bfloat16()
    for norm in (new.bn1, new.blocks[0][0][1]):
        norm.float()
    torch.testing.assert_close(new(draw(IMAGE).bfloat16()).float(), expected, rtol=0.1, atol=0.1)


def test_statistics_of_several_processes(swapped):
    model, new = swapped
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fusewise.nn.convert_sync_batchnorm(new)
        assert new.blocks[0][0][1].process_group is not None
        torch.testing.assert_close(new(draw(IMAGE)), copy.deepcopy(model)(draw(IMAGE)))
    finally:
        torch.distributed.destroy_process_group()


def test_each_part_alone(swapped):
    """By hand, with another layer in the other's place, and with a hook on the norm."""
    model, new = swapped
    model.eval(), new.eval()
    (_, norm, _), gate = new.blocks[0]
    x = draw((2, 8, 5, 5))
    torch.testing.assert_close(gate(x), model.blocks[0][1](x))
    seen = []
    for each in (norm, model.blocks[0][0][2]):
        each.register_forward_hook(lambda _, __, y: seen.append(y.clone()))
    torch.testing.assert_close(new(draw(IMAGE)), model(draw(IMAGE)))
    torch.testing.assert_close(*seen)
    for each in (model, new):
        each.blocks[0][0][1] = nn.Identity()
        each.blocks[0][0][2] = nn.SiLU()
    torch.testing.assert_close(new(draw(IMAGE)), model(draw(IMAGE)))


def test_a_tracer_sees_the_parts(swapped):
    model, new = swapped

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            leaves = BatchNormAct2d, SqueezeExcitation
            return isinstance(module, leaves) or super().is_leaf_module(module, name)

    new.eval()
    graph = torch.fx.GraphModule(new, Tracer().trace(new))
    torch.testing.assert_close(graph(draw(IMAGE)), model.eval()(draw(IMAGE)))


class Checkpointed(nn.Module):
    """A block of which some layers are under a checkpoint."""

    def __init__(self, layers, reentrant):
        super().__init__()
        self.layers, self.reentrant, self.run = layers, reentrant, True

    def forward(self, x):
        return (
            checkpoint(self.layers, x, use_reentrant=self.reentrant) if self.run else self.layers(x)
        )


def stepped(model):
    """Gradients and buffers of a step."""
    model.train()
    for parameter in model.parameters():
        parameter.grad = None
    model(draw(IMAGE)).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | dict(model.named_buffers())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(swapped, reentrant):
    """Around the block the statistics are updated twice, as torch does it; around the excitation
    alone once."""
    model, new = (copy.deepcopy(each) for each in swapped)
    for each in (model, new):
        each.blocks[0] = Checkpointed(each.blocks[0], reentrant)
    found, expected = stepped(new), stepped(model)
    assert expected["blocks.0.layers.0.1.num_batches_tracked"] == 2
    torch.testing.assert_close(found, expected)

    model, new = (copy.deepcopy(each) for each in swapped)
    for each in (model, new):
        each.blocks[0][1] = Checkpointed(each.blocks[0][1], reentrant)
    if reentrant:
        said = "expected gradients for both layers or for none; put the block that holds both"
        with pytest.raises(RuntimeError, match=said):
            stepped(new)
        return
    expected = stepped(model)
    assert expected["blocks.0.0.1.num_batches_tracked"] == 1
    torch.testing.assert_close(stepped(new), expected)


def test_one_of_them_without_gradients(swapped):
    _, new = swapped
    conv, norm, _ = new.blocks[0][0]
    with torch.no_grad():
        given = norm(conv(draw((2, 8, 5, 5))))
    with pytest.raises(RuntimeError, match="expected gradients for both layers or for none"):
        new.blocks[0][1](given)


def test_fully_shard_afterwards(swapped):
    """Around both layers it works. Around the norm's container, the norm's parameters are sharded
    again when the excitation reads them."""
    model, new = swapped
    expected = model.eval()(draw(IMAGE))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        whole, part = copy.deepcopy(new), copy.deepcopy(new)
        fully_shard(whole.blocks[0], mesh=mesh)
        torch.testing.assert_close(whole.eval()(draw(IMAGE)), expected)
        for each in (part.blocks[0][0], part):
            fully_shard(each, mesh=mesh)
        with pytest.raises(RuntimeError, match="got a DTensor; apply fully_shard to the block"):
            part(draw(IMAGE))
    finally:
        torch.distributed.destroy_process_group()


def test_an_exception_in_the_middle_of_the_swaps_undoes_them(inject, monkeypatch):
    from fusewise.rewrite.candidate import Edits

    model = shaken(Stem(gated_block()))
    before, replace = names_and_types(model), Edits.replace
    for at in range(20):
        left = [at]

        def interrupted(edits, name, module, left=left):
            if edits.root.model is model:
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
            replace(edits, name, module)

        monkeypatch.setattr(Edits, "replace", interrupted)
        try:
            _, report = fusewise.optimize(model, draw(IMAGE), verify=False, inplace=True)
        except KeyboardInterrupt:
            assert names_and_types(model) == before
        else:
            break
    assert at == 6  # the stem's three layers, the block's three
    assert report.restore() is model and names_and_types(model) == before
