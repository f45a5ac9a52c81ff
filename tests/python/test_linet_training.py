"""LINet against the plain model in float64: outputs, gradients and statistics, with training."""

import pytest
import torch

from linet_cases import CLASSES, assert_equal, build, images, pair, statistics, step, train
from reference import LAYOUTS, same_bits

pytestmark = pytest.mark.usefixtures("few_threads")


def batches(count, channels=(3, 1, 1), batch=4, size=(33, 36), blanked=None):
    """`blanked` makes the pattern of a step."""
    return [
        (
            images(channels, batch, size),
            torch.randn(batch, CLASSES, dtype=torch.float64),
            None if blanked is None else blanked(len(channels), batch),
        )
        for _ in range(count)
    ]


def check_training(found, *arguments, **options):
    ours, reference = found
    steps = batches(5, *arguments, **options)
    assert_equal(train(ours, steps), train(reference, steps))


def check_steps(found, *arguments, **options):
    """Each step starts from the reference's state, where training amplifies the rounding of
    earlier steps: from 1e-13 in li_resnet50's first step to 1e-6 in its fifth."""
    ours, reference = found
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in found]
    for batch in batches(5, *arguments, **options):
        assert_equal(*(step(model, *batch) for model in found))
        for optimizer in optimizers:
            optimizer.step()
        assert_equal(*(dict(model.state_dict()) for model in found))
        ours.load_state_dict(reference.state_dict())


@pytest.mark.parametrize("channels", [(3,), (3, 1), (3, 1, 1), (1, 2, 3, 1, 1)], ids=str)
def test_five_steps(channels):
    check_training(pair(channels=channels), channels)


@pytest.mark.parametrize("name", ["li_resnet34", "li_resnet50"])
def test_five_steps_of_the_deeper_models(name):
    check_steps(pair(name, (2, 1)), (2, 1), blanked=random)


def random(streams, batch):
    return torch.rand(streams, batch) < 0.4


def one_sample_left(streams, batch):
    blanked = random(streams, batch)
    blanked[1] = torch.arange(batch) != torch.randint(batch, ())
    return blanked


def a_stream_is_absent(streams, batch):
    blanked = random(streams, batch)
    blanked[torch.randint(streams, ())] = True
    return blanked


def samples_without_any_stream(streams, batch):
    blanked = random(streams, batch)
    blanked[:, torch.randint(batch, ())] = True
    return blanked


def nothing(streams, batch):
    return torch.zeros(streams, batch, dtype=torch.bool)


PATTERNS = [
    random,
    one_sample_left,
    a_stream_is_absent,
    samples_without_any_stream,
    nothing,
]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_five_steps_with_blanked_samples(pattern, momentum):
    check_training(pair(momentum=momentum), blanked=pattern)


@pytest.mark.parametrize("name", ["li_resnet18", "li_resnet50"])
def test_everything_is_blanked(name):
    """The integrated stream is constant, so each norm gives its bias. The plain model cannot tell:
    its convolutions give neighbouring pixels different last bits, and each norm multiplies their
    difference by 1 / sqrt(eps)."""
    ours, _ = pair(name)
    before = {key: t.clone() for key, t in statistics(ours).items()}
    x, dy = images(), torch.randn(4, CLASSES, dtype=torch.float64)
    found = step(ours, x, dy, torch.ones(3, 4, dtype=torch.bool))
    y = ours.bn1.integrated_bias.relu()
    for stage in (ours.layer1, ours.layer2, ours.layer3, ours.layer4):
        for block in stage:
            if block.downsample is not None:
                y = block.downsample[1].integrated_bias
            last = list(block.children())[-2 if block.downsample is not None else -1]
            y = (y + last.integrated_bias).relu()
    torch.testing.assert_close(found.pop("y"), ours.fc(y).expand(4, CLASSES))
    for key, t in found.items():
        assert t.isfinite().all(), key
        assert "stream" not in key or "integration" in key or not t.any(), key
    for key, t in statistics(ours).items():
        assert not key.split(".")[-1].startswith("stream") or same_bits(t, before[key]), key


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_single_value_is_left(momentum):
    """The last blocks have one pixel: the variance is 0, and the running statistics stay."""
    found = pair(momentum=momentum)
    updates = [found[0].layer4[0].bn1.stream_updates.clone()]
    check_steps(found, size=(32, 31), blanked=one_sample_left)
    updates.append(found[0].layer4[0].bn1.stream_updates)
    assert (updates[1] - updates[0])[1] == 0


def test_averages_of_all_steps():
    """With momentum None, a stream's average is over the steps in which it was there."""
    ours, reference = pair(channels=(3, 1), momentum=None)
    for model in (ours, reference):
        for name, buffer in statistics(model).items():
            if name.endswith(("num_batches_tracked", "stream_updates")):
                buffer.zero_()
    absent = iter([[0, 1], [0, 0], [1, 0], [0, 1], [0, 1]])

    def pattern(streams, batch):
        return torch.tensor(next(absent)).bool()[:, None].expand(streams, batch)

    steps = batches(5, (3, 1), blanked=pattern)
    found = train(ours, steps)
    assert_equal(found, train(reference, steps))
    assert found["after: layer2.0.bn1.stream_updates"].tolist() == [4, 2]
    assert found["after: layer4.1.bn2.stream_updates"].tolist() == [0, 0]
    assert found["after: layer2.0.bn1.num_batches_tracked"] == 5
    assert found["after: layer4.1.bn2.num_batches_tracked"] == 5


@pytest.mark.parametrize("training", [True, False])
def test_blanked_values_never_matter(training):
    """Nor do NaN and infinity, in the output, in any gradient, and in the statistics."""
    ours, _ = pair()
    ours.train(training)
    state = {name: t.clone() for name, t in ours.state_dict().items()}
    ((x, dy, blanked),) = batches(1, blanked=one_sample_left)
    results = []
    for value in (0.0, 1e300, float("nan"), float("-inf")):
        ours.load_state_dict(state)
        filled = [
            image.masked_fill(gone[:, None, None, None], value)
            for image, gone in zip(x, blanked, strict=True)
        ]
        results.append(step(ours, filled, dy, blanked) | ours.state_dict())
        for i, gone in enumerate(blanked):
            assert not results[-1][f"dx{i}"][gone].any()
            assert results[-1][f"dx{i}"][~gone].any()
        results[-1] = {name: t.clone() for name, t in results[-1].items()}
    for found in results:
        for name, t in found.items():
            assert t.isfinite().all(), name
            assert same_bits(t, results[0][name]), name


@pytest.mark.parametrize("blanked", [None, random])
def test_eval_mode(blanked):
    ours, reference = (model.eval() for model in pair())
    state = {name: t.clone() for name, t in ours.state_dict().items()}
    ((x, dy, pattern),) = batches(1, blanked=blanked)
    assert_equal(step(ours, x, dy, pattern), step(reference, x, dy, pattern))
    with torch.inference_mode():
        torch.testing.assert_close(ours(*x, blanked=pattern), reference(*x, blanked=pattern))
        alone = [image[:1, :, :1, :1] for image in x]  # one pixel, one sample
        torch.testing.assert_close(ours(*alone), reference(*alone))
    for name, t in ours.state_dict().items():
        assert same_bits(t, state[name]), f"{name} changed in eval mode"


# Repeats a sample, not a pixel: in a constant image the last bits decide the max-pool's ties.
_LAYOUTS = LAYOUTS | {"expanded": lambda t: t[:1].expand_as(t)}


@pytest.mark.parametrize("layout", [name for name in _LAYOUTS if name != "batch_inside"])
def test_layouts_of_the_images(layout):
    ours, reference = pair()
    ((x, dy, blanked),) = batches(1, blanked=random)
    x = [_LAYOUTS[layout](image) for image in x]
    found = step(ours, x, dy.T.contiguous().T, blanked)
    assert_equal(found, step(reference, x, dy, blanked))
    if layout in ("nchw", "channels_last"):
        for i, image in enumerate(x):
            assert found[f"dx{i}"].stride() == torch.empty_like(image).stride()


def test_runs_are_bit_identical():
    ours, _ = pair()
    state = {name: t.clone() for name, t in ours.state_dict().items()}
    steps = batches(2, blanked=random)
    first = {name: t.clone() for name, t in train(ours, steps).items()}
    ours.load_state_dict(state)
    for name, t in train(ours, steps).items():
        assert same_bits(t, first[name]), name


def test_no_samples():
    """The output is empty, gradients are 0, and only the counters of the steps advance."""
    ours, _ = pair()
    before = {name: t.clone() for name, t in ours.state_dict().items()}
    for blanked in (None, torch.zeros(3, 0, dtype=torch.bool)):
        x = images(batch=0)
        found = step(ours, x, torch.zeros(0, CLASSES, dtype=torch.float64), blanked)
        assert found.pop("y").shape == (0, CLASSES)
        assert not any(t.any() for t in found.values())
    for name, t in ours.state_dict().items():
        steps = 2 if name.endswith("num_batches_tracked") else 0
        assert same_bits(t, before[name] + steps), name


def test_one_value_per_channel():
    """It is an error in training, whatever `blanked` says."""
    ours = build()
    x = images(batch=1, size=(32, 32))
    for blanked in (None, torch.tensor([[True], [False], [False]])):
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            ours(*x, blanked=blanked)
    ours(*images(batch=1, size=(33, 32)))
