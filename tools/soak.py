"""A million calls on the GPU, and memory that stays as it was.

    python3 tools/soak.py [--calls N]

Alternates shapes, inference and training steps. Fails if memory grows after the first thousand
calls.
"""

import argparse
import time

import torch

import fusewise

MATRICES = ((256, 256, 512), (33, 65, 7))  # rows, in, out
SHAPES = ((8, 64, 14, 14, 8), (2, 65, 7, 7, 5), (4, 672, 12, 12, 28), (1, 3, 33, 31, 1))


def modules():
    for n, channels, height, width, reduced in SHAPES:
        for dtype in (torch.float16, torch.float32):
            module = fusewise.nn.SqueezeExcitation(
                channels, reduced, "silu", device="cuda", dtype=dtype
            )
            x = torch.randn(n, channels, height, width, device="cuda", dtype=dtype)
            yield module, x.to(memory_format=torch.channels_last).requires_grad_()
    for rows, k, n in MATRICES:
        for dtype in (torch.float16, torch.float32):
            for module in (
                fusewise.nn.LinearAct(k, n, device="cuda", dtype=dtype),
                fusewise.nn.LinearAct(k, n, activation="gelu", device="cuda", dtype=dtype),
                fusewise.nn.MLP([k, n, 16], device="cuda", dtype=dtype),
            ):
                yield module, torch.randn(rows, k, device="cuda", dtype=dtype, requires_grad=True)


def step(i: int, module, x) -> None:
    """Three of four calls are inference; the fourth is a training step."""
    if i % 4:
        with torch.no_grad():
            module(x)
    else:
        module(x).sum().backward()
        x.grad = None
        module.zero_grad(set_to_none=True)


def memory() -> dict[str, int]:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * 4096
    return {
        "torch": torch.cuda.memory_allocated(),
        "GPU": total - free,
        "host": resident,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    calls = parser.parse_args().calls
    if not torch.cuda.is_available():
        parser.error("no GPU was found")
    work = list(modules())
    begin = time.monotonic()
    settled = None
    for i in range(calls):
        step(i // len(work), *work[i % len(work)])
        if i + 1 == 1000:
            settled = memory()
        if (i + 1) % 100_000 == 0:
            print(f"{i + 1} calls, {time.monotonic() - begin:.0f} s, {memory()}", flush=True)
    finished = memory()
    # torch's own counter must not change at all. The others also see other processes and lazy
    # loading.
    allowed = {"torch": 0, "GPU": 16 << 20, "host": 64 << 20}
    settled = settled or finished
    grown = {key: finished[key] - settled[key] for key in finished}
    print(f"growth in bytes after {calls} calls: {grown}")
    return int(any(grown[key] > allowed[key] for key in grown))


if __name__ == "__main__":
    raise SystemExit(main())
