"""The plain model that LINet is compared with: by hand, and against torchvision's ResNets."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import linet_reference
from linet_reference import Conv, LINet, Norm, weights_of_a_resnet

resnet = pytest.importorskip("torchvision").models.resnet


@pytest.fixture(autouse=True)
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_integration_by_hand():
    """One pixel, so that every convolution is a product."""
    layer = Conv([1, 1], 1, 1, 1, bias=True)
    with torch.no_grad():
        for parameter, value in (
            (layer.stream_weights[0], 2.0),
            (layer.stream_weights[1], -3.0),
            (layer.integration_from_streams[0], 5.0),
            (layer.integration_from_streams[1], 7.0),
            (layer.integrated_weight, 11.0),
            (layer.stream_biases[0], 100.0),
            (layer.stream_biases[1], 200.0),
            (layer.integrated_bias, 1000.0),
        ):
            parameter.fill_(value)
    x = [torch.tensor([1.0, 4.0]).view(2, 1, 1, 1), torch.tensor([2.0, 0.5]).view(2, 1, 1, 1)]
    m = torch.tensor([3.0, -1.0]).view(2, 1, 1, 1)
    streams, mixed = layer(x, m)
    assert streams[0].flatten().tolist() == [102.0, 108.0]
    assert streams[1].flatten().tolist() == [194.0, 198.5]
    # 11 m + 5 (2 x_0) + 7 (-3 x_1) + 1000: the biases of the streams do not enter.
    assert mixed.flatten().tolist() == [1000 + 33 + 10 - 42, 1000 - 11 + 40 - 10.5]
    blanked = torch.tensor([[False, True], [True, False]])
    x[0][1], x[1][0] = float("nan"), float("inf")
    streams, mixed = layer(x, m, blanked)
    assert streams[0].flatten().tolist() == [102.0, 0.0]
    assert streams[1].flatten().tolist() == [0.0, 198.5]
    assert mixed.flatten().tolist() == [1000 + 33 + 10, 1000 - 11 - 10.5]
    streams, mixed = layer(x, None, blanked)
    assert mixed.flatten().tolist() == [1010.0, 989.5]


@pytest.mark.parametrize("kernel, stride", [(3, 1), (3, 2), (1, 2), (7, 2)])
def test_strided_integration_takes_the_pixels_of_the_streams(kernel, stride):
    layer = Conv([3, 2], 4, 5, kernel, stride)
    x, m = [torch.randn(2, 3, 9, 8), torch.randn(2, 2, 9, 8)], torch.randn(2, 5, 9, 8)
    streams, mixed = layer(x, m)
    right = F.conv2d(m[:, :, ::stride, ::stride], layer.integrated_weight)
    for i in range(2):
        own = F.conv2d(x[i], layer.stream_weights[i], stride=stride, padding=kernel // 2)
        torch.testing.assert_close(streams[i], own)
        right = right + F.conv2d(own, layer.integration_from_streams[i])
    torch.testing.assert_close(mixed, right)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_norms_are_torchs(momentum):
    norm = Norm(2, 3, momentum)
    theirs = [nn.BatchNorm2d(3, momentum=momentum) for _ in range(3)]
    for _ in range(3):
        x = [torch.randn(4, 3, 2, 2) * 2 + 1 for _ in range(3)]
        streams, m = norm(x[:2], x[2])
        for one, other, image in zip([*streams, m], theirs, x, strict=True):
            torch.testing.assert_close(one, other(image))
    for name, other in zip(("stream0", "stream1", "integrated"), theirs, strict=True):
        torch.testing.assert_close(getattr(norm, f"{name}_running_mean"), other.running_mean)
        torch.testing.assert_close(getattr(norm, f"{name}_running_var"), other.running_var)
    assert norm.num_batches_tracked == 3 and norm.stream_updates.tolist() == [3, 3]


def test_blanked_samples_are_no_samples():
    """Two values 1 and 5, and one that is absent: mean 3, variance 4, unbiased 8."""
    norm = Norm(3, 1, momentum=None, eps=1e-300)
    x = [torch.tensor([1.0, float("nan"), 5.0]).view(3, 1, 1, 1) for _ in range(3)]
    blanked = torch.tensor([[False, True, False], [True, True, False], [True, True, True]])
    integrated = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1)
    with torch.no_grad():
        norm.stream_biases[0].fill_(10), norm.stream_biases[1].fill_(20)
    streams, _ = norm(x, integrated, blanked)
    assert streams[0].flatten().tolist() == [9.0, 0.0, 11.0]
    assert streams[1].flatten().tolist() == [0.0, 0.0, 20.0]  # a single value
    assert streams[2].flatten().tolist() == [0.0, 0.0, 0.0]
    assert norm.stream0_running_mean.tolist() == [3.0] and norm.stream0_running_var == 8
    for i in (1, 2):
        assert norm.get_buffer(f"stream{i}_running_mean").tolist() == [0.0]
        assert norm.get_buffer(f"stream{i}_running_var").tolist() == [1.0]
    assert norm.integrated_running_mean.tolist() == [2.0]
    assert norm.num_batches_tracked == 1 and norm.stream_updates.tolist() == [1, 0, 0]
    # The average of stream 1 begins with its first two values.
    norm(x, integrated, blanked[[1, 0, 2]])
    assert norm.stream1_running_mean.tolist() == [3.0] and norm.stream1_running_var == 8
    assert norm.stream_updates.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    "block, layers", [("BasicBlock", (2, 2, 2, 2)), ("Bottleneck", (1, 2, 1, 2))]
)
def test_one_stream_is_torchvisions_resnet(block, layers):
    """forward_stream is the ResNet up to its last block, pooled. With an integrated stream that
    copies the stream, the logits, all gradients and the running statistics are the ResNet's."""
    theirs = resnet.ResNet(getattr(resnet, block), layers, num_classes=7)
    ours = LINet(getattr(linet_reference, block), layers, (3,), num_classes=7)
    ours.load_state_dict(weights_of_a_resnet(theirs))
    x = torch.randn(2, 3, 33, 40)
    cut = [*theirs.children()][:-2]
    cut[-1] = cut[-1][:-1]
    theirs.eval(), ours.eval()
    with torch.no_grad():
        features = nn.Sequential(*cut)(x).mean((2, 3))
        torch.testing.assert_close(ours.forward_stream(0, x), features)
        torch.testing.assert_close(ours(x), theirs(x))
    theirs.train(), ours.train()
    y, right = ours(x), theirs(x)
    torch.testing.assert_close(y, right)
    y.square().sum().backward()
    right.square().sum().backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    for place, p in theirs.named_parameters():
        module, kind = place.rsplit(".", 1)
        if module == "fc":
            found = gradients[place]
        else:
            found = gradients[f"{module}.stream_{kind}s.0".replace("biass", "biases")]
            if p.dim() == 1:  # a norm: the integrated stream has the other share
                share = gradients[f"{module}.integrated_{kind}"]
                found = share if found is None else found + share
        torch.testing.assert_close(found, p.grad, rtol=1e-7, atol=1e-9 * p.grad.abs().max())
    state = ours.state_dict()
    for place, value in theirs.state_dict().items():
        if "running" in place:
            module, kind = place.rsplit(".", 1)
            torch.testing.assert_close(state[f"{module}.integrated_{kind}"], value)


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_any_number_of_streams(streams):
    """The stream that mixes into nothing changes nothing; the last norm of the streams is idle."""
    model = linet_reference.li_resnet18(range(1, streams + 1), 5, 0.125)
    x = [torch.randn(3, c, 36, 33, requires_grad=True) for c in range(1, streams + 1)]
    y = model(*x)
    assert y.shape == (3, 5)
    y.sum().backward()
    assert all(image.grad.abs().max() > 0 for image in x)
    idle = {name for name, p in model.named_parameters() if p.grad is None}
    kinds = ("stream_weights", "stream_biases")
    assert idle == {f"layer4.1.bn2.{kind}.{i}" for kind in kinds for i in range(streams)}
    assert model.layer4[1].bn2.stream_updates.tolist() == [0] * streams
    assert model.layer4[1].bn2.stream0_running_var.eq(1).all()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Conv):
                module.integration_from_streams[-1].zero_()
        before = model(*x)
        x[-1].normal_()
        torch.testing.assert_close(model(*x), before, rtol=0, atol=0)


def test_blanked_samples_never_matter():
    model = linet_reference.li_resnet18((3, 1), 5, 0.125)
    x = [torch.randn(4, 3, 33, 33), torch.randn(4, 1, 33, 33)]
    blanked = torch.tensor([[0, 1, 0, 0], [1, 1, 0, 1]]).bool()
    results = []
    for value in (0.0, 1e30, float("nan")):
        found = [image.masked_fill(gone[:, None, None, None], value).requires_grad_()
                 for image, gone in zip(x, blanked, strict=True)]  # fmt: skip
        model.zero_grad()
        y = model(*found, blanked=blanked)
        y.square().sum().backward()
        for image, gone in zip(found, blanked, strict=True):
            assert not image.grad[gone].any() and image.grad[~gone].all(0).any()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([y.detach(), *[image.grad for image in found], *grads])
        assert all(t.isfinite().all() for t in results[-1])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=0, atol=0)


def test_a_forward_of_one_stream_updates_that_stream():
    model = linet_reference.li_resnet18((3, 1), 5, 0.125)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.forward_stream(1, torch.randn(3, 1, 33, 33))
    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert {name.rsplit(".", 1)[1] for name in changed} == {
        "stream1_running_mean",
        "stream1_running_var",
        "stream_updates",
    }
    assert not any(name.startswith("layer4.1") for name in changed)
    assert model.bn1.stream_updates.tolist() == [0, 1]
