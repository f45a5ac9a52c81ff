"""The example of examples/machine_sound: what it finds, and what files it refuses."""

import os
import runpy
import struct
import sys
import threading
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

from fusewise.models import SpectralShapeAutoencoder  # noqa: E402


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
    parts = [machine.machine(2, generator), machine.machine(2.5, generator, "bearing")]
    sound = torch.cat(parts)
    weights = trained[1] / "model.safetensors"

    def live(seconds):
        write_wav(tmp_path / "long.wav", sound[: int(seconds * machine.RATE)], machine.RATE)
        machine_sound.main(["--live", str(tmp_path / "long.wav"), "--weights", str(weights)])
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    lines = live(4.5)  # the last window is shorter
    assert [float(line[0]) for line in lines] == [0, 1, 2, 3, 4]
    scores = [float(line[2]) for line in lines]
    assert max(scores[:2]) < min(scores[2:])
    assert live(4) == lines[:4]
    assert " ".join(live(4.1)[4]) == "4.0 s the rest, 0.10 s, is too short"


def folders(path, **changes):
    """The layout that --data takes, a few short files in each folder."""
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
        machine_sound.main(["--data", str(data), "--epochs", "1", "--out", str(tmp_path)])


def test_a_missing_folder_is_named(tmp_path):
    data = tmp_path / "data"
    layout = "train/normal, test/normal, test/anomaly"
    said = f"there is no such folder: --data takes a folder that holds {layout} with WAV files"
    refused(f"data/train/normal: {said}", "--data", data, "--out", tmp_path)
    folders(data)
    (data / "test/anomaly").rename(data / "test/abnormal")
    refused(f"data/test/anomaly: {said}", "--data", data, "--out", tmp_path)
    (data / "test/anomaly").mkdir()
    refused("data/test/anomaly: has no .wav file", "--data", data, "--out", tmp_path)


def refused(said, *arguments):
    """The run ends with one line, and with exit code 1, which is what a text gives."""
    with pytest.raises(SystemExit, match=said) as caught:
        machine_sound.main([str(each) for each in arguments])
    assert caught.value.code.startswith("machine_sound: ")
    assert "\n" not in caught.value.code


def test_any_case_of_the_suffix(tmp_path, capsys):
    data = folders(tmp_path / "data")
    (data / "train/normal/0.wav").rename(data / "train/normal/0.WAV")
    (data / "train/normal/1.wav").rename(data / "train/normal/1.Wav")
    machine_sound.main(["--data", str(data), "--epochs", "1", "--out", str(tmp_path)])
    assert "3 files to train with, 6 to test" in capsys.readouterr().out


@pytest.mark.parametrize("value, said", [("nan", "NaN or infinite"), ("1e30", "is 1e\\+30: bring")])
def test_values_that_are_not_finite(trained, tmp_path, value, said):
    samples = torch.zeros(16000)
    samples[5000] = float(value)
    content = wav(samples.numpy().tobytes(), kind=3, bits=32)
    (tmp_path / "bad.wav").write_bytes(content)
    weights = trained[1] / "model.safetensors"
    refused(f"bad.wav: .*{said}", "--live", tmp_path / "bad.wav", "--weights", weights)
    data = folders(tmp_path / "data")
    for folder in ("test/anomaly", "train/normal"):
        (data / folder / "bad.wav").write_bytes(content)
        refused(f"{folder}/bad.wav: .*{said}", "--data", data, "--out", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("level", [0, 0.25])
def test_silent_training_files(tmp_path, level):
    data = folders(tmp_path / "data")
    for path in (data / "train/normal").iterdir():
        write_wav(path, torch.full((16000,), level), machine.RATE)
    refused("train/normal: the training files are silent or all alike", "--data", data,
            "--out", tmp_path)  # fmt: skip
    assert not (tmp_path / "model.safetensors").exists()


def test_a_short_file_is_named(trained, tmp_path):
    data = folders(tmp_path / "data")
    short = data / "test/normal/1.wav"
    write_wav(short, torch.zeros(2000), machine.RATE)
    refused("test/normal/1.wav: 2000 samples are too few, 5 frames need 3072", "--data", data,
            "--out", tmp_path)  # fmt: skip
    weights = trained[1] / "model.safetensors"
    refused("1.wav: is shorter than a window of 1.0 s", "--live", short, "--weights", weights)


def test_live_at_another_rate(trained, tmp_path):
    write_wav(tmp_path / "a.wav", torch.zeros(16000), 8000)
    weights = trained[1] / "model.safetensors"
    refused("a.wav: has 8000 Hz, expected 16000 as the weights", "--live", tmp_path / "a.wav",
            "--weights", weights)  # fmt: skip


def test_a_window_too_short_for_the_rate(tmp_path):
    data = folders(tmp_path / "data", **dict.fromkeys(machine_sound.LAYOUT, 8000))
    machine_sound.main(["--data", str(data), "--epochs", "1", "--out", str(tmp_path)])
    live = ["--live", data / "test/normal/0.wav", "--weights", tmp_path / "model.safetensors"]
    refused("0.wav: at 8000 Hz --window takes at least 0.39 s", *live, "--window", "0.2")
    machine_sound.main([str(each) for each in [*live, "--window", "0.39"]])


def test_an_output_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "x"):
        refused(f"{out}: cannot be written to: .*: take another folder", "--out", out)


def test_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    data = folders(tmp_path / "data")
    machine_sound.main(["--data", str(data), "--epochs", "1", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert f"model.safetensors is written to {tmp_path / 'out'}\n" in said
    assert "pip install matplotlib" in said and "scores.png" not in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setattr(sys, "argv", ["machine_sound.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="^machine_sound: .*pip install safetensors$"):
        runpy.run_path(str(FOLDER / "machine_sound.py"), run_name="__main__")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--live", "x.wav"], "--live needs --weights"),
        (["--live", "x.wav", "--weights", "w", "--data", "d"], "--data is for training"),
        (["--epochs", "0"], "expected at least 1, got 0"),
        (["--seconds", "0.1"], "--seconds takes 0.5 to 3600, got 0.1"),
        (["--seconds", "nan"], "--seconds takes 0.5 to 3600, got nan"),
        (["--seconds", "inf"], "--seconds takes 0.5 to 3600, got inf"),
        (["--window", "nan"], "--window takes 0.2 to 3600 seconds, got nan"),
        (["--seed", str(2**70)], "--seed takes 0 to"),
    ],
)
def test_bad_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        machine_sound.main(arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("machine_sound: ") and said in line


def test_weights_of_another_kind(tmp_path):
    path = tmp_path / "w.safetensors"
    live = ["--live", tmp_path / "a.wav", "--weights", path]
    wanted = "take the model.safetensors that a run without --live wrote"
    refused(f"w.safetensors: cannot be read: No such file or directory: {wanted}", *live)
    path.write_bytes(b"nonsense")
    refused(f"w.safetensors: cannot be read as weights: .*: {wanted}", *live)
    SpectralShapeAutoencoder(32, 5).save_safetensors(path)
    refused(f"w.safetensors: holds the weights of another model: {wanted}", *live)
    model = SpectralShapeAutoencoder(machine_sound.BANDS, machine_sound.FRAMES)
    model.save_safetensors(path)
    refused(f"w.safetensors: does not say the mean, deviation and rate .*: {wanted}", *live)
    machine_sound.save(model, torch.tensor(float("nan")), torch.tensor(1.0), 16000, path)
    refused("w.safetensors: holds numbers that cannot be used", *live)


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


@pytest.mark.parametrize("told", [0xFFFFFFFF, 0x7FFFF000])
def test_a_recording_that_was_streamed_goes_to_its_end(read, told):
    samples, _ = read(wav(struct.pack("<2h", 0, 16384), told=told))
    assert samples.tolist() == [0, 0.5]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_recording_that_comes_through_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = wav(struct.pack("<2h", 0, 16384), told=0xFFFFFFFF)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    samples, _ = read_wav(pipe)
    writer.join()
    assert samples.tolist() == [0, 0.5]


def test_channels_are_averaged(read):
    samples, _ = read(wav(struct.pack("<4h", 16384, 0, -16384, -16384), channels=2))
    assert samples.tolist() == [0.25, -0.5]


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "is not a WAV file"),
        (b"RIFF\0\0\0\0AVI fmt ", "is not a WAV file"),
        (wav(b""), "has no samples"),
        (wav(b"\0\0", told=1000), "'data' says that it has 1000 bytes, 2 are there"),
        (wav(b"\0\0")[:30], "is truncated"),
        (wav(b"\0\0")[:36], "is truncated: it has no data"),
        (wav(b"\0\0\0"), "not a whole number of samples"),
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
