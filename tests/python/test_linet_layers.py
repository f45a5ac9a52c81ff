"""LINet's layers and blocks one by one against the plain model, in float64."""

import pytest
import torch
import torch.nn.functional as F

import fusewise
from fusewise.nn import LIBasicBlock, LIBatchNorm2d, LIBottleneck, LIConv2d
from linet_cases import assert_equal
from linet_reference import BasicBlock, Bottleneck, Conv, Norm

pytestmark = pytest.mark.usefixtures("few_threads")
BLANKED = torch.tensor([[False, True, False, False], [True, True, False, True]])


@pytest.fixture(autouse=True)
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def draw(channels, size=(7, 6)):
    return [torch.randn(4, c, *size) for c in channels]


def absent(images):
    """Two streams with 0 where they are blanked, as every layer leaves them."""
    rows = [*BLANKED, torch.zeros(4, dtype=torch.bool)]
    pairs = zip(images, rows, strict=False)
    return [x.masked_fill(gone[:, None, None, None], 0) for x, gone in pairs]


def same_weights(ours, reference):
    with torch.no_grad():
        for name, t in reference.state_dict().items():
            if t.is_floating_point():
                t.uniform_(0.5, 1.5) if name.endswith("var") else t.normal_(std=0.5)
    ours.load_state_dict(reference.state_dict())


def gradients(module, y, images, slopes):
    """Of the images and of all parameters, 0 where there are none."""
    found = torch.autograd.grad(
        y, [*images, *module.parameters()], slopes, allow_unused=True, materialize_grads=True
    )
    names = [*(f"dx{i}" for i in range(len(images))), *dict(module.named_parameters())]
    return dict(zip(names, found, strict=True))


def check(ours, reference, images, call, plain, integrated_only):
    """`call` and `plain` take a list, the integrated stream last; `plain` returns two parts."""
    leaves = [x.detach().requires_grad_() for x in images]
    y = call(leaves)
    others = [x.detach().requires_grad_() for x in images]
    streams, m = plain(others)
    right = m if integrated_only else torch.stack([*streams, m])
    slopes = torch.randn_like(right)
    found = {"y": y} | gradients(ours, y, leaves, slopes)
    expected = {"y": right} | gradients(reference, right, others, slopes)
    assert_equal(found, expected, rtol=1e-10)
    assert_equal(dict(ours.state_dict()), dict(reference.state_dict()), rtol=1e-10)


@pytest.mark.parametrize("integrated_only", [False, True])
@pytest.mark.parametrize("blanked", [None, BLANKED], ids=["all", "blanked"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel, stride", [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_convolution(kernel, stride, bias, blanked, integrated_only):
    ours = LIConv2d([3, 3], 5, kernel, stride, bias=bias)
    reference = Conv([3, 3], 5, 3, kernel, stride, bias=bias)
    same_weights(ours, reference)
    images = draw([3, 3, 3])
    if blanked is not None:
        images[0][1], images[1][0] = float("nan"), float("inf")

    def call(x):
        return ours(torch.stack(x), blanked, integrated_only)

    def plain(x):
        return reference(x[:2], x[2], blanked)

    check(ours, reference, images, call, plain, integrated_only)


@pytest.mark.parametrize("blanked", [None, BLANKED], ids=["all", "blanked"])
@pytest.mark.parametrize("bias", [False, True])
def test_first_convolution(bias, blanked):
    ours = LIConv2d([3, 1], 5, 7, 2, bias=bias, first=True)
    reference = Conv([3, 1], 5, 0, 7, 2, bias=bias)
    same_weights(ours, reference)
    images = draw([3, 1])
    if blanked is not None:
        images[0][1], images[1][0] = float("nan"), float("inf")

    def call(x):
        return ours(x, blanked)

    def plain(x):
        return reference(x, None, blanked)

    check(ours, reference, images, call, plain, False)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("blanked", [None, BLANKED], ids=["all", "blanked"])
@pytest.mark.parametrize("kind", ["residual", "identity", "max_pool", "integrated_only"])
def test_norm(kind, blanked, momentum):
    activation = "identity" if kind == "identity" else "relu"
    pool, integrated_only = kind == "max_pool", kind == "integrated_only"
    ours = LIBatchNorm2d(3, 2, activation, momentum=momentum, max_pool=pool)
    reference = Norm(2, 3, momentum)
    same_weights(ours, reference)
    for training in (True, True, False):
        ours.train(training), reference.train(training)
        images = draw([3] * (6 if kind == "residual" else 3))
        if blanked is not None:
            images[:3] = absent(images[:3])
            images[3:] = absent(images[3:])

        def call(x):
            if integrated_only:
                return ours(x[2], None, blanked, integrated_only=True)
            residual = torch.stack(x[3:]) if kind == "residual" else None
            return ours(torch.stack(x[:3]), residual, blanked)

        def plain(x):
            streams, m = reference(None if integrated_only else x[:2], x[2], blanked)
            if integrated_only:
                return None, m.relu()
            results = [*streams, m]
            if kind == "residual":
                results = [y + r for y, r in zip(results, x[3:], strict=True)]
            if kind != "identity":
                results = [y.relu() for y in results]
            if pool:
                results = [F.max_pool2d(y, 3, 2, 1) for y in results]
            return results[:2], results[2]

        check(ours, reference, images, call, plain, integrated_only)


@pytest.mark.parametrize("integrated_only", [False, True])
@pytest.mark.parametrize("blanked", [None, BLANKED], ids=["all", "blanked"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    "kind, plain_kind", [(LIBasicBlock, BasicBlock), (LIBottleneck, Bottleneck)]
)
def test_block(kind, plain_kind, stride, blanked, integrated_only):
    """With stride 2 and, for the bottleneck, with stride 1 the residual has a convolution."""
    ours, reference = kind(4, 4, 2, stride), plain_kind(2, 4, 4, stride, 0.1)
    same_weights(ours, reference)
    images = draw([4, 4, 4], (9, 8))
    before = list if blanked is None else absent

    def call(x):
        return ours(torch.stack(before(x)), blanked, integrated_only)

    def plain(x):
        *streams, m = before(x)
        return reference(streams, m, blanked, integrated_only)

    if integrated_only and reference.downsample is not None:
        # The plain model computes the streams of that residual, and drops them.
        norm = reference.downsample[1]
        norm.forward = lambda streams, m, gone: (None, Norm.forward(norm, None, m, gone)[1])
    check(ours, reference, images, call, plain, integrated_only)


def test_tools_know_the_norm():
    """update_bn averages over the batches and resets first; the converter hands out the group."""
    model = fusewise.models.li_resnet18((3, 1), num_classes=2, width=0.125)
    batches = [[torch.randn(4, c, 32, 32) for c in (3, 1)] for _ in range(3)]

    class Views(torch.nn.Module):  # update_bn gives one tensor
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x[:, :3], x[:, 3:])

    model(*batches[0])
    fusewise.nn.update_bn([torch.cat(batch, 1) for batch in batches], Views())
    means = [model.conv1(batch)[0].mean((0, 2, 3)) for batch in batches]
    averaged = model.bn1.state_dict()["stream0_running_mean"]
    torch.testing.assert_close(averaged, torch.stack(means).mean(0), rtol=1e-4, atol=1e-5)
    assert model.bn1.num_batches_tracked == 3 and model.bn1.momentum == 0.1
    with pytest.raises(RuntimeError, match="init_process_group first"):
        fusewise.nn.convert_sync_batchnorm(model)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_samples_in_a_norm(momentum):
    """It is a step, and no update of a stream. A mistake changes nothing."""
    norm = LIBatchNorm2d(4, 2, momentum=momentum)
    batches = [torch.randn(3, 2, 4, 5, 5) for _ in range(2)]
    norm(batches[0])
    before = {key: t.clone() for key, t in norm.state_dict().items()}
    empty = batches[0][:, :0]
    with pytest.raises(RuntimeError, match="residual"):
        norm(empty, empty[..., :1])
    assert norm.num_batches_tracked == 1
    norm(empty), norm.forward_stream(1, empty[1])
    after = norm.state_dict()
    assert after.pop("num_batches_tracked") == before.pop("num_batches_tracked") + 1
    for key, t in before.items():
        assert torch.equal(after[key], t), key
    if momentum is None:
        norm.forward_stream(1, batches[1][1])
        means = [batch[1].mean((0, 2, 3)) for batch in batches]
        torch.testing.assert_close(norm.stream1_running_mean, (means[0] + means[1]) / 2)


@pytest.mark.parametrize("i", [-1, 2])
def test_streams_that_do_not_exist(i):
    x = torch.randn(2, 4, 5, 5)
    layers = LIConv2d([4, 4], 4, 3), LIBatchNorm2d(4, 2), LIBasicBlock(4, 4, 2)
    for layer in layers:
        before = {key: t.clone() for key, t in layer.state_dict().items()}
        with pytest.raises(ValueError, match=rf"^i: expected .*, got {i}$"):
            layer.forward_stream(i, x)
        for key, t in layer.state_dict().items():
            assert torch.equal(t, before[key]), key


def test_statistics_by_name():
    """As torch.distributed.checkpoint looks them up."""
    norm = LIBatchNorm2d(4, 2)
    norm(torch.randn(3, 2, 4, 5, 5))
    for key, t in norm.state_dict().items():
        found = norm
        for part in key.split("."):
            found = getattr(found, part)
        assert torch.equal(found, t), key
    with pytest.raises(AttributeError, match="stream2_running_mean"):
        norm.stream2_running_mean  # noqa: B018


def test_a_part_of_a_checkpoint_for_a_model_without_memory():
    state = LIBatchNorm2d(4, 2).state_dict()
    state["stream0_running_mean"] = torch.full((4,), 7.0)
    del state["stream1_running_var"], state["num_batches_tracked"]
    with torch.device("meta"):
        norm = LIBatchNorm2d(4, 2)
    missing, _ = norm.load_state_dict(state, strict=False, assign=True)
    assert missing == ["stream1_running_var", "num_batches_tracked"]
    assert norm.running_mean[0].tolist() == [7.0] * 4 and norm.running_var[1].tolist() == [1.0] * 4
    assert norm.updates.tolist() == [0, 0, 0]


def test_layers_keep_the_layout_of_blanked_streams():
    layer, blanked = (
        LIConv2d([4, 4], 4, 3, bias=True),
        torch.tensor([[True, False], [False, False]]),
    )
    x = torch.randn(3, 2, 5, 6, 4).movedim(-1, 2)
    assert layer(x, blanked).stride() == layer(x).stride() == x.stride()


def test_all_biases_have_gradients():
    layer = LIConv2d([4, 4], 4, 3, bias=True)
    layer(torch.randn(3, 2, 4, 5, 5), integrated_only=True).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_parts_of_the_wrong_kind():
    norm, layer = LIBatchNorm2d(4, 2), LIConv2d([4, 4], 4, 3)
    x, blanked = torch.randn(3, 2, 4, 5, 5), torch.zeros(2, 2, dtype=torch.bool)
    for call, message in (
        (lambda: norm(x, blanked=[True]), "blanked: expected a tensor or None, got list"),
        (lambda: norm([x]), "x: expected a tensor, got list"),
        (lambda: layer([x], blanked), "x: expected [3, N, C, H, W], got list"),
        (lambda: layer(x[0], blanked), "x: expected [3, N, C, H, W], got [2, 4, 5, 5]"),
        (
            lambda: LIConv2d([4, 4], 4, 3, first=True)(None),
            "x: expected 2 images, one per stream, got NoneType",
        ),
        (
            lambda: fusewise.models.LIResNet(LIBasicBlock, (1, 1, 1)),
            "layers: expected the blocks of four stages, got (1, 1, 1)",
        ),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert str(caught.value) == message


def test_transforms_of_a_model():
    """torch.func sees the formulas of all operators."""
    model = fusewise.models.li_resnet18((2,), num_classes=2, width=0.125).double().eval()
    x = torch.randn(2, 2, 33, 33, dtype=torch.float64)
    slope = torch.func.grad(lambda x: model(x).square().sum())(x)
    right = x.clone().requires_grad_()
    model(right).square().sum().backward()
    torch.testing.assert_close(slope, right.grad)
