"""One stream of a LINet alone: forward_stream."""

import pytest
import torch
from torch import nn

import fusewise
from linet_cases import assert_equal, images, pair, statistics
from linet_reference import weights_of_a_resnet
from reference import same_bits

pytestmark = pytest.mark.usefixtures("few_threads")


def run(model, i, x):
    x = x.detach().requires_grad_()
    y = model.forward_stream(i, x)
    inputs = {"x": x} | dict(model.named_parameters())
    torch.manual_seed(1)
    gradients = torch.autograd.grad(
        y, list(inputs.values()), torch.randn_like(y), allow_unused=True, materialize_grads=True
    )
    found = {"y": y.detach()} | dict(zip(inputs, gradients, strict=True))
    return found | {f"after: {name}": t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name, features", [("li_resnet18", 64), ("li_resnet50", 256)])
def test_every_stream(name, features, training):
    ours, reference = (model.train(training) for model in pair(name))
    for i, x in enumerate(images(batch=2)):
        before = {key: t.clone() for key, t in ours.state_dict().items()}
        found = run(ours, i, x)
        assert found["y"].shape == (2, features)
        assert_equal(found, run(reference, i, x))
        after = ours.state_dict()
        changed = {key for key, t in before.items() if not same_bits(after[key], t)}
        kinds = {key.rsplit(".", 1)[1] for key in changed}
        ends = {f"stream{i}_running_mean", f"stream{i}_running_var", "stream_updates"}
        assert kinds == (ends if training else set())


def test_it_counts_in_the_average_of_all_steps():
    models = pair(channels=(3, 1), momentum=None)
    x, alone = images((3, 1), batch=2), images((3, 1), batch=2)[1]
    for model in models:
        model(*x)
        model.forward_stream(1, alone)
        model(*x)
    ours, reference = (statistics(model) for model in models)
    assert_equal(ours, reference)
    assert (ours["bn1.stream_updates"] - ours["bn1.num_batches_tracked"]).tolist() == [0, 1]


def test_the_samples_of_a_stream_alone():
    """forward_stream has no integrated stream: in eval mode its own weights are all that counts."""
    ours, _ = pair()
    ours.eval()
    x = images(batch=2)[1]
    y = ours.forward_stream(1, x)
    with torch.no_grad():
        for p in ours.integrated_parameters():
            p.fill_(float("nan"))
        for i in (0, 2):
            for p in ours.stream_parameters(i):
                p.fill_(float("nan"))
    assert torch.equal(ours.forward_stream(1, x), y)


def test_one_stream_is_torchvisions_resnet():
    """forward_stream is the ResNet up to its last block. The logits are its logits where the
    integrated stream copies the other one."""
    models = pytest.importorskip("torchvision").models
    theirs = models.resnet18(num_classes=7).double()
    ours = fusewise.models.li_resnet18((3,), num_classes=7).double()
    ours.load_state_dict(weights_of_a_resnet(theirs))
    (x,) = images((3,), batch=2)
    theirs.eval(), ours.eval()
    *body, _, _ = theirs.children()
    body[-1] = body[-1][:-1]
    with torch.no_grad():
        torch.testing.assert_close(ours.forward_stream(0, x), nn.Sequential(*body)(x).mean((2, 3)))
        torch.testing.assert_close(ours(x), theirs(x))
