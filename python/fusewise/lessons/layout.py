"""NCHW against NHWC: the same convolution in the hardware's preferred layout and in another."""

import torch
from torch import nn

from .lesson import Finding, Lesson, Samples, interval, ratio, sample, table

_NCHW, _NHWC = "NCHW (contiguous)", "NHWC (channels_last)"


def measure(device: str) -> Samples:
    shape = (64, 128, 56, 56) if device == "cuda" else (4, 64, 56, 56)
    dtype = torch.float16 if device == "cuda" else torch.float32
    x = torch.randn(shape, device=device, dtype=dtype)
    layer = nn.Conv2d(shape[1], shape[1], 3, padding=1, bias=False, device=device, dtype=dtype)
    calls = {}
    for name, layout in ((_NCHW, torch.contiguous_format), (_NHWC, torch.channels_last)):
        weight = layer.weight.detach().contiguous(memory_format=layout)
        image = x.contiguous(memory_format=layout)
        calls[name] = lambda i=image, w=weight: torch.conv2d(i, w, padding=1)
    return sample(calls, device)


def conclude(samples: Samples, device: str) -> Finding:
    library = "cuDNN, float16" if device == "cuda" else "oneDNN, float32"
    shown = table(f"A 3x3 convolution, forward, under {library}", samples)
    found = ratio(samples, _NCHW, _NHWC)
    if found.verdict == "faster":
        said = f"In NCHW it takes {interval(found)} as long as in NHWC."
        if device == "cuda":
            said += (
                " Tensor cores need the channels next to each other, so cuDNN converts the layout "
                "and converts it back; `fusewise profile` shows these conversions in your model."
            )
        return Finding(shown, [said], True)
    word = "less time" if found.verdict == "slower" else "the same time"
    said = f"This machine does not show the effect: NCHW takes {word}, {interval(found)} as long."
    if device == "cpu":
        said += " On a CPU, oneDNN blocks the channels in a layout of its own in either case."
    return Finding(shown, [said], False)


LESSON = Lesson("NCHW against NHWC under the vendor's convolution", measure, conclude)
