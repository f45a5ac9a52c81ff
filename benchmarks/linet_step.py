"""Measures a training step, or inference, of li_resnet18 against the same model in plain PyTorch.

    .venv/bin/python benchmarks/linet_step.py --device cpu --batch 4 --size 128 160

The plain models: that of the tests, with a list of streams, in NCHW and in NHWC, and one with the
streams side by side in the channels, in NHWC (linet_packed.py). With `--compile`, the two in NHWC
also under torch.compile. All models have the same weights, and their outputs are compared before
anything is timed. Rounds are interleaved.
On a GPU: wall time (of our model also as `fusewise.graphed`), GPU time of the whole step as a CUDA
graph, kernels, peak memory, and the GPU time of each kind of kernel under torch's profiler.
"""

import argparse
import copy
import json
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from torch.autograd import DeviceType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "python"))

from linet_packed import PackedLINet  # noqa: E402

import linet_reference  # noqa: E402
from fusewise import graphed, implementation, models  # noqa: E402
from fusewise.bench import environment  # noqa: E402
from fusewise.bench.measure import (  # noqa: E402
    GraphTimer,
    LoopTimer,
    interleave,
    keep_memory,
    peak_bytes,
)
from fusewise.bench.statistics import ratio_of_sums, summary  # noqa: E402

CHANNELS = (3, 1, 1)
BUFFERS = 2  # batches in turn
GRAPHED = "as graphed()"
PROFILED_STEPS = 3

OURS = "integrate|partial_sums|add_splits"  # GEMMs, as the others of ours are BatchNorm
# Kinds of kernels, the first match of a name counts.
KINDS = {
    "layout": r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|tensorTransform|transpose_readWrite",
    "BatchNorm": rf"bn_fw|bn_bw|batch_?norm|^(void )?fusewise::(?!.*({OURS}|cast|copy)_kernel)",
    "convolution": r"conv|fprop|dgrad|wgrad|cudnn",
    "GEMM": rf"gemm|cutlass|xmma|nvjet|cublas|splitK|({OURS})_kernel",
    "copy, cast": r"Memcpy|Memset|copy|cast_kernel|CatArray|FillFunctor",
    "pool": r"pool",
    "elementwise": r"elementwise|foreach|multi_tensor",
    "other": r"",
}


class Contender:
    """A model with its batches, and the call that is timed."""

    def __init__(self, model, batches, options):
        self.model = model
        self.batches, self.options = batches, options
        self.whole = True  # whether a step can be captured
        self.autocast = {"device_type": options.device, "dtype": getattr(torch, options.dtype)}
        self.autocast["enabled"] = options.dtype != "float32"

    def __call__(self, i: int):
        if self.options.inference:
            with torch.no_grad(), torch.autocast(**self.autocast):
                return self.model(*self.batches[i])
        for p in self.model.parameters():
            p.grad = None
        with torch.autocast(**self.autocast):
            y = self.model(*self.batches[i])
        y.float().square().mean().backward()
        # Without its history: a live one binds the accumulation of gradients to this stream, and no
        # other stream could capture a backward.
        return y.detach()

    def graphed(self) -> "Contender":
        """A copy of the model as two CUDA graphs."""
        other = copy.copy(self)
        wanted = torch.no_grad() if self.options.inference else torch.enable_grad()
        with wanted, torch.autocast(**self.autocast):
            other.model = graphed(copy.deepcopy(self.model), *self.batches[0])
        other.whole = False
        return other


def contenders(options) -> dict[str, Contender]:
    torch.manual_seed(0)
    shape = (options.batch, *options.size)
    batches = [
        [torch.randn(shape[0], c, *shape[1:], device=options.device) for c in CHANNELS]
        for _ in range(BUFFERS)
    ]
    nhwc = [[x.contiguous(memory_format=torch.channels_last) for x in batch] for batch in batches]
    ours = models.li_resnet18(CHANNELS, num_classes=19, device=options.device)
    plain = linet_reference.li_resnet18(CHANNELS, 19, 1.0).to(options.device)
    plain.load_state_dict(ours.state_dict())
    in_nhwc = {"list": copy.deepcopy(plain), "packed": PackedLINet(plain).to(options.device)}
    found = {
        "fusewise": Contender(ours, nhwc, options),
        "list, NCHW": Contender(plain, batches, options),
    }
    for name, model in in_nhwc.items():
        model = model.to(memory_format=torch.channels_last)
        found[f"{name}, NHWC"] = Contender(model, nhwc, options)
        if options.compile:
            compiled = torch.compile(copy.deepcopy(model))
            found[f"{name}, compiled"] = Contender(compiled, nhwc, options)
    for contender in found.values():
        contender.model.train(not options.inference)
    if options.device == "cuda":
        found[GRAPHED] = found["fusewise"].graphed()
    return found


def verify(found: dict[str, Contender], options) -> None:
    """The models must agree, as far as their dtype lets them."""
    most = 0.05 if options.dtype == "float32" else 0.2
    first, *others = ((name, contender(0).double()) for name, contender in found.items())
    for name, y in others:
        error = (y - first[1]).norm() / y.norm()
        print(f"{name}: differs from {first[0]} by {error:.2g}")
        if not error < most:
            raise SystemExit(f"more than {most}: nothing was measured")


def profiled(contender: Contender) -> dict:
    """The kernels and copies of a step: ms of GPU time and number by kind, and by name. `span_ms`:
    from the first to the last, idle time included."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    for _ in range(2):  # the first recording includes the profiler's own start-up
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            for i in range(PROFILED_STEPS):
                contender(i % BUFFERS)
            torch.cuda.synchronize()
    ms, count = Counter(), Counter()  # by (kind, name)
    events = [
        event
        for event in profile.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    for event in events:
        kind = next(kind for kind, words in KINDS.items() if re.search(words, event.name, re.I))
        ms[kind, event.name] += event.time_range.elapsed_us() / 1e3 / PROFILED_STEPS
        count[kind, event.name] += 1 / PROFILED_STEPS
    names = [(*key, round(each, 4), round(count[key], 2)) for key, each in ms.most_common()]
    kinds = {}
    for kind in KINDS:
        if found := [row for row in names if row[0] == kind]:
            kinds[kind] = (sum(row[2] for row in found), sum(row[3] for row in found))
    first = min(event.time_range.start for event in events)
    last = max(event.time_range.end for event in events)
    return {"kinds": kinds, "names": names, "span_ms": (last - first) / 1e3 / PROFILED_STEPS}


def measure(found: dict[str, Contender], options) -> dict:
    timers = {
        (name, "wall"): LoopTimer(contender, BUFFERS, options.device)
        for name, contender in found.items()
    }
    facts: dict[str, dict] = {name: {} for name in found}
    if options.device == "cuda":
        for name, contender in found.items():
            facts[name] |= profiled(contender)
            if not contender.whole:
                continue
            facts[name]["peak_bytes"] = peak_bytes(contender)
            timer = timers[name, "gpu"] = GraphTimer(contender, BUFFERS)
            facts[name]["kernels"] = timer.kernels()
    samples = interleave(timers, options.rounds, options.seconds)
    for (name, clock), times in samples.items():
        facts[name][clock] = summary(times)
        if name != "fusewise" and clock in facts["fusewise"]:
            ratio = ratio_of_sums([(1, times, samples["fusewise", clock])])
            facts[name][f"{clock}_against_fusewise"] = ratio.as_dict()
    return facts


def show(facts: dict[str, dict], names: int) -> None:
    for name, row in facts.items():
        texts = [f"{name:16}"]
        for clock in ("wall", "gpu"):
            if clock not in row:
                continue
            texts.append(f"{clock} {row[clock]['median'] / 1e3:9.2f} ms")
            if against := row.get(f"{clock}_against_fusewise"):
                low, high = against["interval"]
                texts.append(f"{against['ratio']:.2f} ({low:.2f} to {high:.2f}) x fusewise's time")
        if "kernels" in row:
            texts.append(f"{row['kernels']} kernels, peak {row['peak_bytes'] / 1e9:.2f} GB")
        print("  ".join(texts))
    kinds = {name: row["kinds"] for name, row in facts.items() if "kinds" in row}
    if kinds:
        print(f"{'ms (number)':16}" + "".join(f"{kind:>18}" for kind in KINDS))
    for name, row in kinds.items():
        texts = [f"{ms:.2f} ({count:.0f})" for ms, count in (row.get(k, (0, 0)) for k in KINDS)]
        print(f"{name:16}" + "".join(f"{text:>18}" for text in texts))
    for name, row in facts.items():
        if names and "names" in row:
            print(f"{name}, a step's kernels, in {row['span_ms']:.2f} ms:")
        for kind, kernel, ms, count in row.get("names", [])[:names]:
            print(f"    {ms:7.3f} ms ({count:g})  {kind:12} {kernel[:120]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, nargs=2, default=(416, 544), metavar=("H", "W"))
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.add_argument(
        "--cudnn-benchmark", action="store_true", help="torch's own tuning, for all"
    )
    parser.add_argument("--implementation", default="", help="ours, forced: one_pass, accumulate")
    parser.add_argument("--backward", default="", help="the same for backward")
    parser.add_argument("--names", type=int, default=0, metavar="N", help="list N costly kernels")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="at most, for each model")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON with all samples")
    options = parser.parse_args()
    keep_memory()
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    with implementation(li_conv=options.implementation, li_conv_backward=options.backward):
        found = contenders(options)
        verify(found, options)
        facts = measure(found, options)
    show(facts, options.names)
    if options.out:
        described = environment.describe(options.device)
        given = {name: value for name, value in vars(options).items() if name != "out"}
        document = {"environment": described, "options": given, "models": facts}
        options.out.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
