"""Streams packed with cat for one grouped convolution, against one convolution per stream."""

import torch

from .lesson import Finding, Lesson, Samples, interval, ratio, sample, table

_LIST = "a convolution for each stream"
_PACKED = "cat, grouped convolution, split"
_GROUPED = "the grouped convolution alone"
_STREAMS = 3


def measure(device: str) -> Samples:
    shape = (16, 64, 56, 56) if device == "cuda" else (2, 64, 56, 56)
    kind = {"device": device, "dtype": torch.float16 if device == "cuda" else torch.float32}
    nhwc = {"memory_format": torch.channels_last}

    def random(*size):
        return torch.randn(size, **kind).mul_(0.05).contiguous(**nhwc)

    images = [random(*shape) for _ in range(_STREAMS)]
    weights = [random(shape[1], shape[1], 3, 3) for _ in range(_STREAMS)]
    packed_weight = torch.cat(weights).contiguous(**nhwc)
    already_packed = torch.cat(images, 1).contiguous(**nhwc)

    def each():
        return [torch.conv2d(x, w, padding=1) for x, w in zip(images, weights, strict=True)]

    def grouped(x):
        return torch.conv2d(x, packed_weight, padding=1, groups=_STREAMS)

    def packed():
        # The next layer needs dense streams again.
        parts = grouped(torch.cat(images, 1)).chunk(_STREAMS, 1)
        return [part.contiguous(**nhwc) for part in parts]

    for one, other in zip(each(), packed(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    return sample({_LIST: each, _PACKED: packed, _GROUPED: lambda: grouped(already_packed)}, device)


def conclude(samples: Samples, device: str) -> Finding:
    shown = table(f"{_STREAMS} streams, 3x3 convolutions, channels_last, forward", samples)
    found = ratio(samples, _PACKED, _LIST)
    alone = ratio(samples, _GROUPED, _LIST)
    lines = [
        f"Packing with copies takes {interval(found)} as long as a convolution for each stream."
    ]
    if found.verdict == "faster":
        lines.append("Two fewer launches do not make up for the copies.")
    else:
        lines.append("This machine does not show the effect: packing does not cost more here.")
    if alone.verdict == "slower":
        lines.append(
            f"The grouped convolution alone takes {interval(alone)} as long: packing is worth it "
            "only for data that stays packed and is never copied."
        )
    else:
        lines.append(
            f"Even without any copy the grouped convolution gains nothing: it takes "
            f"{interval(alone)} as long."
        )
    return Finding(shown, lines, found.verdict == "faster")


LESSON = Lesson("packing streams with cat for one grouped convolution", measure, conclude)
