"""Latencies of linear_act where the number of rows differs with every call.

    python3 tools/row_counts.py [--counts N] [--sequential]

Compares N different row counts with the steady state of a single one. Wanted are a median within
1.2 times the steady state, 99.9 % of the calls below 1 ms, and flat memory. Prints forward and
forward + backward; exits with 1 if a limit is exceeded.
"""

import argparse
import time

import torch

from fusewise.functional import linear_act


def seconds(call, rows):
    """Wall time of a call, including the GPU's work."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call(rows)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, default=10_000)
    parser.add_argument(
        "--sequential", action="store_true", help="row counts 1, 2, 3, ... instead of shuffled ones"
    )
    options = parser.parse_args()
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(options.counts, 256, **kind)
    dy = torch.randn(options.counts, 512, **kind)
    w = torch.randn(512, 256, **kind, requires_grad=True)
    b = torch.randn(512, **kind, requires_grad=True)

    def forward(rows):
        with torch.no_grad():
            linear_act(x[:rows], w, b, "relu")

    def both(rows):
        torch.autograd.grad(linear_act(x[:rows], w, b, "relu"), (w, b), dy[:rows])

    order = (torch.randperm(options.counts) + 1).tolist()
    if options.sequential:
        order.sort()
    failed = False
    for name, call in (("forward", forward), ("forward + backward", both)):
        # Each size twice. The second call is the steady state, under the same load on the host.
        times = torch.tensor([[seconds(call, rows) for _ in range(2)] for rows in order])
        changing, steady = times.double().unbind(1)
        ratio = (changing.median() / steady.median()).item()
        # The host stalls now and then anyway. Only the stalls that new sizes add are counted.
        above, usual = ((each >= 1e-3).sum().item() for each in (changing, steady))
        below = 1 - max(0, above - usual) / len(order)
        right = ratio <= 1.2 and below >= 0.999
        failed |= not right
        print(
            f"{name}: median {1e6 * changing.median():.1f} us, {ratio:.2f} times the steady state; "
            f"{above} calls of 1 ms or more where the steady state has {usual}, the slowest "
            f"{1e3 * changing.max():.1f} ms; {changing.sum():.2f} s in all: "
            f"{'as wanted' if right else 'NOT as wanted'}"
        )
        slow = [(order[i], f"{1e3 * changing[i]:.1f}") for i in (changing >= 1e-3).nonzero()[:, 0]]
        print("  rows and ms of the first:", *(f"{rows}: {ms}" for rows, ms in slow[:20]))
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
