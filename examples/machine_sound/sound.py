"""Sounds as rows: reading WAV files, and log-mel frames as the autoencoder takes them."""

import math
import mmap
import struct
from pathlib import Path

import torch
from torch import Tensor

WINDOW, HOP = 1024, 512


def samples_of(frames: int) -> int:
    """How many samples so many frames need."""
    return WINDOW + (frames - 1) * HOP


class SoundError(Exception):
    """A file that cannot be used; the message names it and says why."""


class Wav:
    """A WAV file, of which samples are read as they are asked for.

    PCM of 8, 16, 24 and 32 bits and float32. Where `rate` is given the file must have it,
    as `like` has.
    """

    def __init__(self, path: Path, rate: int | None = None, like: str = "the files before it"):
        try:
            with Path(path).open("rb") as file:
                if file.seekable() and file.seek(0, 2):
                    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                else:  # a pipe, or an empty file
                    content = file.read()
        except OSError as error:
            raise SoundError(f"{path}: cannot be read: {error.strerror}") from error
        if len(content) < 12 or content[:4] != b"RIFF" or content[8:12] != b"WAVE":
            raise SoundError(f"{path}: is not a WAV file: convert it to one")
        form, self._data = _chunks(path, memoryview(content))
        kind, channels, found_rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
        if kind == 0xFFFE and len(form) >= 26:  # the extensible form names the real one inside
            kind = struct.unpack("<H", form[24:26])[0]
        if channels < 1 or found_rate < 1:
            raise SoundError(f"{path}: has {channels} channels at {found_rate} Hz")
        if rate is not None and found_rate != rate:
            raise SoundError(f"{path}: has {found_rate} Hz, expected {rate} as {like}: resample it")
        if (kind, bits) not in ((1, 8), (1, 16), (1, 24), (1, 32), (3, 32)):
            raise SoundError(
                f"{path}: format {kind} with {bits} bits, expected PCM (1) with 8, 16, 24 or 32 "
                "bits, or float (3) with 32"
            )
        self._width = channels * bits // 8
        if len(self._data) % self._width:
            size = len(self._data)
            raise SoundError(f"{path}: {size} bytes of data are not a whole number of samples")
        if not len(self._data):
            raise SoundError(f"{path}: has no samples")
        self.path, self.rate, self._form = path, found_rate, (kind, bits, channels)

    def __len__(self) -> int:
        return len(self._data) // self._width

    def read(self, begin: int, end: int) -> Tensor:
        """Samples `begin` to `end`, or to the last one, channels averaged, from -1 to 1."""
        kind, bits, channels = self._form
        data = bytearray(self._data[begin * self._width : end * self._width])
        samples = _decode(data, kind, bits).view(-1, channels).mean(1)
        if not samples.isfinite().all():
            raise SoundError(
                f"{self.path}: has samples that are NaN or infinite: repair it or leave it out"
            )
        return samples


def read_wav(
    path: Path, rate: int | None = None, like: str = "the files before it"
) -> tuple[Tensor, int]:
    """All samples of a WAV file, and its rate."""
    wav = Wav(path, rate, like)
    return wav.read(0, len(wav)), wav.rate


def _chunks(path: Path, content: memoryview) -> tuple[memoryview, memoryview]:
    """The format and the data; each length is held against the file."""
    form = None
    place = 12
    while place + 8 <= len(content):
        name, length = struct.unpack_from("<4sI", content, place)
        place += 8
        if name == b"data" and length >= 0x7FFFF000:  # as a recording that was streamed has it
            length = min(length, len(content) - place)
        if place + length > len(content):
            there = len(content) - place
            label = name.decode("ascii", "replace")
            raise SoundError(
                f"{path}: is truncated: its chunk '{label}' says that it has {length} bytes, "
                f"{there} are there"
            )
        if name == b"fmt ":
            form = content[place : place + length]
        if name == b"data":
            if form is None or len(form) < 16:
                raise SoundError(f"{path}: does not say its format before its data")
            return form, content[place : place + length]
        place += length + length % 2
    raise SoundError(f"{path}: is truncated: it has no data")


def _decode(data: bytearray, kind: int, bits: int) -> Tensor:
    if kind == 3:
        return torch.frombuffer(data, dtype=torch.float32)
    if bits == 8:
        return torch.frombuffer(data, dtype=torch.uint8).float() / 128 - 1
    if bits == 24:
        parts = torch.frombuffer(data, dtype=torch.uint8).view(-1, 3).int()
        whole = parts[:, 0] << 8 | parts[:, 1] << 16 | parts[:, 2] << 24
        return whole.float() / 2**31
    dtype = torch.int16 if bits == 16 else torch.int32
    return torch.frombuffer(data, dtype=dtype).float() / 2 ** (bits - 1)


def write_wav(path: Path, samples: Tensor, rate: int) -> None:
    """16 bits, mono."""
    data = (samples.clamp(-1, 1) * 32767).short().numpy().tobytes()
    header = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, 1,
                         rate, 2 * rate, 2, 16)  # fmt: skip
    Path(path).write_bytes(header + struct.pack("<4sI", b"data", len(data)) + data)


def mel_filters(rate: int, bands: int) -> Tensor:
    """`[WINDOW / 2 + 1, bands]`: triangles that are equally wide on the mel scale."""

    def mel(hertz: float) -> float:
        return 2595 * math.log10(1 + hertz / 700)

    edges = torch.linspace(mel(0), mel(rate / 2), bands + 2)
    edges = 700 * (10 ** (edges / 2595) - 1)
    frequencies = torch.linspace(0, rate / 2, WINDOW // 2 + 1)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp_min(0)


def rows(samples: Tensor, filters: Tensor, frames: int, name: object = "sound") -> Tensor:
    """Log-mel values as rows of `frames` frames, each row a frame later than the one before.

    A view: overlapping rows share their memory, and the autoencoder takes them as they lie.
    `name` is what an error calls the samples.
    """
    needed = samples_of(frames)
    if len(samples) < needed:
        raise SoundError(
            f"{name}: {len(samples)} samples are too few, {frames} frames need {needed}: "
            "take a longer recording or leave it out"
        )
    spectrum = torch.stft(
        samples, WINDOW, HOP, window=torch.hann_window(WINDOW), center=False, return_complex=True
    )
    energy = filters.T @ spectrum.abs().square()
    values = torch.log10(energy + 1e-8).T.contiguous()  # [time, bands]
    if not values.isfinite().all():
        raise SoundError(
            f"{name}: its log-mel values are not finite, its largest sample is "
            f"{samples.abs().max():.3g}: bring its samples to -1 to 1 or leave it out"
        )
    return values.flatten().unfold(0, frames * values.shape[1], values.shape[1])
