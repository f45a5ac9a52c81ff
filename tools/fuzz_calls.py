"""Random calls of every operator but LINet's, held to the accuracy rule.

    python3 tools/fuzz_calls.py [OPERATOR ...] [--device cuda] [--calls N] [--seed N] [--call I]

Draws shapes, dtypes, strides, expanded tensors and gradients. Checks every implementation that can
run a call, and checks mixed dtypes under autocast too. Without --seed each run draws new calls.
Call I of a seed is always the same, whatever ran before it. A failure prints the command that
repeats it. Any failure makes the exit code 1.

The rule compares our largest error with torch's. Both are a matter of luck: where a LayerNorm of
few values enlarges the errors of one row, even two equally accurate orders of rounding differ by
more than the rule allows in one of some hundred calls. So an error of up to twice what is allowed
counts only if it shows again with other values in tensors of the same shapes and strides.
"""

import argparse
import dataclasses
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow small calls down

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "python")]

import torch  # noqa: E402

import autoencoder_reference  # noqa: E402
import batch_norm_excite_reference  # noqa: E402
import batch_norm_reference  # noqa: E402
import fusewise  # noqa: E402
import linear_reference  # noqa: E402
import reference  # noqa: E402
from fusewise._amx import avoid_broken_amx  # noqa: E402
from layouts import Relay  # noqa: E402

CALLS = 100  # per operator
DRAWS = 4  # checked together where the error of a single draw is a matter of luck
REDRAWS = 3  # of a call that broke the rule by little
SHOWN = 5  # failures per operator that are printed in full


# --- drawing one or more cases; all but the first only make the verdict more stable ---------------


def size(rng, most):
    """From 1 to `most`: a third each are small numbers, multiples of 8, and any numbers."""
    kind = rng.randrange(3)
    if kind == 0:
        return rng.randint(1, min(most, 9))
    return rng.randint(1, most) if kind == 1 or most < 8 else 8 * rng.randint(1, most // 8)


def batch(rng, most):
    """The number of rows or images; rarely 0."""
    return 0 if rng.random() < 0.02 else size(rng, most)


def relaid(rng, t):
    return Relay.drawn(rng, t.dim())(t)


def draw_dtypes(rng):
    return reference.DTYPES[rng.choice(sorted(reference.DTYPES))]


def draw_squeeze_excite(rng, device):
    shape = batch(rng, 9), size(rng, 150), size(rng, 15), size(rng, 15)
    case = reference.make_case(
        shape,
        size(rng, 40),
        device,
        draw_dtypes(rng),
        activation=rng.choice(reference.ACTIVATIONS),
        gate=rng.choice(reference.GATES),
        bias=(rng.random() < 0.7, rng.random() < 0.7),
        convolution=rng.random() < 0.3,
    )
    case.x, case.dy = relaid(rng, case.x), relaid(rng, case.dy)
    return [case]


def draw_leading(rng):
    return [batch(rng, 200)] if rng.random() < 0.6 else [size(rng, 6), batch(rng, 20)]


def draw_layouts(rng, *ranks):
    """Layouts of tensors that are multiplied. At most one of them has dimensions of stride 0.

    If both factors are constant along a sum, it adds the same term many times. How that rounds is a
    matter of luck, in the vendor's GEMM too.
    """
    layouts, found = [], False
    for rank in ranks:
        layout = Relay.drawn(rng, rank)
        layouts.append(dataclasses.replace(layout, expanded=()) if found else layout)
        found = found or bool(layout.expanded)
    return layouts


def draw_linear_act(rng, device):
    case = linear_reference.make_case(
        draw_leading(rng),
        size(rng, 150),
        size(rng, 150),
        device,
        draw_dtypes(rng),
        activation=rng.choice(sorted(linear_reference.ACTIVATIONS)),
        bias=rng.random() < 0.7,
    )
    x_layout, dy_layout, w_layout = draw_layouts(rng, case.x.dim(), case.dy.dim(), 2)
    case.x, case.dy, case.w = x_layout(case.x), dy_layout(case.dy), w_layout(case.w)
    return [case]


def draw_mlp(rng, device):
    """Several draws: if rows and weights are alike, few rounding errors are independent."""
    kinds, dtypes = sorted(linear_reference.ACTIVATIONS), draw_dtypes(rng)
    activation, final_activation = rng.choice(kinds), rng.choice(kinds)
    if final_activation == "relu" and dtypes[0].itemsize == 2:
        # The reference only knows a call's rounded activations after relu. After other activations,
        # their rounding to half precision decides the sign of z, in torch too.
        activation = "relu"
    leading, bias = draw_leading(rng), rng.random() < 0.7
    # A float64 reference is no more precise than a float64 call; in deep stacks its own errors
    # show.
    layers = rng.randint(1, 2 if dtypes[0] == torch.float64 else 4)
    sizes = [size(rng, 100) for _ in range(layers + 1)]
    rank = len(leading) + 1
    x_layout, dy_layout, *w_layouts = draw_layouts(rng, rank, rank, *[2] * layers)
    cases = []
    for _ in range(DRAWS):
        case = linear_reference.make_mlp_case(
            leading,
            sizes,
            device,
            dtypes,
            activation=activation,
            final_activation=final_activation,
            bias=bias,
        )
        case.x, case.dy = x_layout(case.x), dy_layout(case.dy)
        case.w = [layout(w) for layout, w in zip(w_layouts, case.w, strict=True)]
        cases.append(case)
    return cases


def draw_autoencoder(rng, device):
    """Several draws: the largest of a few rounding errors, ours or torch's, is a matter of luck."""
    rows, dtypes = size(rng, 60), draw_dtypes(rng)
    if rng.random() < 0.3:
        sizes = autoencoder_reference.DEFAULT
    else:
        # A LayerNorm of two values gives plus and minus one; its gradient is nothing but rounding.
        sizes = {
            "n_mels": 2 + size(rng, 40),
            "frames": rng.randint(1, 6),
            "latent": 2 + size(rng, 30),
            "slice_latent": 1 + size(rng, 40),
        }
    layout, output = rng.choice(["rows", "frames"]), rng.choice(autoencoder_reference.OUTPUTS)
    case, *others = (
        autoencoder_reference.make_case(rows, sizes, device, dtypes, layout, "rows", output)
        for _ in range(DRAWS)
    )
    x = relaid(rng, case.x)
    frames = x.reshape(rows, sizes["frames"], sizes["n_mels"])
    if frames.double().std(-1).min() > 0.1:  # equal values leave a LayerNorm only noise
        case.x = x
    case.gradient = relaid(rng, case.gradient)
    weights = [relaid(rng, w) if w.dim() == 2 else w for w in case.weights]
    if not any(0 in w.stride() for w in weights):
        case.weights = weights
    return [case, *others]


def draw_batch_norm_act(rng, device):
    """With a max-pool too, if there is no residual."""
    shape = batch(rng, 9), size(rng, 150), size(rng, 15), size(rng, 15)
    training = shape[0] * shape[2] * shape[3] != 1 and rng.random() < 0.7
    case = batch_norm_reference.make_case(
        shape,
        device,
        draw_dtypes(rng),
        activation=rng.choice(sorted(batch_norm_reference.ACTIVATIONS)),
        residual=rng.random() < 0.5,
        affine=(rng.random() < 0.7, rng.random() < 0.7),
        training=training,
        mean=rng.choice((0.0, 0.5, 30.0)),
    )
    x = relaid(rng, case.x)
    # Equal values leave a BatchNorm only noise.
    if x.numel() and (not training or x.double().std((0, 2, 3)).min() > 0.1):
        case.x = x
    layout = Relay.drawn(rng, 4)
    if case.residual is not None:
        case.residual = relaid(rng, case.residual)
    # Other values of x or of the residual have other kinks, which an expanded dy cannot leave out.
    at_kinks = case.kinks()
    dy = layout(case.dy.masked_fill(at_kinks, 0))
    case.dy = dy if not dy[at_kinks].any() else dy.masked_fill(at_kinks, 0)
    return [case]


def draw_batch_norm_excite(rng, device):
    shape = batch(rng, 9), size(rng, 150), size(rng, 15), size(rng, 15)
    training = shape[0] * shape[2] * shape[3] != 1 and rng.random() < 0.7
    case = batch_norm_excite_reference.make_case(
        shape,
        size(rng, 40),
        device,
        draw_dtypes(rng),
        activation=rng.choice(sorted(batch_norm_reference.ACTIVATIONS)),
        hidden_activation=rng.choice(reference.ACTIVATIONS),
        gate=rng.choice(reference.GATES),
        affine=(rng.random() < 0.7, rng.random() < 0.7),
        biases=(rng.random() < 0.7, rng.random() < 0.7),
        training=training,
        convolution=rng.random() < 0.3,
        mean=rng.choice((0.0, 0.5, 30.0)),
    )
    layout = Relay.drawn(rng, 4)
    dense, x = case.x, layout(case.x)
    # Equal values leave a BatchNorm only noise.
    if x.numel() and (not training or x.double().std((0, 2, 3)).min() > 0.1):
        case.x = x
        batch_norm_excite_reference.leave_kinks(
            case, dense, lambda: torch.randn_like(dense) * 2, layout
        )
    dy = relaid(rng, case.dy)
    # With means of 0 and equal gradients, w1's gradient is a product of two rounding errors.
    if case.bias is not None or case.activation != "identity" or not training:
        case.dy = dy
    return [case]


OPERATORS = {
    "squeeze_excite": draw_squeeze_excite,
    "linear_act": draw_linear_act,
    "mlp": draw_mlp,
    "autoencoder": draw_autoencoder,
    "batch_norm_act": draw_batch_norm_act,
    "batch_norm_excite": draw_batch_norm_excite,
}


def drawn(operator, device, seed, number, redraw=0):
    """Each `redraw` has the same shapes and strides, and other values."""
    rng = random.Random(f"{operator} {seed} {number}")
    torch.manual_seed(rng.getrandbits(31) + redraw)
    return OPERATORS[operator](rng, device)


# --- checks -------------------------------------------------------------------------------------


def check(case, *others):
    """Checks the accuracy rule for every implementation, and under autocast."""
    case.check_every_implementation(*others)
    if type(case) is batch_norm_reference.Case and case.residual is None:
        case.check_every_pool()
    if case.x.dtype != case.inputs[1].dtype:
        check_under_autocast(case, *others)


def check_under_autocast(case, *others):
    """Runs on float32 data that is exact in half precision, so that the same reference holds."""
    # These keep x's dtype.
    scales_x = isinstance(case, (reference.Case, batch_norm_reference.Case))

    def under_autocast(fn):
        def call(x, *rest, **options):
            with torch.autocast(x.device.type, x.dtype):
                return fn(x if scales_x else x.float(), *rest, **options)

        return call

    check_together(case, *others, wrap=under_autocast)


def check_together(case, *others, wrap=lambda fn: fn):
    """Checks the rule for several draws at once, calling the operator through `wrap`."""
    if isinstance(case, autoencoder_reference.Case):
        fn = wrap(autoencoder_reference.autoencoder)
        autoencoder_reference.check_together(case, *others, fn=fn)
    elif isinstance(case, batch_norm_reference.Case):

        def call(mean, var, x, **others):
            return wrap(lambda x: case.ours(mean, var, x, **others))(x)

        case.check(call)
    elif isinstance(case, linear_reference.Case):
        linear_reference.check_together(case, *others, fn=wrap(case.ours))
    else:
        case.check(wrap(reference.squeeze_excite))


def failures_by_implementation(case, *others):
    """Which implementations broke the rule, and by how much."""
    for choice in ({}, *case.implementations()):
        name = ", ".join(f"{key}={value}" for key, value in choice.items()) or "as chosen"
        try:
            with fusewise.implementation(**choice):
                check_together(case, *others)
        except Exception as error:
            yield f"{name}: {error}"


def described(case):
    """All arguments; for tensors the dtype, shape, strides and storage offset."""
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        tensors = value if isinstance(value, list) else [value]
        for i, t in enumerate(tensors):
            name = f"{field.name}[{i}]" if isinstance(value, list) else field.name
            if isinstance(t, torch.Tensor):
                dtype = str(t.dtype).removeprefix("torch.")
                layout = f"strides {list(t.stride())}, offset {t.storage_offset()}"
                yield f"{name}: {dtype} {list(t.shape)}, {layout}"
            elif not field.name.startswith("_"):
                yield f"{name}: {t}"


def report(error, cases, command):
    print(f"\nFAILED: {type(error).__name__}: {error}")
    for line in described(cases[0]):
        print(f"  {line}")
    if "CUDA error" not in str(error):  # after a CUDA error no call works
        for line in failures_by_implementation(*cases):
            print(f"  {line}")
    print(f"  repeat: {command}", flush=True)


def is_small(error):
    """Whether the rule was broken, but by less than a factor of two."""
    figures = re.search(r"off by (\S+) where (\S+) is allowed", str(error))
    return figures is not None and float(figures[1]) < 2 * float(figures[2])


def breaks_again(*call):
    for redraw in range(1, REDRAWS + 1):
        try:
            check(*drawn(*call, redraw))
        except Exception:
            return True
    return False


def fuzz(operator, device, seed, numbers):
    """How many calls failed, and how many broke the rule only with their first values."""
    failed = redrawn = 0
    for number in numbers:
        cases = drawn(operator, device, seed, number)
        command = (
            f"python3 tools/fuzz_calls.py {operator} --device {device} --seed {seed} "
            f"--call {number}"
        )
        try:
            check(*cases)
        except Exception as error:  # any exception is a finding
            if is_small(error) and not breaks_again(operator, device, seed, number):
                print(f"not counted, because other values pass: {error}; {command}", flush=True)
                redrawn += 1
                continue
            failed += 1
            if failed <= SHOWN:
                report(error, cases, command)
            else:
                print(f"FAILED: {command}")
            if "CUDA error" in str(error):
                break
    return failed, redrawn


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=", ".join(OPERATORS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--calls", type=int, default=CALLS, help=f"calls of each operator (default: {CALLS})"
    )
    parser.add_argument("--seed", type=int, help="default: a random one")
    parser.add_argument("--call", type=int, help="run only the call with this number")
    options = parser.parse_args(arguments)
    if unknown := set(options.operators) - set(OPERATORS):
        parser.error(f"unknown operator {min(unknown)}; there are: {', '.join(OPERATORS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU was found")
    avoid_broken_amx()
    # Autotuning starts from an empty cache, and the user's own tuning cache is not touched.
    with tempfile.TemporaryDirectory(prefix="fusewise-fuzz-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        return run(options)


def run(options):
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    numbers = range(options.calls) if options.call is None else [options.call]
    failed = 0
    for operator in options.operators or OPERATORS:
        begin = time.monotonic()
        wrong, redrawn = fuzz(operator, options.device, seed, numbers)
        seconds = time.monotonic() - begin
        print(
            f"{operator}: {len(numbers)} calls, {wrong} failed, {redrawn} right only with other "
            f"values, seed {seed}, {seconds:.0f} s",
            flush=True,
        )
        failed += wrong
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
