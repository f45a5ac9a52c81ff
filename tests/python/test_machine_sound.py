"""The example of examples/machine_sound: what it finds, and what files it refuses."""

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

import machine  # noqa: E402
import machine_sound  # noqa: E402
from sound import HOP, WINDOW, SoundError, mel_filters, read_wav, rows, write_wav  # noqa: E402


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run; returns its AUC and where it wrote."""
    out = tmp_path_factory.mktemp("machine_sound")
    arguments = ["--files", "16", "--seconds", "2", "--epochs", "20", "--out", str(out)]
    return machine_sound.main(arguments), out


def test_faults_are_found(trained):
    area, out = trained
    assert area > 0.9
    assert (out / "model.safetensors").is_file()
    assert (out / "scores.png").is_file()


def test_live_scores_a_long_file(trained, tmp_path, capsys):
    generator = torch.Generator().manual_seed(7)
    parts = [machine.machine(2, generator), machine.machine(2, generator, "bearing")]
    write_wav(tmp_path / "long.wav", torch.cat(parts), machine.RATE)
    weights = trained[1] / "model.safetensors"
    machine_sound.main(["--live", str(tmp_path / "long.wav"), "--weights", str(weights)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [float(line[0]) for line in lines] == [0, 1, 2, 3]
    scores = [float(line[2]) for line in lines]
    assert max(scores[:2]) < min(scores[2:])


def folders(path, **changes):
    """The layout of the public sets, a few short files in each folder."""
    generator = torch.Generator().manual_seed(3)
    for folder, fault in (("train/normal", None), ("test/normal", None), ("test/anomaly", "leak")):
        (path / folder).mkdir(parents=True)
        for i in range(3):
            samples = machine.machine(1, generator, fault)
            write_wav(path / folder / f"{i}.wav", samples, changes.get(folder, machine.RATE))
    return path


def test_a_folder_of_files(tmp_path, capsys):
    data = folders(tmp_path / "data")
    arguments = ["--data", str(data), "--epochs", "2", "--out", str(tmp_path)]
    assert 0 <= machine_sound.main(arguments) <= 1
    assert "3 files to train with, 6 to test" in capsys.readouterr().out


def test_files_of_two_rates_are_refused(tmp_path):
    data = folders(tmp_path, **{"test/anomaly": 8000})
    with pytest.raises(SystemExit, match="0.wav: has 8000 Hz, expected 16000 as the files before"):
        machine_sound.main(["--data", str(data), "--epochs", "1"])


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(SystemExit, match="train/normal: has no .wav file"):
        machine_sound.main(["--data", str(tmp_path)])


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--live", "x.wav"], "--live needs --weights"),
        (["--epochs", "0"], "expected at least 1, got 0"),
        (["--seconds", "0.1"], "--seconds takes at least 0.5"),
    ],
)
def test_bad_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit):
        machine_sound.main(arguments)
    assert said in capsys.readouterr().err


def test_weights_of_another_kind(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"nonsense")
    write_wav(tmp_path / "a.wav", torch.zeros(16000), 16000)
    with pytest.raises(SystemExit, match="w.safetensors: is not what this program wrote"):
        machine_sound.main(
            ["--live", str(tmp_path / "a.wav"), "--weights", str(tmp_path / "w.safetensors")]
        )


# --- WAV ---------------------------------------------------------------------------------------


def wav(data, kind=1, channels=1, rate=16000, bits=16, told=None, extra=b""):
    width = channels * bits // 8
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits)
    body = b"WAVE" + extra + struct.pack("<4sI", b"fmt ", len(form)) + form
    body += struct.pack("<4sI", b"data", len(data) if told is None else told) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body


@pytest.fixture
def read(tmp_path):
    def read(content, rate=None):
        (tmp_path / "a.wav").write_bytes(content)
        return read_wav(tmp_path / "a.wav", rate)

    return read


@pytest.mark.parametrize(
    "bits, kind, values",
    [
        (8, 1, bytes([128, 192, 64, 0])),
        (16, 1, struct.pack("<4h", 0, 16384, -16384, -32768)),
        (24, 1, b"\0\0\0" + b"\0\0\x40" + b"\0\0\xc0" + b"\0\0\x80"),
        (32, 1, struct.pack("<4i", 0, 2**30, -(2**30), -(2**31))),
        (32, 3, struct.pack("<4f", 0, 0.5, -0.5, -1)),
    ],
)
def test_every_format(read, bits, kind, values):
    samples, rate = read(wav(values, kind, bits=bits))
    assert rate == 16000 and samples.tolist() == [0, 0.5, -0.5, -1]
    odd = struct.pack("<4sI", b"LIST", 3) + b"abc\0"  # chunks before, padded to even lengths
    assert torch.equal(read(wav(values, kind, bits=bits, extra=odd))[0], samples)


def test_channels_are_averaged(read):
    samples, _ = read(wav(struct.pack("<4h", 16384, 0, -16384, -16384), channels=2))
    assert samples.tolist() == [0.25, -0.5]


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "is no WAV file"),
        (b"RIFF\0\0\0\0AVI fmt ", "is no WAV file"),
        (wav(b""), "has no samples"),
        (wav(b"\0\0", told=1000), "'data' is told to have 1000 bytes, 2 are there"),
        (wav(b"\0\0")[:30], "is truncated"),
        (wav(b"\0\0")[:36], "is truncated: it has no data"),
        (wav(b"\0\0\0"), "no whole number of samples"),
        (wav(b"\0\0", kind=85), "format 85 with 16 bits, expected PCM"),
        (wav(b"\0\0", channels=0), "has 0 channels"),
        (wav(b"\0\0", rate=0), "at 0 Hz"),
    ],
)
def test_bad_wav_files(read, content, said):
    with pytest.raises(SoundError, match=f"a.wav: .*{said}"):
        read(content)


def test_another_rate(read):
    with pytest.raises(SoundError, match="has 8000 Hz, expected 16000"):
        read(wav(b"\0\0", rate=8000), 16000)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SoundError, match="nothing.wav: cannot be read: No such file"):
        read_wav(tmp_path / "nothing.wav")


def test_rows_overlap_by_all_frames_but_one():
    samples = torch.randn(WINDOW + 9 * HOP)
    found = rows(samples, mel_filters(16000, 64), 5)
    assert found.shape == (6, 320)
    assert torch.equal(found[1, :256], found[0, 64:])
    with pytest.raises(SoundError, match="samples are too few"):
        rows(samples[:2000], mel_filters(16000, 64), 5)


def test_a_tone_is_in_its_band():
    filters = mel_filters(16000, 64)
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(16000) / 16000)
    loudest = rows(tone, filters, 1).mean(0).argmax()
    assert abs(filters[:, loudest].argmax().item() * 16000 / WINDOW - 1000) < 60
