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
