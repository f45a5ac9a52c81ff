"""What LINet says about arguments that do not fit: the stream, what was expected, what came."""

import re

import pytest
import torch

import fusewise
from linet_cases import CLASSES, build, images, pair
from reference import same_bits

pytestmark = pytest.mark.usefixtures("few_threads")
ERRORS = (RuntimeError, ValueError, TypeError)


@pytest.fixture(scope="module")
def model():
    return build(dtype=torch.float32)


def refused(model, *said, streams, blanked=None):
    """Whether the error has each of these texts in one line; nothing may have changed."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ERRORS) as caught:
        model(*streams, blanked=blanked)
    text = str(caught.value)
    assert "\n" not in text
    for each in said:
        assert re.search(each, text), f"{each!r} is not in: {text}"
    for name, t in model.state_dict().items():
        assert same_bits(t, before[name]), name


def with_stream(i, x):
    streams = images(dtype=torch.float32)
    streams[i] = x
    return streams


STREAM = r"streams?\W{0,2}%d\b"


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_number_of_streams(model, count):
    x = (images(dtype=torch.float32) * 2)[:count]
    refused(model, "streams", r"\b3\b", rf"\b{count}\b", streams=x)


def test_a_list_of_streams(model):
    said = ("expected 3 images, got one list", r"call model\(\*images\)$")
    refused(model, "streams", *said, streams=[images(dtype=torch.float32)])


@pytest.mark.parametrize(
    "i, shape, said",
    [
        (1, (3, 1, 33, 36), (r"\b3\b", r"\b4\b")),
        (2, (4, 1, 33, 35), (r"33\D+36", r"33\D+35")),
        (1, (4, 1, 34, 36), (r"33\D+36", r"34\D+36")),
        (0, (4, 2, 33, 36), (r"\b3\b", r"\b2\b")),
        (2, (4, 3, 33, 36), (r"\b1\b", r"\b3\b")),
        (1, (1, 33, 36), ("1, 33, 36",)),
        (1, (4, 1, 33, 36, 1), ("4, 1, 33, 36, 1",)),
        (1, (4, 33, 36), ("4, 33, 36",)),
    ],
    ids=str,
)
def test_sizes(model, i, shape, said):
    refused(model, STREAM % i, *said, streams=with_stream(i, torch.randn(shape)))


@pytest.mark.parametrize("size", [(0, 36), (33, 0), (0, 0)], ids=str)
def test_images_without_pixels(model, size):
    streams = images(size=size, dtype=torch.float32)
    refused(model, STREAM % 0, rf"{size[0]}\D+{size[1]}", streams=streams)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.complex64])
def test_a_stream_of_another_dtype(model, dtype):
    streams = with_stream(1, torch.ones(4, 1, 33, 36, dtype=dtype))
    refused(model, STREAM % 1, "float", str(dtype).split(".")[1], streams=streams)


def test_all_streams_of_another_dtype(model):
    streams = images(dtype=torch.float64)
    refused(model, STREAM % 0, "float64", "float32", streams=streams)
    streams = [x.to(torch.int32) for x in streams]
    refused(model, STREAM % 0, "int32", streams=streams)


def test_no_tensor(model):
    for other in (None, 3, [1.0]):
        refused(model, STREAM % 1, type(other).__name__, streams=with_stream(1, other))


def test_another_device(model):
    streams = with_stream(2, torch.empty(4, 1, 33, 36, device="meta"))
    refused(model, STREAM % 2, "cpu", "meta", streams=streams)


@pytest.mark.parametrize(
    "blanked, said",
    [
        (torch.zeros(3, 5, dtype=torch.bool), (r"3, 4", r"3, 5")),
        (torch.zeros(4, 3, dtype=torch.bool), (r"3, 4", r"4, 3")),
        (torch.zeros(3, dtype=torch.bool), (r"3, 4", r"\[3\]")),
        (torch.zeros(3, 4, 1, dtype=torch.bool), (r"3, 4", r"3, 4, 1")),
        (torch.zeros(3, 4), ("bool", "float32")),
        (torch.zeros(3, 4, dtype=torch.uint8), ("bool", "uint8")),
        (torch.zeros(3, 4, dtype=torch.bool, device="meta"), ("cpu", "meta")),
        ([[False] * 4] * 3, ("list",)),
    ],
    ids=lambda value: str(tuple(getattr(value, "shape", ()))),
)
def test_blanked(model, blanked, said):
    refused(model, "blanked", *said, streams=images(dtype=torch.float32), blanked=blanked)


def test_strides_of_blanked():
    model = build()
    x = images()
    pattern = torch.rand(4, 3) < 0.4
    y = model.eval()(*x, blanked=pattern.T)
    assert torch.equal(model(*x, blanked=pattern.T.contiguous()), y)
    row = torch.tensor([[True], [False], [False]])
    assert torch.equal(model(*x, blanked=row.expand(3, 4)), model(*x, blanked=row.repeat(1, 4)))


@pytest.mark.parametrize("i", [3, -1, 1.0, None, True], ids=str)
def test_forward_stream_of_no_stream(model, i):
    with pytest.raises((*ERRORS, IndexError), match=re.escape(str(i))):
        model.forward_stream(i, torch.randn(4, 1, 33, 36))


def test_forward_stream_of_other_images(model):
    for x, said in (
        (torch.randn(4, 3, 33, 36), r"\b1\b.*\b3\b"),
        (torch.randn(4, 33, 36), "4, 33, 36"),
        (torch.randn(4, 1, 33, 36, dtype=torch.float64), "float64"),
        (torch.randn(4, 1, 0, 36), r"0\D+36"),
        (None, "NoneType"),
    ):
        with pytest.raises(ERRORS, match=said) as caught:
            model.forward_stream(1, x)
        assert re.search(r"\bx\b|" + STREAM % 1, str(caught.value))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"stream_channels": ()}, "stream_channels"),
        ({"stream_channels": (3, 0)}, r"stream_channels.*0"),
        ({"stream_channels": (3, 1.5)}, r"stream_channels.*1\.5"),
        ({"stream_channels": 3}, "stream_channels"),
        ({"num_classes": 0}, r"num_classes.*0"),
        ({"num_classes": 2.5}, r"num_classes.*2\.5"),
        ({"width": 0}, r"width.*0"),
        ({"width": -1.0}, r"width.*-1"),
        ({"width": float("nan")}, "width.*nan"),
        ({"width": "1"}, "width"),
    ],
    ids=str,
)
def test_models_that_cannot_be_made(options, said):
    with pytest.raises(ERRORS, match=f"(?s){said}"):
        fusewise.models.li_resnet18(**options)


def test_a_gradient_of_a_gradient():
    """It is right, or an error that says so; never silently wrong."""
    results = []
    x = [image.requires_grad_() for image in images((2, 1), batch=3)]
    dy = torch.randn(3, CLASSES, dtype=torch.float64)
    for model in pair(channels=(2, 1)):
        try:
            y = (model(*x) * dy).sum()
            slopes = torch.autograd.grad(y, x, create_graph=True)
            sum(slope.square().sum() for slope in slopes).backward()
        except RuntimeError as error:
            assert re.search("second backward|double backward|twice", str(error)), error
            return
        results.append([model.conv1.stream_weights[0].grad, model.fc.weight.grad])
    torch.testing.assert_close(*results)
