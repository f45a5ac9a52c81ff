"""Backward after hooks on saved tensors that give back the same values with other strides."""

import pytest
import torch

import autoencoder_reference
import linear_reference
import reference


def stepped(t):
    """Every other element of a wider tensor; nothing in it is adjacent."""
    room = t.new_empty(*(2 * size + 1 for size in t.shape))
    return room[tuple(slice(1, 2 * size, 2) for size in t.shape)].copy_(t)


def column_major(t):
    dims = range(t.dim())
    return t.permute(*reversed(dims)).contiguous().permute(*reversed(dims))


def sliced(t):
    """Rows as they were, further apart."""
    return torch.cat([t, t], -1)[..., t.shape[-1] :] if t.dim() else t


STRIDED = pytest.mark.parametrize("strided", [stepped, column_major, sliced])


class Unpack:
    """A hook that gives tensors back strided, and remembers them."""

    def __init__(self, strided):
        self.strided = strided
        self.seen = []

    def __call__(self, tensor):
        self.seen.append(self.strided(tensor))
        return self.seen[-1]

    def expect_strided(self):
        assert any(not tensor.is_contiguous() for tensor in self.seen)


def expect_right(case, strided):
    """By the rule, and every saved tensor came through the hooks."""
    unpack = Unpack(strided)
    case.expected()  # eager's, without hooks
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        case.check()
    unpack.expect_strided()


@STRIDED
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
@pytest.mark.parametrize("dtypes", ["fp32", "bf16-fp32"])
def test_squeeze_excite(device, strided, layout, dtypes):
    dtypes = reference.DTYPES[dtypes]
    expect_right(reference.make_case((3, 5, 4, 6), 3, device, dtypes, layout), strided)


@STRIDED
@pytest.mark.parametrize("activation", ["relu", "gelu", "identity"])
def test_linear_act(device, strided, activation):
    case = linear_reference.make_case((7,), 5, 19, device, activation=activation)
    eager = case.expected()
    unpack = Unpack(strided)
    found, _ = linear_reference.recorded(case, unpack=unpack)
    reference.assert_right(case.results(found, ()), eager)
    unpack.expect_strided()


@STRIDED
@pytest.mark.parametrize("output", autoencoder_reference.OUTPUTS)
def test_autoencoder(device, strided, output):
    sizes = autoencoder_reference.SMALL
    expect_right(autoencoder_reference.make_case(7, sizes, device, output=output), strided)
