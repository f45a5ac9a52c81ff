"""LINet's state dict, its parameters, and copies of it."""

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch

import fusewise
import linet_reference
from linet_cases import CLASSES, assert_equal, build, images, pair, step
from reference import same_bits

pytestmark = pytest.mark.usefixtures("few_threads")
MODELS = ["li_resnet18", "li_resnet34", "li_resnet50"]


def shapes(tensors):
    return {name: tuple(t.shape) for name, t in tensors}


@pytest.mark.parametrize("channels", [(3,), (3, 1, 1)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes(name, channels):
    ours = build(name, channels)
    reference = getattr(linet_reference, name)(channels, CLASSES, 0.125)
    assert shapes(ours.state_dict().items()) == shapes(reference.state_dict().items())
    assert shapes(ours.named_parameters()) == shapes(reference.named_parameters())
    state = ours.state_dict()
    assert state["conv1.integrated_weight"].shape == (8, 0, 1, 1)
    assert state["layer2.0.downsample.0.integrated_weight"].shape[2:] == (1, 1)
    for p in ours.parameters():
        assert isinstance(p, torch.nn.Parameter) and p.is_leaf and p.requires_grad


def test_sizes_of_the_models():
    """By default RGB and two single channels, 1000 classes, and the full width."""
    with torch.device("meta"):
        for name, features in (("li_resnet18", 512), ("li_resnet34", 512), ("li_resnet50", 2048)):
            state = getattr(fusewise.models, name)().state_dict()
            assert shapes(state.items()) == shapes(
                getattr(linet_reference, name)().state_dict().items()
            )
            assert state["fc.weight"].shape == (1000, features)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name):
    """Both ways, through a file, and without the weights changing."""
    ours, reference = pair(name, (2, 1))
    x = images((2, 1), batch=2)
    dy = torch.randn(2, CLASSES, dtype=torch.float64)
    step(ours, x, dy)  # so that statistics and counters are new
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    reference.load_state_dict(state)
    again = build(name, (2, 1))
    again.load_state_dict(reference.state_dict())
    loaded = again.state_dict()
    for key, t in ours.state_dict().items():
        assert same_bits(loaded[key], t), key
        assert same_bits(state[key], t), key
    found = step(ours, x, dy)
    for key, t in step(again, x, dy).items():
        assert same_bits(t, found[key]), key
    assert_equal(found, step(reference, x, dy))


def test_no_parameters_share_memory():
    """Each stream has ordinary parameters of its own: optimizers and files keep them apart."""
    ours = build()
    places = [p.untyped_storage().data_ptr() for p in ours.parameters()]
    assert len(places) == len(set(places))


def test_a_checkpoint_without_stream_updates():
    """An older one counts steps only: each stream was updated in each."""
    ours = build(momentum=None)
    step(ours, images(), torch.randn(4, CLASSES, dtype=torch.float64))
    state = {k: t for k, t in ours.state_dict().items() if not k.endswith("stream_updates")}
    state["layer1.0.bn2.num_batches_tracked"] = torch.tensor(7)
    again = build()
    again.load_state_dict(state)
    assert again.bn1.stream_updates.tolist() == [1, 1, 1]
    assert again.layer1[0].bn2.stream_updates.tolist() == [7, 7, 7]


def test_mistakes_in_a_state_dict():
    ours = build()
    state = ours.state_dict()
    del state["layer1.0.conv1.stream_weights.1"]
    with pytest.raises(RuntimeError, match=r"Missing.*layer1\.0\.conv1\.stream_weights\.1"):
        ours.load_state_dict(state)
    state = ours.state_dict()
    state["layer1.0.bn1.stream1_running_mean"] = torch.zeros(9, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"size mismatch.*stream1_running_mean"):
        ours.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"stream_weights\.2"):  # of a model with more streams
        build(channels=(3, 1)).load_state_dict(ours.state_dict())


@pytest.mark.parametrize("name", ["li_resnet18", "li_resnet50"])
def test_parameters_of_the_streams(name):
    """Every parameter belongs to one stream or to the integrated one."""
    ours = build(name)
    names = {p: key for key, p in ours.named_parameters()}
    found = [{names[p] for p in ours.stream_parameters(i)} for i in range(3)]
    for i, keys in enumerate(found):
        assert keys == {
            key for key in names.values() if re.search(rf"\.stream_(weights|biases)\.{i}$", key)
        }
    integrated = {names[p] for p in ours.integrated_parameters()}
    assert len(integrated) + sum(map(len, found)) == len(names)
    assert set().union(integrated, *found) == set(names.values())
    groups = [{"params": ours.stream_parameters(i), "lr": 0.1 * i} for i in range(3)]
    groups.append({"params": ours.integrated_parameters()})
    torch.optim.SGD(groups, lr=0.1)
    for i in (3, -1):
        with pytest.raises((IndexError, ValueError, RuntimeError), match=rf"(?s){i}"):
            list(ours.stream_parameters(i))


def test_a_frozen_stream():
    """It gets no gradients; those of the others are as before."""
    ours, reference = pair()
    x, dy = images(), torch.randn(4, CLASSES, dtype=torch.float64)
    right = step(reference, x, dy)
    frozen = set(ours.stream_parameters(1))
    for p in frozen:
        p.requires_grad_(False)
    ours(*x).backward(dy)
    for name, p in ours.named_parameters():
        if p in frozen:
            assert p.grad is None, name
        else:
            assert_equal({name: p.grad}, {name: right[name]})


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "torch.save"])
def test_copies(kind):
    ours, _ = pair()
    if kind == "deepcopy":
        again = copy.deepcopy(ours)
    elif kind == "pickle":
        again = pickle.loads(pickle.dumps(ours))
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    x, dy = images(), torch.randn(4, CLASSES, dtype=torch.float64)
    found = step(again, x, dy)
    for name, t in step(ours, x, dy).items():
        assert same_bits(found[name], t), name
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    assert ours.fc.weight.any() and ours.conv1.stream_weights[2].any()


def test_dtypes_and_devices():
    ours, reference = pair(dtype=torch.float32)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.float32):
        ours.to(dtype)
        for name, t in ours.state_dict().items():
            counts = name.endswith(("num_batches_tracked", "stream_updates"))
            assert t.dtype == (torch.int64 if counts else dtype), name
    ours.half()
    assert ours(*images(dtype=torch.float16)).dtype == torch.float16
    with torch.device("meta"):
        empty = build(dtype=torch.float32)
    assert all(t.is_meta for t in empty.state_dict().values())
    empty.to_empty(device="cpu").load_state_dict(reference.state_dict())
    x = images(dtype=torch.float32)
    empty.eval(), reference.eval()
    torch.testing.assert_close(empty(*x), reference(*x), rtol=1e-4, atol=1e-4)
    ours.to(memory_format=torch.channels_last)


def test_the_page_runs_as_printed():
    page = Path(__file__).parents[2] / "docs" / "linet.md"
    samples = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    names = {}
    for sample in samples:
        exec(compile(sample, page.name, "exec"), names)
    assert names["y"].shape == (4, 19) and names["features"].shape == (4, 512)
    assert len(names["optimizer"].param_groups) == 4


def test_the_start():
    """Norms start as torch's; activations neither vanish nor grow on their way."""
    ours = build(channels=(3, 1, 1))
    for name, t in ours.state_dict().items():
        if name.endswith("running_var"):
            assert t.eq(1).all(), name
        elif name.endswith(("running_mean", "num_batches_tracked", "stream_updates")):
            assert not t.any(), name
    for module in ours.modules():
        if isinstance(module, fusewise.nn.LIBatchNorm2d):
            assert module.integrated_weight.eq(1).all() and not module.integrated_bias.any()
            assert all(t.eq(1).all() for t in module.stream_weights)
            assert not any(t.any() for t in module.stream_biases)
    found = step(ours, images(batch=8), torch.randn(8, CLASSES, dtype=torch.float64))
    assert 0.01 < found["y"].std() < 10
    learned = [name for name in found if name != "y" and not name.startswith("layer4.1.bn2.stream")]
    assert all(found[name].any() for name in learned)
