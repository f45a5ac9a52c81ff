"""NaN of any bits in float32 weights beside half data: what comes out is NaN, whatever rounding to
the half type would make of its bits."""

import pytest
import torch

import autoencoder_reference
import reference
from fusewise.models._autoencoder import autoencoder

# All bits set, of either sign: rounding up would carry into the sign, and give zero.
PAYLOADS = pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001], ids=hex)
HALF = pytest.mark.parametrize("dtypes", ["bf16-fp32", "fp16-fp32"])


def poison(tensor, index, bits):
    tensor.view(torch.int32)[index] = bits
    assert tensor[index].isnan()


@PAYLOADS
@HALF
@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_squeeze_excite(device, bits, dtypes, layout):
    case = reference.make_case((2, 19, 3, 3), 4, device, reference.DTYPES[dtypes], layout)
    poison(case.b2, 17, bits)
    case.check_every_implementation()
    y = reference.squeeze_excite(*case.arguments)
    assert y[:, 17].isnan().all()
    assert not y[:, :17].isnan().any()


@PAYLOADS
@HALF
def test_autoencoder(device, bits, dtypes):
    sizes, dtypes = autoencoder_reference.SMALL, reference.DTYPES[dtypes]
    case = autoencoder_reference.make_case(21, sizes, device, dtypes)
    poison(case.weights[-1], 3, bits)  # the decoder's bias
    case.check_every_implementation()
    y = autoencoder(*case.inputs).view(21, sizes["frames"], sizes["n_mels"])
    assert y[:, :, 3].isnan().all()
    assert not y[:, :, :3].isnan().any()
