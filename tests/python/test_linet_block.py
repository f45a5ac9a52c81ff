"""A residual block of LINet as one operator: the bits of its layers, and at home in torch."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusewise
from fusewise.nn import LIBasicBlock, LIBottleneck
from linet_cases import build, images
from reference import same_bits

pytestmark = pytest.mark.usefixtures("few_threads")

forward_op = torch.ops.fusewise._li_block.default
backward_op = torch.ops.fusewise._li_block_backward.default
STREAMS, N = 2, 3
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BLANKED = torch.tensor([[False, True, False], [True, True, False]])


@pytest.fixture(autouse=True)
def deterministic():
    """In float64 the convolutions are torch's. On CUDA its own choice may not repeat its bits."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        yield


class Operators(TorchDispatchMode):
    """Counts fusewise's operators by name."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "fusewise":
            name = function.name().removeprefix("fusewise::_")
            self.found[name] = self.found.get(name, 0) + 1
        return function(*arguments, **(options or {}))

    def __enter__(self):
        self.found = {}
        return super().__enter__()


def random_block(kind=LIBasicBlock, planes=4, stride=1, device="cpu", dtype=torch.float32):
    block = kind(8, planes, STREAMS, stride).to(device, dtype)
    with torch.no_grad():
        for name, t in block.state_dict().items():
            if t.is_floating_point() and t.dim() == 1:
                t.uniform_(0.5, 1.5) if "bias" not in name and "mean" not in name else t.normal_()
    return block


def draw(device="cpu", dtype=torch.float32, size=(6, 5), n=N):
    x = torch.randn(STREAMS + 1, n, *size, 8, dtype=torch.float64)
    return x.to(device, dtype).movedim(-1, 2)


def layer_by_layer(block):
    """The same block, which calls its layers."""
    block = copy.deepcopy(block)
    block.conv1.register_forward_hook(lambda *_: None)
    return block


def run(block, x, dy, *arguments):
    """Output, gradients by name, and the buffers behind it."""
    x = x.detach().requires_grad_()
    block.zero_grad()
    y = block(x, *arguments)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad}
    found |= {name: p.grad for name, p in block.named_parameters()}
    return found | {f"after: {name}": t for name, t in block.state_dict().items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        assert same_bits(found[name], right), name
        assert found[name].stride() == right.stride(), name


def assert_near(found, right, name, computed_in=None):
    """The same bits, but on CUDA, where sums may be added in another order."""
    if not right.is_cuda:
        assert same_bits(found, right), name
    allowed = max(torch.finfo(computed_in or right.dtype).eps, 1e-5)
    assert (found - right).double().norm() <= allowed * right.double().norm(), name


def assert_as_layers(found, expected):
    """Except for dx, whose two terms cuDNN adds before it rounds."""
    if found["dx"].is_cuda:
        found, expected = dict(found), dict(expected)
        dx, right = found.pop("dx"), expected.pop("dx")
        assert_near(dx, right, "dx", found["y"].dtype)
        assert dx.dtype == right.dtype and dx.stride() == right.stride()
    assert_same(found, expected)


def gradient_for(block, x, integrated_only):
    with torch.no_grad():
        return torch.randn_like(copy.deepcopy(block)(x, None, integrated_only))


def test_a_model_runs_blocks():
    """Every block is one operator each way. Before them is the stem."""
    model = build(dtype=torch.float32)
    with Operators() as operators:
        model(*images(dtype=torch.float32)).sum().backward()
    assert operators.found == {
        "li_conv": 1,
        "batch_norm_act_pool": 1,
        "li_block": 8,
        "li_block_backward": 8,
        "batch_norm_act_pool_backward": 1,
        "li_conv_backward": 1,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("integrated_only", [False, True], ids=["all", "integrated"])
@pytest.mark.parametrize("blanked", [None, BLANKED], ids=["present", "blanked"])
@pytest.mark.parametrize(
    "kind, planes, stride",
    [(LIBasicBlock, 8, 1), (LIBasicBlock, 12, 2), (LIBottleneck, 2, 1), (LIBottleneck, 4, 2)],
)
def test_bits_of_the_layers(device, kind, planes, stride, blanked, integrated_only, dtype):
    """Output, gradients and running statistics; the parameters are float32 beside half x."""
    own = dtype if dtype == torch.float64 else torch.float32
    block = random_block(kind, planes, stride, device, own)
    other = layer_by_layer(block)
    blanked = None if blanked is None else blanked.to(device)
    for training in (True, True, False):
        x = draw(device, dtype)
        if blanked is not None:
            x[:-1][blanked] = 0
        dy = gradient_for(block, x, integrated_only)
        block.train(training), other.train(training)
        with Operators() as operators:
            found = run(block, x, dy, blanked, integrated_only)
        assert operators.found == {"li_block": 1, "li_block_backward": 1}
        with Operators() as operators:
            expected = run(other, x, dy, blanked, integrated_only)
        assert "li_block" not in operators.found
        assert_as_layers(found, expected)


@pytest.mark.parametrize("stride", [1, 2])
def test_half_precision_parameters(device, stride):
    block = random_block(LIBasicBlock, 8, stride, device, torch.bfloat16)
    x = draw(device, torch.bfloat16)
    dy = gradient_for(block, x, False)
    other = layer_by_layer(block)
    assert_as_layers(run(block, x, dy), run(other, x, dy))


@pytest.mark.parametrize("momentum", [0.3, None])
def test_momentum(device, momentum):
    block = random_block(stride=2, device=device)
    for module in block.modules():
        module.momentum = momentum
    other = layer_by_layer(block)
    for _ in range(3):
        x = draw(device)
        dy = gradient_for(block, x, False)
        assert_as_layers(run(block, x, dy), run(other, x, dy))


def test_without_gradients(device):
    """Nothing is kept, and the result is the same. On CUDA BatchNorm may run another kernel."""
    for kind in (LIBasicBlock, LIBottleneck):
        for integrated_only in (False, True):
            block = random_block(kind, 4, 2, device)
            x = draw(device)
            right = copy.deepcopy(block)(x, None, integrated_only)
            kept = []
            hooks = torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t)
            with hooks, torch.no_grad():
                y = block(x, None, integrated_only)
            assert_near(y, right, kind)
            assert not kept and not y.requires_grad
    with torch.inference_mode():
        assert block(draw(device)).is_inference()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("integrated_only", [False, True], ids=["all", "integrated"])
def test_only_what_is_wanted(device, stride, integrated_only):
    """Each gradient alone is that of all together; what is frozen gets none. On CUDA one GEMM
    computes the gradients of all streams if all are needed."""
    torch.backends.cudnn.allow_tf32 = False  # until the fixture's end
    block = random_block(planes=8, stride=stride, device=device)
    x = draw(device)
    dy = gradient_for(block, x, integrated_only)
    state = copy.deepcopy(block.state_dict())
    expected = run(block, x, dy, None, integrated_only)
    names = [name for name, _ in block.named_parameters()]
    for wanted in ("dx", *names):
        block.load_state_dict(state)
        block.zero_grad()
        for name, p in block.named_parameters():
            p.requires_grad_(name == wanted)
        leaf = x.detach().requires_grad_(wanted == "dx")
        block(leaf, None, integrated_only).backward(dy)
        found = {"dx": leaf.grad} | {name: p.grad for name, p in block.named_parameters()}
        assert_near(found.pop(wanted), expected[wanted], wanted)
        assert all(t is None for t in found.values()), wanted
    block.requires_grad_(False)
    assert not block(x).requires_grad


def test_strides(device):
    """Of x and of the incoming gradient."""
    block = random_block(stride=2, device=device)
    other = layer_by_layer(block)
    x = draw(device)
    dy = gradient_for(block, x, False)
    wide = torch.cat([x, x], 2)
    for each in (x.contiguous(), wide[:, :, 8:], x.flip(0), x[:, :1].expand_as(x)):
        for slope in (dy, dy.contiguous(), dy[..., :1, :1].expand_as(dy)):
            found, expected = run(block, each, slope), run(other, each, slope)
            for name, right in expected.items():
                torch.testing.assert_close(found[name], right, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_images_that_are_not_aligned(device, dtype):
    """The integrated stream is, also behind streams of an odd size."""
    block = random_block(planes=5, stride=2, device=device)
    other = layer_by_layer(block)
    x = draw(device, dtype, size=(5, 3))
    dy = gradient_for(block, x, True)
    assert_as_layers(run(block, x, dy, None, True), run(other, x, dy, None, True))


def test_autocast(device):
    """A float32 x is cast once, for the residual too; gradients come in the parameters' dtype."""
    block = random_block(planes=8, device=device)
    other = layer_by_layer(block)
    x = draw(device)
    with torch.autocast(device, torch.bfloat16):
        dy = gradient_for(block, x, False)
        found, expected = run(block, x, dy), run(other, x, dy)
    assert found["y"].dtype == torch.bfloat16 and found["dx"].dtype == torch.float32
    assert_as_layers(found, expected)


def test_gradcheck():
    for integrated_only in (False, True):
        for stride in (1, 2):
            block = random_block(planes=8, stride=stride, dtype=torch.float64).eval()
            x = draw(dtype=torch.float64, size=(3, 2), n=1).requires_grad_()

            def call(x, block=block, integrated_only=integrated_only):
                return block(x, None, integrated_only)

            assert torch.autograd.gradcheck(call, x)
            block.train()
            assert torch.autograd.gradcheck(call, x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("integrated_only", [False, True], ids=["all", "integrated"])
def test_second_backward(device, training, integrated_only):
    """A gradient penalty has the gradients that the layers give it."""
    block = random_block(stride=2, device=device, dtype=torch.float64).train(training)
    other = layer_by_layer(block)
    x = draw(device, torch.float64)
    blanked = torch.zeros(STREAMS, N, dtype=torch.bool, device=device)
    blanked[0, 1] = True
    x[0, 1] = 0
    found = []
    for each in (block, other):
        leaf = x.detach().requires_grad_()
        y = each(leaf, blanked, integrated_only)
        (dx,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
        dx.square().sum().backward()
        found.append({name: p.grad for name, p in each.named_parameters()} | {"x": leaf.grad})
        found[-1] |= {f"after: {name}": t for name, t in each.state_dict().items()}
    for name, right in found[1].items():
        torch.testing.assert_close(found[0][name], right, msg=name)


@pytest.mark.parametrize("create_graph", [False, True])
def test_statistics_that_change_before_backward(device, create_graph):
    """Other calls train the block, or DDP broadcasts its buffers."""
    for training in (True, False):
        block = random_block(stride=2, device=device, dtype=torch.float64)
        x = draw(device, torch.float64).requires_grad_()
        found = []
        for changes in (False, True):
            y = block.train(training)(x).square().sum()
            if changes:
                block.train()(2 * x)
                block.bn1.reset_running_stats()
            found.append(torch.autograd.grad(y, x, create_graph=create_graph)[0])
        torch.testing.assert_close(*found)


def test_second_backward_under_autocast(device):
    block = random_block(device=device)
    x = draw(device).requires_grad_()
    found = []
    for enabled in (False, True):
        y = block(x).square().sum()
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(y, x, create_graph=True)[0])
    torch.testing.assert_close(*found)


def test_saved_tensors_in_another_layout(device):
    """As torch.autograd.graph.save_on_cpu(pin_memory=True) gives them back."""
    block = random_block(planes=8, stride=2, device=device)
    x = draw(device)
    with torch.autocast(device, torch.bfloat16):
        dy = gradient_for(block, x, False)
        for each in (block, layer_by_layer(block)):
            state = copy.deepcopy(each.state_dict())
            expected = run(each, x, dy)
            each.load_state_dict(state)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, torch.Tensor.contiguous):
                found = run(each, x, dy)
            for name, right in expected.items():
                torch.testing.assert_close(found[name], right, rtol=0.02, atol=0.02, msg=name)


def test_a_batch_of_gradients(device):
    block = random_block(stride=2, device=device, dtype=torch.float64)
    x = draw(device, torch.float64).requires_grad_()
    y = block(x)
    dys = torch.stack([torch.randn_like(y), torch.randn_like(y)])
    (found,) = torch.autograd.grad(y, x, dys, is_grads_batched=True, retain_graph=True)
    for each, dy in zip(found, dys, strict=True):
        torch.testing.assert_close(each, torch.autograd.grad(y, x, dy, retain_graph=True)[0])


def test_checkpointing(device):
    block = random_block(stride=2, device=device)
    again = copy.deepcopy(block)
    x = draw(device)
    dy = gradient_for(block, x, False)
    expected = run(block, x, dy)

    def recomputed(x):
        return checkpoint(again, x, use_reentrant=False)

    leaf = x.detach().requires_grad_()
    recomputed(leaf).backward(dy)
    assert same_bits(leaf.grad, expected["dx"])
    for name, p in again.named_parameters():
        assert same_bits(p.grad, expected[name]), name
    block(x)  # the recomputation updates the statistics again
    for name, t in again.state_dict().items():
        assert same_bits(t, block.state_dict()[name]), name


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    """One graph, also with running statistics that it updates."""
    torch._dynamo.reset()
    block = random_block(stride=2, device=device)
    other = copy.deepcopy(block)
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for training in (True, False):
        block.train(training), other.train(training)
        for n in (2, 3):
            x = draw(device, n=n)
            dy = gradient_for(other, x, False)
            found, expected = run(compiled, x, dy), run(other, x, dy)
            assert_same({name.replace("_orig_mod.", ""): t for name, t in found.items()}, expected)


@pytest.mark.parametrize("integrated_only", [False, True], ids=["all", "integrated"])
@pytest.mark.parametrize("stride", [1, 2])
def test_opcheck(device, stride, integrated_only):
    block = random_block(planes=8, stride=stride, device=device)
    caught = []

    class Catch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if function in (forward_op, backward_op):
                caught.append((function, arguments))
            return function(*arguments, **(options or {}))

    with Catch():
        x = draw(device).requires_grad_()
        y = block(x, BLANKED.to(device), integrated_only)
        y.backward(torch.ones_like(y))
        with torch.no_grad():
            block(x, None, integrated_only)
    assert len(caught) == 3
    for function, arguments in caught:
        detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
        torch.library.opcheck(function, detached)


def test_hooks_are_called():
    """The layers run where somebody watches them, or where they compute something else."""
    x = draw()

    def forward_hook(block, called):
        block.bn2.register_forward_hook(lambda *_: called.append(1))

    def pre_hook(block, called):
        block.downsample.register_forward_pre_hook(lambda *_: called.append(1))

    def own_forward(block, called):
        own = block.conv2.forward
        block.conv2.forward = lambda *arguments: (called.append(1), own(*arguments))[1]

    def other_class(block, called):
        class Norm(fusewise.nn.LIBatchNorm2d):
            def forward(self, *arguments):
                called.append(1)
                return super().forward(*arguments)

        block.bn1.__class__ = Norm

    for change in (forward_hook, own_forward, other_class, pre_hook):
        block, called = random_block(stride=2), []
        right = copy.deepcopy(block)(x)
        change(block, called)
        y = block(x)
        if change is not pre_hook:  # the shortcut's container is never called
            assert called, change
        assert same_bits(y, right)
    called = []
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: called.append(1))
    block(x)
    everywhere.remove()
    assert len(called) > 4


def test_settings_of_the_norms():
    """Each norm keeps its own."""
    x = draw()
    for name, value in (("momentum", 0.5), ("eps", 0.1), ("training", False)):
        block = random_block(stride=2)
        setattr(block.bn2, name, value)
        other = layer_by_layer(block)
        assert same_bits(block(x), other(x)), name
        for key, t in other.state_dict().items():
            assert same_bits(block.state_dict()[key], t), key


def test_a_mistake_changes_nothing(device):
    """Also if it is in the last layer."""

    def statistics_dtype(block):
        block.bn2.running_mean = block.bn2.running_mean.double()

    def weight_dtype(block):
        block.conv2.integrated_weight = torch.nn.Parameter(block.conv2.integrated_weight.double())

    def weight_shape(block):
        block.conv2.stream_weights[1] = torch.nn.Parameter(torch.ones(8, 7, 3, 3, device=device))

    def norm_shape(block):
        block.bn2.stream_biases[1] = torch.nn.Parameter(torch.ones(9, device=device))

    mistakes = {
        statistics_dtype: "running_mean: expected x's dtype float32, got float64",
        weight_dtype: "previous: expected x's dtype float32, got float64",
        weight_shape: r"stream 1: w: expected \[8, 8, 3, 3\], got \[8, 7, 3, 3\]",
        norm_shape: r"bias: expected \[8\], got \[9\]",
    }
    for mistake, message in mistakes.items():
        block = random_block(planes=8, device=device)
        mistake(block)
        before = {name: t.clone() for name, t in block.state_dict().items()}
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match=message):
                block(draw(device))
        for name, t in block.state_dict().items():
            assert same_bits(t, before[name]), name


@pytest.mark.parametrize("name", ["running_mean", "running_var", "updates"])
def test_running_statistics_of_too_few_streams(device, name):
    block = random_block(device=device)
    setattr(block.bn2, name, getattr(block.bn2, name)[:1].clone())
    before = [t.clone() for t in block.buffers()]
    with pytest.raises(RuntimeError, match=f"expected {STREAMS + 1} rows, got"):
        block(draw(device), integrated_only=True)
    assert all(map(same_bits, block.buffers(), before))


def test_one_value_per_channel():
    block = random_block(stride=2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        block(draw(size=(2, 2), n=1))
    assert block.eval()(draw(size=(2, 2), n=1)).shape[-1] == 1


def test_no_samples():
    block = random_block(stride=2)
    x = draw(n=0).requires_grad_()
    y = block(x)
    y.sum().backward()
    assert y.shape == (STREAMS + 1, 0, 4, 3, 3) and block.bn1.num_batches_tracked == 1
    assert all(not p.grad.any() for p in block.parameters())


def test_settings_that_norms_share():
    block = random_block(stride=2)
    for norm in (block.bn1, block.bn2, block.downsample[1]):
        norm.eps = 1e-3
    other = layer_by_layer(block)
    x = draw()
    dy = gradient_for(block, x, False)
    with Operators() as operators:
        found = run(block, x, dy)
    assert operators.found == {"li_block": 1, "li_block_backward": 1}
    assert_same(found, run(other, x, dy))


def test_norms_of_different_types():
    """The layers run."""
    block = random_block(dtype=torch.bfloat16)
    block.bn2.float()
    x = draw(dtype=torch.bfloat16)
    other = layer_by_layer(block)
    dy = gradient_for(block, x, False)
    assert_same(run(block, x, dy), run(other, x, dy))


def test_blanked_of_another_kind():
    block, x = random_block(), draw()
    with pytest.raises(TypeError, match="blanked: expected a tensor or None, got list"):
        block(x, [[True] * N] * STREAMS)
    with pytest.raises(ValueError, match=rf"blanked: expected \[{STREAMS}, {N}\]"):
        block(x, torch.zeros(STREAMS + 2, N, dtype=torch.bool))


def test_explain_names_the_layers():
    block = random_block(stride=2)
    records = fusewise.explain(block, draw())
    operators = [record.operator for record in records if record.direction == "forward"]
    assert operators == ["li_conv", "batch_norm_act"] * 3
    with fusewise.implementation("torch"):
        torch.testing.assert_close(block(draw()), block(draw()), rtol=10, atol=10)
