"""LINet's convolution as a function: right numbers, and at home in torch."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusewise
from fusewise.bench.accuracy import compare, largest, scale
from fusewise.functional import li_conv
from reference import LAYOUTS, same_bits

pytestmark = pytest.mark.usefixtures("few_threads")

forward_op = torch.ops.fusewise._li_conv.default
backward_op = torch.ops.fusewise._li_conv_backward.default
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def eager(x, weights, mix, previous=None, stride=1, padding=0, integrated_only=False):
    """The formula, one torch operator at a time."""
    *streams, m = (*x, None) if previous is None else x.unbind()
    u = [
        F.conv2d(image, w, None, stride, padding) for image, w in zip(streams, weights, strict=True)
    ]
    y = sum(F.conv2d(each, w.reshape(*w.shape[:2], 1, 1)) for each, w in zip(u, mix, strict=True))
    if previous is not None:
        y = y + F.conv2d(m, previous.reshape(*previous.shape[:2], 1, 1), stride=stride)
    return y if integrated_only else torch.stack([*u, y])


class Case:
    """The arguments of a call, and the gradient of its result."""

    def __init__(
        self,
        device="cpu",
        dtype=torch.float32,
        streams=3,
        first=False,
        kernel=3,
        stride=1,
        n=2,
        channels=5,
        out=6,
        size=(9, 7),
        integrated_only=False,
        layout="channels_last",
        mixed=None,
    ):
        def draw(*shape, scale=1.0):
            return (torch.randn(shape, dtype=torch.float64) * scale).to(device, dtype)

        if first:
            self.x = [LAYOUTS[layout](draw(n, 1 + i, *size)) for i in range(streams)]
            inputs = [1 + i for i in range(streams)]
        else:
            images = [LAYOUTS[layout](draw(n, channels, *size)) for _ in range(streams + 1)]
            self.x = torch.stack(images) if layout == "nchw" else _packed(images)
            inputs = [channels] * streams
        self.weights = [draw(out, c, kernel, kernel, scale=0.3) for c in inputs]
        self.mix = [draw(mixed or out, out, scale=0.4) for _ in inputs]
        self.previous = None if first else draw(mixed or out, channels, scale=0.4)
        self.options = {
            "stride": stride,
            "padding": kernel // 2,
            "integrated_only": integrated_only,
        }
        with torch.no_grad():
            self.dy = torch.randn_like(self.call(eager))

    def tensors(self):
        images = [self.x] if isinstance(self.x, torch.Tensor) else self.x
        others = [] if self.previous is None else [self.previous]
        return [*images, *self.weights, *self.mix, *others]

    def call(self, function, tensors=None):
        tensors = self.tensors() if tensors is None else tensors
        count = len(self.weights)
        images = 1 if isinstance(self.x, torch.Tensor) else count
        x = tensors[0] if isinstance(self.x, torch.Tensor) else tensors[:images]
        weights, mix = tensors[images : images + count], tensors[images + count :][:count]
        previous = tensors[images + 2 * count] if self.previous is not None else None
        return function(x, list(weights), list(mix), previous, **self.options)

    def results(self, function, dtype=None, change=lambda t: t):
        tensors = [change(t.detach().to(dtype or t.dtype)) for t in self.tensors()]
        tensors = [t.requires_grad_() for t in tensors]
        y = self.call(function, tensors)
        return [y.detach(), *torch.autograd.grad(y, tensors, change(self.dy.to(y.dtype)))]

    def check(self):
        """Every implementation by the accuracy rule, in output and gradients."""
        torchs, right = self.results(eager), self.results(eager, torch.float64)
        # All results are sums of products, so absolute values give the sums of |terms|.
        terms = self.results(eager, torch.float64, torch.abs)
        (record, *_) = fusewise.explain(self.call, li_conv)
        for name in record.able:
            with fusewise.implementation(li_conv=name, li_conv_backward=name):
                ours = self.results(li_conv)
            for i, (found, theirs, value, sums) in enumerate(
                zip(ours, torchs, right, terms, strict=True)
            ):
                assert found.dtype == theirs.dtype and found.shape == theirs.shape
                given = (None, *self.tensors())[i]
                if given is not None and given.is_contiguous():
                    assert found.is_contiguous() or found.dim() >= 4
                size = scale(largest(value), largest(sums), 0.0, found.dtype)
                check = compare(f"{name} {i}", found, theirs, value, size)
                assert check.passed, str(check)


def _packed(images):
    """[S + 1, N, C, H, W], channels-last."""
    return torch.stack([image.movedim(1, -1) for image in images]).movedim(-1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["first", "packed"])
@pytest.mark.parametrize("integrated_only", [True, False], ids=["integrated", "all"])
def test_accuracy(device, dtype, first, integrated_only):
    for stride in (1, 2):
        Case(device, dtype, first=first, stride=stride, integrated_only=integrated_only).check()


@pytest.mark.parametrize(
    "options",
    [
        {"streams": 1},
        {"streams": 5, "channels": 3, "out": 65},
        {"first": True, "kernel": 7, "stride": 2, "size": (20, 33)},
        {"kernel": 1, "stride": 2},
        {"kernel": 1},
        {"stride": 3, "size": (1, 1)},
        {"n": 1, "size": (1, 8)},
        {"mixed": 4, "integrated_only": True},
        {"n": 3, "channels": 33, "out": 17, "size": (31, 30)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes(device, dtype, options):
    if dtype == torch.bfloat16 and options.get("size") == (1, 1):
        pytest.skip("torch leaves gradients of taps in the padding unwritten")  # see below
    Case(device, dtype, **options).check()


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (1, 2), (9, 1), (2, 2), (17, 3)], ids=str)
@pytest.mark.parametrize("stride", [2, 3])
@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
def test_narrow_images(device, size, stride):
    """Some taps read nothing but padding. oneDNN leaves their gradients unwritten in bf16, and on
    CPUs with AMX also results of one column. So torch's own result is no yardstick here."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kernel in (3, 5):
            case = Case(device, dtype, kernel=kernel, stride=stride, size=size, streams=1)
            garbage = [torch.full_like(w, 1e4) for w in case.weights * 20]
            del garbage
            right = case.results(eager, torch.float64)
            for found, value in zip(case.results(li_conv), right, strict=True):
                tolerance = 8 * torch.finfo(dtype).eps * largest(value)
                torch.testing.assert_close(found.double(), value, rtol=0, atol=tolerance)


@pytest.mark.parametrize("layout", ["nchw", "sliced", "channel_slice", "transposed", "misaligned"])
def test_layouts(device, layout):
    for first in (True, False):
        case = Case(device, first=first, layout=layout)
        case.check()
        case.dy = case.dy.movedim(-3, -1).contiguous().movedim(-1, -3)
        case.check()
        case.dy = case.dy[..., :1, :1].expand_as(case.dy)
        case.check()


def test_strides_of_packed_tensors(device):
    """Any strides of x give the right answer; the results are channels-last."""
    case = Case(device)
    wide = torch.stack([case.x, case.x], 2).flatten(2, 3)  # twice the channels
    for x in (
        wide[:, :, 5:],
        case.x.mT.contiguous().mT,
        case.x.flip(0),
        case.x[:, :1].expand(4, 2, -1, -1, -1),
    ):
        case.x = x
        case.check()
        y = case.call(li_conv)
        assert y.movedim(-3, -1).is_contiguous()
    with torch.no_grad():
        case.weights = [w.mT.contiguous().mT for w in case.weights]
        case.mix = [w.mT.contiguous().mT for w in case.mix]
    case.check()


def test_gradcheck():
    for options in ({"first": True}, {"stride": 2}, {"integrated_only": True}):
        case = Case(dtype=torch.float64, streams=2, n=1, channels=2, out=2, size=(3, 4), **options)
        tensors = [t.requires_grad_() for t in case.tensors()]

        def call(*tensors, case=case):
            return case.call(li_conv, tensors)

        assert torch.autograd.gradcheck(call, tensors)
        assert torch.autograd.gradgradcheck(call, tensors)


@pytest.mark.parametrize("first", [True, False])
def test_opcheck(device, first):
    case = Case(device, first=first)
    x = case.x if first else [case.x]
    arguments = (x, case.weights, case.mix, case.previous, 1, 1)
    settings = (False, True, False)
    for packed in (True, False):
        torch.library.opcheck(forward_op, (*arguments, packed, *settings, ""))
    needs = [1] * (len(x) + 2 * len(case.weights)) + [0 if first else 1]
    y, *_ = forward_op(*arguments, True, *settings, "")
    torch.library.opcheck(backward_op, (case.dy, y, None, *arguments, True, needs, *settings, ""))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(li_conv, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (2, 3):
        for first in (True, False):
            case = Case(device, n=n, first=first, stride=2)
            for ours, right in zip(case.results(compiled), case.results(li_conv), strict=True):
                assert same_bits(ours, right) and ours.stride() == right.stride()


def test_autocast(device):
    """The convolutions' dtype; gradients come back in the parameters' own."""
    case = Case(device)
    with torch.autocast(device, torch.bfloat16):
        found = case.results(li_conv)
    assert found[0].dtype == torch.bfloat16
    assert all(t.dtype == torch.float32 for t in found[1:])
    right = case.results(eager)
    for t, value in zip(found, right, strict=True):
        assert (t.double() - value.double()).norm() < 0.02 * value.double().norm()
    double = Case(device, torch.float64)
    with torch.autocast(device, torch.bfloat16):
        assert double.call(li_conv).dtype == torch.float64


@torch.backends.cudnn.flags(enabled=True, deterministic=True)
def test_float32_weights_beside_half_images(device):
    """They are cast once, and their gradients are those of weights in half precision."""
    case = Case(device, torch.bfloat16)
    right = case.results(li_conv)
    case.weights, case.mix = ([w.float() for w in t] for t in (case.weights, case.mix))
    case.previous = case.previous.float()
    dense = case.weights
    for weights in (dense, [torch.stack([w, w], -1)[..., 0] for w in dense]):
        case.weights = weights
        for ours, expected in zip(case.results(li_conv), right, strict=True):
            assert same_bits(ours, expected.to(ours.dtype))


def test_only_what_is_wanted(device):
    """Each gradient alone is that of all together."""
    case = Case(device, stride=2)
    right = case.results(li_conv)[1:]
    for i, expected in enumerate(right):
        tensors = [t.detach().requires_grad_(j == i) for j, t in enumerate(case.tensors())]
        (found,) = torch.autograd.grad(case.call(li_conv, tensors), tensors[i], case.dy)
        assert same_bits(found, expected)
    y = case.call(li_conv, [t.detach() for t in case.tensors()])
    assert not y.requires_grad


def test_no_samples(device):
    for first in (True, False):
        case = Case(device, n=0, first=first)
        y, *gradients = case.results(li_conv)
        assert y.shape == case.dy.shape
        assert all(t.isfinite().all() and not t.any() for t in gradients)


def test_nan_stays_in_its_sample(device):
    case = Case(device)
    right = case.call(li_conv)
    case.x[1, 0, 2, 4, 3] = float("nan")
    y = case.call(li_conv)
    assert y[1, 0].isnan().any() and y[-1, 0].isnan().any()
    assert same_bits(y[:, 1], right[:, 1]) and same_bits(y[[0, 2], 0], right[[0, 2], 0])


def test_transforms(device):
    """torch.func and forward-mode AD see the formula; a forced implementation is refused there."""
    case = Case(device, torch.float64, streams=2)
    tensors = case.tensors()

    def call(*tensors):
        return case.call(li_conv, tensors)

    directions = tuple(torch.randn_like(t) for t in tensors)
    _, found = torch.func.jvp(call, tuple(tensors), directions)
    _, right = torch.func.jvp(lambda *t: case.call(eager, t), tuple(tensors), directions)
    torch.testing.assert_close(found, right)
    several = torch.stack([tensors[0], 2 * tensors[0]])
    mapped = torch.func.vmap(lambda x: call(x, *tensors[1:]))(several)
    torch.testing.assert_close(mapped[1], call(several[1], *tensors[1:]))
    with fusewise.implementation(li_conv="portable"), pytest.raises(RuntimeError, match="forced"):
        torch.func.jvp(call, tuple(tensors), directions)


def test_checkpointing_and_saved_tensors(device):
    case = Case(device, stride=2)
    right = case.results(li_conv)

    def recomputed(*arguments, **options):
        return checkpoint(li_conv, *arguments, use_reentrant=False, **options)

    for found, expected in zip(case.results(recomputed), right, strict=True):
        assert same_bits(found, expected)
    saved = []

    def pack(t):
        saved.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for found, expected in zip(case.results(li_conv), right, strict=True):
            assert same_bits(found, expected)
    # The inputs and the result: what torch keeps for its convolutions.
    assert len(saved) == len(case.tensors()) + 1


def test_torch_entry(device):
    case = Case(device)
    with fusewise.implementation("torch"):
        found = case.results(li_conv)
        (record, *_) = fusewise.explain(case.call, li_conv)
    assert record.chosen == "torch"
    for ours, right in zip(found, case.results(eager), strict=True):
        torch.testing.assert_close(ours, right)


def test_explain(device):
    case = Case(device)
    case.weights[0].requires_grad_()
    forward, backward = fusewise.explain(case.call, li_conv)
    assert (forward.operator, forward.direction) == ("li_conv", "forward")
    assert (backward.operator, backward.direction) == ("li_conv", "backward")
    assert forward.chosen == forward.able[0]


def test_repeated_runs_are_bit_identical(device):
    case = Case(device, channels=17, out=33, size=(20, 20))
    for first, second in zip(case.results(li_conv), case.results(li_conv), strict=True):
        assert same_bits(first, second)
