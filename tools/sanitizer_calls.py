"""The calls that compute-sanitizer watches: every implementation, small and odd shapes, both ways.

Small, because a watched kernel runs a hundred times slower.
"""

import torch

import fusewise

SHAPES = (
    # n, channels, height, width, reduced
    (2, 64, 8, 8, 8),
    (3, 65, 7, 5, 3),
    (1, 1, 1, 1, 1),
    (2, 336, 12, 12, 14),
)
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def call(shape, dtype, layout) -> None:
    n, channels, height, width, reduced = shape
    weights = (reduced, channels), (reduced,), (channels, reduced), (channels,)
    sizes = ((n, channels, height, width), *weights)
    tensors = [torch.randn(size, device="cuda", dtype=dtype) for size in sizes]
    tensors[0] = tensors[0].to(memory_format=layout)
    for choice in choices(tensors):
        with fusewise.implementation(**choice):
            learned = [tensor.detach().requires_grad_() for tensor in tensors]
            y = fusewise.functional.squeeze_excite(*learned)
            torch.autograd.grad(y, learned, torch.ones_like(y))


def choices(tensors) -> list[dict[str, str]]:
    """Every implementation that takes the call, both ways where it can."""
    learned = [tensor.detach().requires_grad_() for tensor in tensors]
    forward, backward = fusewise.explain(fusewise.functional.squeeze_excite, *learned)
    able = {"squeeze_excite": forward.able, "squeeze_excite_backward": backward.able}
    return [
        {operator: name for operator, names in able.items() if name in names}
        for name in dict.fromkeys(forward.able + backward.able)
    ]


if __name__ == "__main__":
    done = 0
    for shape in SHAPES:
        for dtype in (torch.float16, torch.float32):
            for layout in LAYOUTS:
                call(shape, dtype, layout)
                done += 1
    torch.cuda.synchronize()
    print(f"{done} calls, every implementation")
