"""WAV files of every width to the last bit, the extensible form, mel bands, and ties in the AUC."""

import math
import struct
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "machine_sound"
if not FOLDER.is_dir():
    pytest.skip("there are no examples here", allow_module_level=True)
pytest.importorskip("safetensors")
sys.path.insert(0, str(FOLDER))

from machine_sound import auc  # noqa: E402
from sound import WINDOW, SoundError, mel_filters, read_wav  # noqa: E402

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE


def wav(path, data, bits, kind=PCM, channels=1, extension=b""):
    width = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, 16000, 16000 * width, width, bits) + extension
    body = b"WAVE" + struct.pack("<4sI", b"fmt ", len(form)) + form
    body += struct.pack("<4sI", b"data", len(data)) + data
    path.write_bytes(struct.pack("<4sI", b"RIFF", len(body)) + body)
    return path


def extension(kind, bits):
    """The extensible form's: size, valid bits, speakers, and a GUID that begins with the kind."""
    guid = struct.pack("<H", kind) + bytes.fromhex("000000001000800000aa00389b71")
    return struct.pack("<HHI", 22, bits, 4) + guid


def packed(values, bits):
    return b"".join(value.to_bytes(bits // 8, "little", signed=True) for value in values)


@pytest.mark.parametrize("bits", [16, 24])
def test_every_bit_of_a_sample_counts(tmp_path, bits):
    """Each bit alone, with either sign, and the ends of the range."""
    top = 1 << bits - 1
    values = [0, 1, -1, top - 1, -top, *(1 << i for i in range(bits - 1))]
    values += [-(1 << i) for i in range(bits)]
    samples, rate = read_wav(wav(tmp_path / "a.wav", packed(values, bits), bits))
    assert rate == 16000
    assert samples.tolist() == [value / top for value in values]


@pytest.mark.parametrize("bits", [16, 24, 32])
def test_the_extensible_form_of_integers(tmp_path, bits):
    top = 1 << bits - 1
    values = [0, top // 2, -top // 2, -top, 3 * top // 4]
    data = packed(values, bits)
    path = wav(tmp_path / "a.wav", data, bits, EXTENSIBLE, extension=extension(PCM, bits))
    assert read_wav(path)[0].tolist() == [0, 0.5, -0.5, -1, 0.75]


def test_the_extensible_form_of_floats_in_two_channels(tmp_path):
    data = struct.pack("<4f", 0.25, 0.75, -0.5, 0)
    path = wav(tmp_path / "a.wav", data, 32, EXTENSIBLE, 2, extension(FLOAT, 32))
    assert read_wav(path)[0].tolist() == [0.5, -0.25]


@pytest.mark.parametrize("kind, cut", [(PCM, 2), (PCM, 8), (6, 24)])
def test_an_extensible_form_that_says_nothing_we_know(tmp_path, kind, cut):
    """Cut off before the real format, or with another one (6: A-law)."""
    told = extension(kind, 16)[:cut]
    path = wav(tmp_path / "a.wav", packed([0], 16), 16, EXTENSIBLE, extension=told)
    with pytest.raises(SoundError, match=r"a.wav: format (65534|6) with 16 bits, expected PCM"):
        read_wav(path)


def test_mel_bands_reach_up_to_half_the_rate():
    """Their peaks lie equally far apart on the mel scale, within a step of the spectrum."""
    rate, bands = 16000, 20
    filters = mel_filters(rate, bands)
    assert filters.shape == (WINDOW // 2 + 1, bands)
    top = 2595 * math.log10(1 + rate / 2 / 700)
    for band in range(bands):
        centre = 700 * (10 ** (top * (band + 1) / (bands + 1) / 2595) - 1)
        assert abs(filters[:, band].argmax().item() * rate / WINDOW - centre) <= rate / WINDOW


@pytest.mark.parametrize(
    "normal, anomalous, area",
    [
        ([1.0, 2.0], [3.0, 4.0], 1),
        ([3.0, 4.0], [1.0, 2.0], 0),
        ([1.0, 1.0], [1.0, 1.0], 0.5),  # a tie is half a hit
        ([1.0, 2.0], [2.0, 3.0], 0.875),
        ([1.0, 2.0, 2.0], [2.0], 2 / 3),
    ],
)
def test_the_area_counts_ties_by_half(normal, anomalous, area):
    assert auc(torch.tensor(normal), torch.tensor(anomalous)) == pytest.approx(area)
