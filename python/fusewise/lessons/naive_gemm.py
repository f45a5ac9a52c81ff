"""A loop per output against the vendor's GEMM."""

from .._usage import UsageError
from ..bench.baselines import OURS, caller
from ..bench.cases import select
from ..bench.families.family import FORWARD, Case
from ..bench.families.linear_act import FAMILY, naive_linear_relu
from ..bench.naive import naive_library
from ..bench.verify import Verification
from .lesson import Finding, Lesson, Samples, interval, ratio, sample, table

_NAIVE, _VENDOR, _FUSED = "a loop per output", "the vendor's product, then relu", OURS
_CASES = {"cpu": "cpu-relu-256x256x512-fp32", "cuda": "1024x784x2048-fp32"}


def case_of(device: str) -> Case:
    """A case of the benchmark."""
    return select("linear_act", device, "full", _CASES[device])[0]


def measure(device: str) -> Samples:
    if naive_library(device) is None:
        raise UsageError("naive-gemm: its kernel is not built; run `make build`")
    case = case_of(device)
    workload = FAMILY.build(case, device, 1)
    functions = {
        _NAIVE: naive_linear_relu,
        _VENDOR: workload.functions["eager"],
        _FUSED: workload.functions[OURS],
    }
    calls = {name: caller(function, workload, FORWARD) for name, function in functions.items()}
    verification = Verification(FAMILY, case, workload)
    for name, call in calls.items():
        found = verification.check(call, FORWARD)
        if not found.passed:
            raise RuntimeError(f"{name} is wrong: {found}")

    return sample({name: lambda c=call: c(0) for name, call in calls.items()}, device)


def conclude(samples: Samples, device: str) -> Finding:
    rows, inputs, outputs = case_of(device).shape
    title = f"y = relu(x Wᵀ + b), {rows} × {inputs} × {outputs}, float32"
    shown = table(title, samples, "TFLOP/s", 2 * rows * inputs * outputs / 1e6)
    found = ratio(samples, _NAIVE, _VENDOR)
    if found.verdict != "faster":
        return Finding(
            shown, ["The vendor's matrix product is not faster here, which is surprising."], False
        )
    said = (
        f"All results are right. The loop takes {interval(found)} as long as the vendor's product, "
        "because it reads every value again for each output. The vendor's library blocks for "
        "registers and caches, and on a GPU uses the tensor cores. Leave the product to it, and "
        "fuse what comes before and after."
    )
    return Finding(shown, [said], True)


LESSON = Lesson("a loop per output against the vendor's matrix product", measure, conclude)
