"""LINet in float32 and half precision by the accuracy rule, against the plain model in float64."""

import copy

import pytest
import torch

from fusewise.bench.accuracy import compare, largest
from linet_cases import CLASSES, images, images_away_from_kinks, pair, statistics, step

pytestmark = pytest.mark.usefixtures("few_threads")


@pytest.fixture(autouse=True)
def _no_tf32():
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    yield
    torch.backends.cudnn.conv.fp32_precision = before


def as_one(found, right):
    """All tensors as one vector, each divided by its largest expected value: a model has hundreds,
    many of a few values, of which some are off by more than twice torch's error by chance."""
    parts = [(found[name].double() / (largest(t) or 1)).flatten() for name, t in right.items()]
    return torch.cat(parts)


def results(model, *given):
    running = {name: t for name, t in statistics(model).items() if "running" in name}
    return step(model, *given) | running


def check(ours, eager, right, dtype):
    assert ours.keys() == eager.keys() == right.keys()
    for name, t in ours.items():
        assert t.dtype == eager[name].dtype and t.shape == right[name].shape, name
        assert bool(t.any()) == bool(right[name].any()), name
    kinds = {"outputs": ["y"], "statistics": [name for name in right if "running" in name]}
    kinds["gradients"] = [name for name in right if name not in sum(kinds.values(), [])]
    for kind, names in kinds.items():
        expected = {name: right[name] for name in names}
        vectors = [as_one(results, expected) for results in (ours, eager, right)]
        found = compare(kind, *vectors, 1.0, computed_in=dtype)
        assert found.passed, str(found)


@pytest.mark.parametrize("blanked", [False, True])
def test_float32(device, blanked):
    channels = (3, 1)
    ours, eager = pair("li_resnet18", channels, torch.float32, device=device)
    reference = copy.deepcopy(eager).double()

    def draw():
        pattern = torch.rand(2, 3, device=device) < 0.4 if blanked else None
        x = images(channels, 3, (33, 33), torch.float32, device)
        return [image.double() for image in x], pattern

    # Away from kinks, so that all three make the same decisions.
    x, pattern = images_away_from_kinks(reference, draw, margin=1e-5)
    dy = torch.randn(3, CLASSES, device=device)
    single = [image.float() for image in x], dy, pattern
    double = x, dy.double(), pattern
    models = (ours, single), (eager, single), (reference, double)
    check(*(results(model, *given) for model, given in models), torch.float32)


@pytest.mark.parametrize("blanked", [False, True])
def test_float32_of_many_layers(device, blanked):
    """Rounding reaches 2e-5 here, so no images are away from all kinks. In half of the draws a ReLU
    decides otherwise, torch's or ours, which changes gradients by percents. The smallest error is
    that of a draw in which none does."""
    channels, errors = (3, 1), {"y": [], "gradients": []}
    for seed in range(7):
        ours, eager = pair("li_resnet50", channels, torch.float32, device=device, seed=seed)
        reference = copy.deepcopy(eager).double()
        x, dy = images(channels, 3, (33, 33), torch.float32, device), torch.randn(3, CLASSES)
        pattern = torch.rand(2, 3, device=device) < 0.4 if blanked else None
        dy = dy.to(device)
        single = [step(model, x, dy, pattern) for model in (ours, eager)]
        right = step(reference, [image.double() for image in x], dy.double(), pattern)
        for kind, found in errors.items():
            expected = {name: t for name, t in right.items() if (name == "y") == (kind == "y")}
            vectors = [as_one(results, expected) for results in (*single, right)]
            found.append([(vector - vectors[2]).norm().item() for vector in vectors[:2]])
    for kind, found in errors.items():
        mine, torchs = (min(each) for each in zip(*found, strict=True))
        assert mine <= 2 * torchs, f"{kind}: {mine} against torch's {torchs}"


def half_results(device, dtype, blanked=False, cast=False):
    """Steps of ours and of the eager model on three batches, and what they should give. `cast`: to
    half precision; otherwise the parameters are float32, for autocast.

    Rounding decides about many ReLUs, so that only errors over all values compare.
    """
    ours, eager = pair(dtype=torch.float32, device=device)
    if cast:
        ours.to(dtype), eager.to(dtype)
    reference = copy.deepcopy(eager).double()
    kind = dtype if cast else torch.float32
    found = []
    for _ in range(3):
        x = images(dtype=kind, batch=8, device=device)
        dy = torch.randn(8, CLASSES, device=device).to(dtype)
        pattern = torch.rand(3, 8, device=device) < 0.3 if blanked else None
        with torch.autocast(device, dtype, enabled=not cast):
            steps = [step(model, x, dy, pattern) for model in (ours, eager)]
        right = step(reference, [image.double() for image in x], dy.double(), pattern)
        found.append((*steps, right))
    return found


def check_half(found, dtype):
    for names in (["y"], [name for name in found[0][0] if name != "y"]):
        ours, eager, right = (
            torch.cat([as_one(results[i], {n: results[2][n] for n in names}) for results in found])
            for i in range(3)
        )
        assert ours.isfinite().all()
        error, torchs = (ours - right).norm(), (eager - right).norm()
        assert error <= 2 * torchs + 4 * torch.finfo(dtype).eps * right.norm()
        assert torchs < 0.5 * right.norm(), "torch's own errors hide ours"


@pytest.mark.parametrize("blanked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, dtype, blanked):
    found = half_results(device, dtype, blanked)
    check_half(found, dtype)
    for name, t in found[0][0].items():
        assert t.dtype == (dtype if name == "y" else torch.float32), name


def test_autocast_leaves_float64_alone(device):
    ours, reference = pair(device=device)
    x = images(device=device)
    with torch.autocast(device, torch.bfloat16):
        y = ours(*x)
    torch.testing.assert_close(y, reference(*x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(device, dtype):
    found = half_results(device, dtype, cast=True)
    check_half(found, dtype)
    assert all(t.dtype == dtype for t in found[0][0].values())
