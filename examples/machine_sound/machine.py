"""A rotating machine that is made of numbers, and three ways in which it fails."""

import math

import torch
from torch import Tensor

RATE = 16000
FAULTS = ("bearing", "imbalance", "leak")


def machine(seconds: float, generator: torch.Generator, fault: str | None = None) -> Tensor:
    """Harmonics of a speed that follows the load, and noise; with a fault on top, if any."""
    count = int(seconds * RATE)

    def uniform(low, high):
        return low + (high - low) * torch.rand((), generator=generator).item()

    def noise():
        return torch.randn(count, generator=generator)

    time = torch.arange(count) / RATE
    load = 1 + uniform(0.02, 0.06) * torch.sin(2 * math.pi * uniform(0.2, 0.6) * time)
    speed = uniform(28.5, 31.5) * load
    angle = 2 * math.pi * torch.cumsum(speed, 0) / RATE
    sound = 0.02 * noise()
    for harmonic in range(1, 25):
        strength = 0.2 / harmonic**0.7 * uniform(0.8, 1.2)
        sound += strength * load * torch.sin(harmonic * angle + uniform(0, 2 * math.pi))
    if fault == "bearing":  # a short ringing, several times a turn
        phase = angle * uniform(3.3, 3.9) / (2 * math.pi)
        since = (phase - phase.floor()) / (speed * 3.6)  # seconds since the last impact
        ringing = torch.exp(-since * 900) * torch.sin(2 * math.pi * uniform(3500, 4500) * since)
        sound += uniform(0.12, 0.25) * ringing
    elif fault == "imbalance":  # once a turn the whole sways, and its level with it
        sway = 1 + uniform(0.25, 0.5) * torch.sin(angle)
        sound = sound * sway + uniform(0.3, 0.6) * torch.sin(angle)
    elif fault == "leak":  # hiss: noise without its low part
        hiss = noise()
        hiss[1:] = hiss[1:] - 0.95 * hiss[:-1]
        sound += uniform(0.015, 0.03) * hiss
    elif fault is not None:
        raise ValueError(f"fault: expected one of {', '.join(FAULTS)}, got {fault!r}")
    return 0.5 * sound / sound.abs().max()


def dataset(normal: int, test: int, seconds: float, seed: int = 0):
    """Yields (set, label, samples) as the folders of `--data` would hold them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(normal):
        yield "train", "normal", machine(seconds, generator)
    for i in range(test):
        yield "test", "normal", machine(seconds, generator)
        yield "test", FAULTS[i % len(FAULTS)], machine(seconds, generator, FAULTS[i % len(FAULTS)])
