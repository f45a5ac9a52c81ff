"""What tracers are told of every operator's results: sizes, strides and dtypes of the real ones."""

import pytest
import torch

import autoencoder_reference
import linear_reference
import reference
from fusewise import _ops
from linear_reference import MATH


def expect_as_told(operator, *arguments):
    """The fake's results against the real ones'."""
    real = _tensors(operator(*arguments))
    told = _tensors(operator(*_to_meta(arguments)))
    assert len(told) == len(real)
    for i, (fake, found) in enumerate(zip(told, real, strict=True)):
        assert fake.shape == found.shape, i
        assert fake.dtype == found.dtype, i
        assert _strides(fake) == _strides(found), i


def _strides(t):
    """Those that are ever taken."""
    sizes = zip(t.shape, t.stride(), strict=True)
    return [stride for size, stride in sizes if size > 1] if t.numel() else []


def _to_meta(value):
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_to_meta(each) for each in value] if isinstance(value, (list, tuple)) else value


def _tensors(results):
    flat = []
    for each in results:
        flat += each if isinstance(each, (list, tuple)) else [each]
    return flat


# Those at which bits fill whole bytes, and their neighbours.
SIZES = [1, 7, 8, 9, 15, 16, 17]
LAYOUTS = ["contiguous", "transposed", "row_slice", "stepped"]


@pytest.mark.parametrize("activation", linear_reference.ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", SIZES)
def test_linear_act(device, activation, layout, n):
    case = linear_reference.make_case((3, 2), 5, n, device, w_layout=layout, layout=layout)
    for save in (False, True):
        expect_as_told(_ops.LINEAR_ACT.forward, *case.inputs, activation, *MATH, save, "")
    _, saved = _ops.LINEAR_ACT.forward(*case.inputs, activation, *MATH, True, "")
    for needed in (0b111, 0b001, 0b010):
        backward = (case.dy, case.x, case.w, saved, activation, *MATH, needed, "")
        expect_as_told(_ops.LINEAR_ACT.backward, *backward)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("final", ["identity", "relu", "gelu"])
@pytest.mark.parametrize("n", [7, 8, 16])
def test_mlp(device, layout, final, n):
    case = linear_reference.make_mlp_case((3, 2), [5, n, 16, n], device, layout=layout)
    weights = [linear_reference.LAYOUTS[layout](w) for w in case.w]
    for kind in ("relu", "silu"):
        for save in (False, True):
            expect_as_told(_ops.mlp, case.x, weights, case.b, kind, final, save, *MATH, "")
        _, saved = _ops.mlp(case.x, weights, case.b, kind, final, True, *MATH, "")
        for needs in ([1] * 6, [0, 1, 0, 1, 0, 1]):
            backward = (case.dy, case.x, weights, saved, kind, final, True, needs, *MATH, "")
            expect_as_told(_ops.mlp_backward, *backward)


@pytest.mark.parametrize("layout", ["nchw", "channels_last", "sliced", "transposed"])
@pytest.mark.parametrize("dtypes", ["fp32", "fp64", "bf16-fp32"])
def test_squeeze_excite(device, layout, dtypes):
    case = reference.make_case((2, 8, 3, 4), 5, device, reference.DTYPES[dtypes], layout)
    w1, w2 = case.w1.T.contiguous().T, case.w2.T.contiguous().T  # as nobody keeps them
    inputs = (case.x, w1, case.b1, w2, case.b2, "silu", "sigmoid")
    for save in (False, True):
        expect_as_told(_ops.SQUEEZE_EXCITE.forward, *inputs, save, "")
    _, saved = _ops.SQUEEZE_EXCITE.forward(*inputs, True, "")
    for needed in (0b11111, 0b01010):
        backward = (case.dy, case.x, w1, w2, saved, "silu", "sigmoid", needed, "")
        expect_as_told(_ops.SQUEEZE_EXCITE.backward, *backward)


@pytest.mark.parametrize("layout", ["rows", "frames", "spectrogram", "columns"])
@pytest.mark.parametrize("output", autoencoder_reference.OUTPUTS)
@pytest.mark.parametrize("dtypes", ["fp32", "fp64", "bf16-fp32"])
def test_autoencoder(device, layout, output, dtypes):
    sizes, dtypes = autoencoder_reference.SMALL, reference.DTYPES[dtypes]
    case = autoencoder_reference.make_case(8, sizes, device, dtypes, layout, output=output)
    weights = [w.mT.contiguous().mT if w.dim() == 2 else w for w in case.weights]
    for save in (False, True):
        expect_as_told(_ops.AUTOENCODER.forward, case.x, *weights, output, False, save, "")
    _, projection = _ops.AUTOENCODER.forward(case.x, *weights, output, False, True, "")
    for needed in ((1 << 12) - 1, 0b10, 0b100000100001):
        backward = (case.gradient, case.x, *weights, projection, output, False, needed, "")
        expect_as_told(_ops.AUTOENCODER.backward, *backward)
