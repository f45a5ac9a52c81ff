"""What bad input gets from BatchNorm + activation + Squeeze-and-Excitation: an error that names the
argument, on every way, and nothing is changed."""

import pytest
import torch

import fusewise
from fusewise.functional import batch_norm_excite
from reference import same_bits

NAMES = ("x", "running_mean", "running_var", "weight", "bias", "w1", "b1", "w2", "b2")


def arguments(device="cpu", **changes):
    """A right call with some changes."""

    def new(*shape):
        return torch.rand(shape, device=device) + 0.5

    made = {
        "x": new(2, 6, 4, 5),
        **{name: new(6) for name in NAMES[1:5]},
        "w1": new(3, 6),
        "b1": new(3),
        "w2": new(6, 3),
        "b2": new(6),
        "training": True,
        "num_batches_tracked": torch.tensor(2, device=device),
    }
    return made | changes


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ways(named):
    """Every way to make a call: plain, with gradients, by torch's own operators, under a
    transform, with tensors without data."""

    def learned(t):
        floating = isinstance(t, torch.Tensor) and t.is_floating_point()
        return t.detach().requires_grad_() if floating else t

    inputs = {n: learned(t) if n not in NAMES[1:3] else t for n, t in named.items()}
    meta = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in named.items()}

    def forced():
        with fusewise.implementation("torch"):
            batch_norm_excite(**named)

    return {
        "plain": lambda: batch_norm_excite(**named),
        "gradient": lambda: batch_norm_excite(**inputs),
        "torch": forced,
        "vmap": lambda: torch.func.vmap(lambda _: batch_norm_excite(**named))(torch.zeros(2)),
        "meta": lambda: batch_norm_excite(**meta),
    }


ACTIVATIONS = "'identity', 'relu', 'relu6', 'silu' or 'hardswish'"
IMAGE = "x: expected [N, C, H, W]"
WRONG = {
    f"{IMAGE}, got [2, 6]": {"x": zeros(2, 6)},
    f"{IMAGE}, got [1, 2, 6, 4, 5]": {"x": zeros(1, 2, 6, 4, 5)},
    f"{IMAGE} with C, H and W >= 1, got [2, 0, 4, 5]": {"x": zeros(2, 0, 4, 5)},
    f"{IMAGE} with C, H and W >= 1, got [2, 6, 4, 0]": {"x": zeros(2, 6, 4, 0)},
    "x: expected a floating dtype, got int64": {"x": zeros(2, 6, 4, 5, dtype=torch.int64)},
    "w2: expected a floating dtype, got complex64": {"w2": zeros(6, 3, dtype=torch.complex64)},
    "running_mean: expected [6], got [5]": {"running_mean": zeros(5)},
    "running_var: expected [6], got [6, 1]": {"running_var": zeros(6, 1)},
    "running_var: expected running_mean's dtype float32, got float64": {
        "running_var": zeros(6, dtype=torch.float64)
    },
    "running_mean: expected x's dtype float32, got float16": {
        "running_mean": zeros(6, dtype=torch.float16)
    },
    "running_mean: expected x's dtype bfloat16, or float32, got float64": {
        "x": zeros(2, 6, 4, 5, dtype=torch.bfloat16),
        "running_mean": zeros(6, dtype=torch.float64),
    },
    "weight: expected [6], got [4]": {"weight": zeros(4)},
    "bias: expected running_mean's dtype float32, got bfloat16": {
        "bias": zeros(6, dtype=torch.bfloat16)
    },
    "w1: expected [R, 6] or [R, 6, 1, 1], got [3, 5]": {"w1": zeros(3, 5)},
    "w1: expected [R, 6] or [R, 6, 1, 1], got [3, 6, 1]": {"w1": zeros(3, 6, 1)},
    "w1: expected [R, 6] or [R, 6, 1, 1] with R >= 1, got [0, 6]": {"w1": zeros(0, 6)},
    "b1: expected [3], got [4]": {"b1": zeros(4)},
    "w2: expected [6, 3] or [6, 3, 1, 1], got [3, 6]": {"w2": zeros(3, 6)},
    "w2: expected running_mean's dtype float32, got float64": {
        "w2": zeros(6, 3, dtype=torch.float64)
    },
    "b2: expected [6], got [3]": {"b2": zeros(3)},
    "num_batches_tracked: expected dtype int64, got int32": {
        "num_batches_tracked": zeros(dtype=torch.int32)
    },
    "num_batches_tracked: expected a scalar, got [1]": {
        "num_batches_tracked": zeros(1, dtype=torch.int64)
    },
    f"activation: expected {ACTIVATIONS}, got 'gelu'": {"activation": "gelu"},
    "hidden_activation: expected 'silu', 'relu' or 'hardswish', got 'relu6'": {
        "hidden_activation": "relu6"
    },
    "gate: expected 'sigmoid' or 'hardsigmoid', got 'tanh'": {"gate": "tanh"},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_change_nothing(device, message):
    changes = {
        n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in WRONG[message].items()
    }
    named = arguments(device, **changes)
    before = {n: t.clone() for n, t in named.items() if isinstance(t, torch.Tensor)}
    for way, call in ways(named).items():
        with pytest.raises(RuntimeError) as raised:
            call()
        assert str(raised.value) == message, way
    assert all(same_bits(named[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    "message, changes",
    [
        ("running_mean and running_var: expected both or none", {"running_var": None}),
        (
            "num_batches_tracked: expected a tensor where momentum is None, got none",
            {"momentum": None, "num_batches_tracked": None},
        ),
        ("eps: expected a number that is not negative, got -0.5", {"eps": -0.5}),
    ],
)
def test_statistics_that_do_not_fit(device, message, changes):
    """A tracer, which has no data, does not see these."""
    named = arguments(device, **changes)
    before = named["running_mean"].clone()
    for way, call in ways(named).items():
        if way != "meta":
            with pytest.raises(RuntimeError) as raised:
                call()
            assert str(raised.value) == message, way
    assert same_bits(named["running_mean"], before)


def test_one_value_per_channel(device):
    named = arguments(device, x=torch.ones(1, 6, 1, 1, device=device))
    message = "^Expected more than 1 value per channel when training, got input size"
    for call in ways(named).values():
        with pytest.raises(ValueError, match=message):
            call()
    batch_norm_excite(**named | {"training": False})
    without = {"training": False, "running_mean": None, "running_var": None}
    with pytest.raises(ValueError, match=message):
        batch_norm_excite(**named | without)


@pytest.mark.parametrize("name", [*NAMES, "num_batches_tracked"])
def test_mixed_devices(device, name):
    """A tensor on another device is blamed, or that which follows it."""
    named = arguments(device)
    named[name] = named[name].to("meta")
    with pytest.raises(RuntimeError, match=r"^\w+: expected a tensor on \w+.*got one on"):
        batch_norm_excite(**named)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "name, value, message",
    [
        ("x", None, "x: expected a tensor, got None"),
        ("x", 1.0, "x: expected a tensor, got float"),
        ("w1", None, "w1: expected a tensor, got None"),
        ("b2", 2, "b2: expected a tensor or None, got int"),
        ("running_var", "a", "running_var: expected a tensor or None, got str"),
        ("num_batches_tracked", 3, "num_batches_tracked: expected a tensor or None, got int"),
    ],
)
def test_an_argument_of_another_kind(name, value, message, training):
    for gradient in (True, False):
        named = arguments(**{"training": training, name: value})
        if gradient:
            named["w2"].requires_grad_()
        with pytest.raises(TypeError) as raised:
            batch_norm_excite(**named)
        assert str(raised.value) == message


def test_a_word_of_another_kind():
    with pytest.raises(TypeError, match="^gate: expected 'sigmoid' or 'hardsigmoid', got 3"):
        batch_norm_excite(**arguments(gate=3))


def test_gradient_of_the_wrong_size(device):
    """Autograd refuses most; the operator itself must hold too."""
    named = arguments(device)
    tensors, words = [named[name] for name in NAMES], ("silu", "silu", "sigmoid", True)
    forward = torch.ops.fusewise._batch_norm_excite
    y, saved = forward(*tensors, None, *words, 0.1, 1e-5, True, "")
    x, _, _, weight, bias, w1, _, w2, _ = tensors
    rest = (x, weight, bias, w1, w2, saved, *words, 0b111111001, "")
    backward = torch.ops.fusewise._batch_norm_excite_backward
    assert len(backward(y, *rest)) == 7
    for needed in (1 << 1, 1 << 9, -1):
        with pytest.raises(RuntimeError, match="expected no gradient to be needed, got one"):
            backward(y, *rest[:-2], needed, "")
    for dy in (y[:, :, :3], y.double()):
        with pytest.raises(RuntimeError, match="^dy: expected"):
            backward(dy, *rest)
    with pytest.raises(RuntimeError, match="^saved: expected"):
        backward(y, *rest[:5], saved[:-1], *rest[6:])


@pytest.mark.parametrize("name", NAMES[1:3])
@pytest.mark.parametrize("training", [True, False])
def test_a_statistic_that_needs_a_gradient(device, name, training):
    named = arguments(device, training=training)
    named[name].requires_grad_()
    before = named["running_mean"].clone()
    with pytest.raises(RuntimeError, match=f"^{name}: expected a tensor that needs no gradient"):
        batch_norm_excite(**named)
    assert same_bits(named["running_mean"], before)
    with torch.no_grad():
        batch_norm_excite(**named | {"training": False})


@pytest.mark.parametrize("name", ["x", "running_var", "w2"])
def test_freed_memory(device, name):
    """As of a parameter that FSDP has sharded again. A view of it still has a pointer."""
    named = arguments(device)
    whole = torch.cat([named[name].flatten()] * 2)
    named[name] = whole[named[name].numel() :].view(named[name].shape)
    whole.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"^{name}: expected a tensor with memory"):
        batch_norm_excite(**named)


def test_nested_and_sparse_tensors():
    named = arguments()
    with pytest.raises(RuntimeError, match="^x: expected a dense tensor, got a sparse_coo one"):
        batch_norm_excite(**named | {"x": named["x"].to_sparse(), "training": False})
