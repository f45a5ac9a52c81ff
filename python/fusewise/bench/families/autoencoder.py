"""SpectralShapeAutoencoder in the benchmark: its baselines, its reference and its floor."""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from fusewise._torch_private import keep_address_when_compiled
from fusewise.models._autoencoder import autoencoder

from ..accuracy import Expected, largest, scale
from .family import (
    BOTH,
    FORWARD,
    GRAPHED,
    MODES,
    REDUCE_OVERHEAD,
    STEP,
    Case,
    Family,
    Traffic,
    Workload,
)

WEIGHTS = (
    "norm_weight",
    "norm_bias",
    "encoder_weight",
    "encoder_bias",
    "basis",
    "mid_norm_weight",
    "mid_norm_bias",
    "mid_weight",
    "mid_bias",
    "decoder_weight",
    "decoder_bias",
)
OUTPUTS = ("reconstruction", "latent", "score")
# The loss of a train step: mse_loss of the reconstruction, or the mean of the scores. Both are the
# same function, but the second one never writes the reconstruction to memory.
LOSSES = ("mse_loss", "mean_score")
_ROWS = 4096  # rows per chunk of the reference: in fp64, with all sums of |terms|, 1 GB


def shapes(n_mels, frames, latent, slice_latent) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by name."""
    sizes = {"M": n_mels, "L": latent, "S": slice_latent, "FS": frames * slice_latent}
    letters = ("M", "M", "S M", "S", "L FS", "L", "L", "L L", "L", "M S", "M")
    return {
        name: tuple(sizes[letter] for letter in text.split())
        for name, text in zip(WEIGHTS, letters, strict=True)
    }


def random_weights(n_mels, frames, latent, slice_latent, draw) -> list[Tensor]:
    """Weights scaled to keep all activations near 1; `draw(shape, scale)` makes each of them."""
    found = []
    for name, shape in shapes(n_mels, frames, latent, slice_latent).items():
        linear = name.endswith("weight") and len(shape) == 2
        found.append(draw(shape, shape[1] ** -0.5 if linear else 1.0))
    return found


def eager(x, *weights, output="reconstruction"):
    """The model as one would write it in torch's own operators. It computes and holds only what the
    output needs."""
    g, b, we, be, basis, g2, b2, wm, bm, wd, bd = weights
    mels, slices, latent = we.shape[1], we.shape[0], basis.shape[0]
    frames = basis.shape[1] // slices
    slots = x.reshape(x.shape[0], frames, mels)
    s = F.gelu(F.linear(F.layer_norm(slots, (mels,), g, b), we, be))
    unit = F.normalize(basis, dim=1)
    p = F.linear(s.flatten(1), unit)
    z = F.gelu(F.linear(F.layer_norm(p, (latent,), g2, b2), wm, bm))
    if output == "latent":
        return z
    y = F.linear((z @ unit).unflatten(1, (frames, slices)), wd, bd)
    if output == "reconstruction":
        return y.reshape(x.shape)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (y.to(wide) - slots.to(wide)).square().mean((1, 2))


def _steps(x, g, b, we, be, basis, g2, b2, wm, bm, wd, bd) -> dict[str, Tensor]:
    """The same for the fp64 reference: every intermediate value, by name."""
    mels, slices, latent = we.shape[1], we.shape[0], basis.shape[0]
    frames = basis.shape[1] // slices
    slots = x.reshape(x.shape[0], frames, mels)
    h = F.layer_norm(slots, (mels,), g, b)
    u = F.linear(h, we, be)
    s = F.gelu(u)
    unit = F.normalize(basis, dim=1)
    p = F.linear(s.flatten(1), unit)
    q = F.layer_norm(p, (latent,), g2, b2)
    v = F.linear(q, wm, bm)
    z = F.gelu(v)
    r = (z @ unit).unflatten(1, (frames, slices))
    y = F.linear(r, wd, bd)
    score = (y - slots).square().mean((1, 2))
    found = {"h": h, "u": u, "s": s, "p": p, "q": q, "v": v, "latent": z, "r": r, "y": y}
    return {**found, "reconstruction": y.reshape(x.shape), "score": score}


def build(case: Case, device: str, buffers: int) -> Workload:
    rows, frames, mels = case.shape
    output = case.extra["output"]
    generator = torch.Generator(device).manual_seed(0)

    def random(shape, scale=1.0, learned=True, dtype=case.dtype):
        value = torch.empty(shape, dtype=dtype, device=device)
        value.normal_(0, scale, generator=generator)
        return value.requires_grad_(learned)

    def data(learned):
        if case.layout == "contiguous":
            return random((rows, frames * mels), learned=learned)
        # The layout of a spectrogram: the frames of a mel band are adjacent in memory.
        return random((rows, mels, frames), learned=False).transpose(1, 2).requires_grad_(learned)

    wide = torch.float64 if case.dtype == torch.float64 else torch.float32

    def gradient():
        if output == "score":
            return random((rows,), learned=False, dtype=wide)
        return data(learned=False)

    step = output in LOSSES
    workload = Workload(
        inputs=[(data(learned=not step),) for _ in range(buffers)],
        gradients=[] if step else [gradient() for _ in range(buffers)],
        weights=tuple(
            random_weights(mels, frames, case.extra["latent"], case.extra["slice_latent"], random)
        ),
        functions=_losses(output) if step else _outputs(output),
        forward_only=frozenset({REDUCE_OVERHEAD}),
    )
    workload.functions |= _more_baselines(case, workload, device)
    return workload


def _outputs(output: str) -> dict[str, Callable]:
    return {
        "fusewise": partial(autoencoder, output=output),
        "eager": partial(eager, output=output),
    }


def _losses(output: str) -> dict[str, Callable]:
    def mse_loss(x, *weights):
        return F.mse_loss(autoencoder(x, *weights), x)

    def mean_score(x, *weights):
        score = autoencoder(x, *weights, output="score")
        return score.mean().to(x.dtype)  # the dtype that mse_loss returns

    def eager_loss(x, *weights):
        return F.mse_loss(eager(x, *weights), x)

    return {"fusewise": mse_loss if output == "mse_loss" else mean_score, "eager": eager_loss}


def _more_baselines(case: Case, workload: Workload, device: str) -> dict[str, Callable | str]:
    """Baselines that only some cases have.

    Compiling takes longer than everything else together. It is only done for the model's default
    sizes and torch's default precision.
    """
    output = case.extra["output"]
    sizes = (*case.shape[1:], case.extra["latent"], case.extra["slice_latent"])
    usual = case.dtype_name == "float32" and sizes == (5, 64, 32, 64)
    found: dict[str, Callable | str] = {GRAPHED: "train steps only"}
    if output in LOSSES:
        found[GRAPHED] = workload.functions["fusewise"] if device == "cuda" else "GPU only"
    if not usual or output not in ("reconstruction", "mse_loss"):
        found["compile"] = found[REDUCE_OVERHEAD] = "not for this case"
    elif device != "cuda":
        found[REDUCE_OVERHEAD] = "GPU only"
    else:
        for weight in workload.weights:  # like a module's parameters: not copied for every call
            keep_address_when_compiled(weight)
        found[REDUCE_OVERHEAD] = torch.compile(
            workload.functions["eager"], mode="reduce-overhead", dynamic=False
        )
    return found


def reference(case: Case, workload: Workload) -> dict[str, Expected]:
    inputs, output = (*workload.inputs[0], *workload.weights), case.extra["output"]
    if output not in LOSSES:
        return expected(*inputs, workload.gradients[0], output=output)
    rows = case.shape[0]
    gradient = torch.full((rows,), 1 / rows, dtype=torch.float64, device=inputs[0].device)
    found = expected(*inputs, gradient, output="score")
    scores = found.pop("score")
    del found["dx"]
    loss = scores.value.mean()
    size = scale(loss.item(), scores.scale, 0.0, case.dtype)
    return {"loss": Expected(loss, size), **found}


def expected(x, *weights_and_gradient, output="reconstruction") -> dict[str, Expected]:
    """The output and the gradients of x and all weights, by name, with their scales; in fp64."""
    *weights, gradient = (t.detach() for t in weights_and_gradient)
    wide = [t.double().requires_grad_() for t in weights]
    names = (output, "dx", *(f"d{name}" for name in WEIGHTS))
    by_row: dict[str, list] = {name: [] for name in names[:2]}
    sums: dict[str, list] = {}
    sizes = dict.fromkeys(names[:2], (0.0, 0.0))
    for start in range(0, max(1, x.shape[0]), _ROWS):
        rows = x.detach()[start : start + _ROWS].double().requires_grad_()
        with torch.enable_grad():
            steps = _steps(rows, *wide)
            gradients = gradient[start : start + _ROWS].double()
            inner = [steps[name] for name in ("h", "u", "s", "p", "q", "v", "latent", "r", "y")]
            found = torch.autograd.grad(
                steps[output], [rows, *wide, *inner], gradients, allow_unused=True
            )
        found = [
            torch.zeros_like(t) if g is None else g
            for g, t in zip(found, (rows, *wide, *inner), strict=True)
        ]
        known = dict(zip(("h", "u", "s", "p", "q", "v", "z", "r", "y"), found[12:], strict=True))
        terms = _terms(rows.detach(), [t.detach() for t in wide], steps, gradients, known, output)
        by_row[output].append(steps[output].detach())
        by_row["dx"].append(found[0])
        for name in sizes:
            pair = zip(sizes[name], map(largest, terms[name]), strict=True)
            sizes[name] = tuple(max(a, b) for a, b in pair)
        for name, value in zip(names[2:], found[1:12], strict=True):
            parts = (value, *map(_finite, terms[name]))
            sums[name] = [a + b for a, b in zip(sums.get(name, (0, 0, 0)), parts, strict=True)]
    values = {name: torch.cat(parts) for name, parts in by_row.items()}
    for name, (value, last, inside) in sums.items():
        values[name] = value
        sizes[name] = largest(last), largest(inside)
    # Gradients of float32 weights are computed in x's dtype if x is in half precision.
    dtypes = dict.fromkeys(names, x.dtype)
    mixed = x.dtype != weights[0].dtype
    if output == "score" and not mixed:
        dtypes["score"] = torch.float64 if x.dtype == torch.float64 else torch.float32
    return {
        name: Expected(
            values[name], _scale(largest(values[name]), *sizes[name], dtypes[name], x.dtype)
        )
        for name in names
    }


def _terms(x, weights, steps, gradient, d, output) -> dict[str, tuple[Tensor, Tensor]]:
    """The sums of |terms| behind the elements of every output: the outermost sum's, and those of
    the sums inside it.

    Upper-case names are sums of |terms|, propagated to first order. `d` has the gradients of the
    intermediate values.
    """
    g, _, we, be, basis, g2, b2, wm, bm, wd, bd = (t.abs() for t in weights)
    b = weights[1].abs()
    steps = {name: value.detach() for name, value in steps.items()}
    length = basis.norm(dim=1, keepdim=True).clamp_min(1e-12)
    unit = basis / length
    slots = x.reshape(steps["y"].shape).abs()

    def norm(values, weight, bias, like):
        """Of a LayerNorm: sums of |terms| of output and normalised value, and 1 / deviation."""
        scale = (like.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
        normal = (values + values.mean(-1, keepdim=True)) * scale
        return normal * weight + bias, normal, scale

    def norm_gradient(gradient, weight, normal, scale):
        through = gradient * weight
        along = normal * (through * normal).mean(-1, keepdim=True)
        return (through + through.mean(-1, keepdim=True) + along) * scale

    def normalised(values):
        return F.layer_norm(values, values.shape[-1:]).abs()

    cdf, density = (lambda t: torch.special.ndtr(t)), (lambda t: (-t * t / 2).exp() * 0.39894228)
    slope = {n: (cdf(steps[n]) + steps[n] * density(steps[n])).abs() for n in "uv"}
    bend = {n: (density(steps[n]) * (2 - steps[n] ** 2)).abs() for n in "uv"}
    h, s, q, z, r = (steps[name].abs() for name in ("h", "s", "q", "latent", "r"))
    dh, du, ds, dp, dq, dv, dz, dr, dy = (value.abs() for value in d.values())

    H, XN, scale = norm(slots, g, b, x.reshape(slots.shape))
    U = F.linear(H, we, be)
    S = slope["u"] * U + s
    P = F.linear(S.flatten(1), unit)
    Q, PN, scale2 = norm(P, g2, b2, steps["p"])
    V = F.linear(Q, wm, bm)
    Z = slope["v"] * V + z
    R = (Z @ unit).unflatten(1, r.shape[1:])
    Y = F.linear(R, wd, bd)

    xn, pn = normalised(x.reshape(slots.shape)), normalised(steps["p"])
    values = slots[0].numel()
    DY = torch.zeros_like(dy)
    if output == "score":
        DY = gradient.abs()[:, None, None] * 2 / values * (Y + slots)
    DR = (dy + DY) @ wd
    DZ = F.linear(DR.flatten(1), unit) if output != "latent" else dz
    DV = slope["v"] * DZ + bend["v"] * V * dz
    DQ = DV @ wm
    DP = norm_gradient(DQ, g2, pn, scale2) + dp * PN
    DS = (DP @ unit).unflatten(1, s.shape[1:])
    DU = slope["u"] * DS + bend["u"] * U * ds
    DH = DU @ we

    z, Z, q, Q, r, R, s, S = map(_finite, (z, Z, q, Q, r, R, s, S))
    dp, DP, dr, DR, dv, DV = map(_finite, (dp, DP, dr, DR, dv, DV))

    def outer(a, b):
        return a.flatten(0, -2).T @ b.flatten(0, -2)

    def to_basis(last):
        """Through the normalisation of each row to length one."""
        return (last + unit * (unit * last).sum(1, keepdim=True)) / length

    outputs = {
        "reconstruction": (F.linear(r, wd, bd), Y),
        "latent": (slope["v"] * F.linear(q, wm, bm) + z, Z),
        "score": (steps["score"], ((steps["y"].abs() + slots) * (Y + slots)).mean((1, 2)) * 2),
    }
    apart = dy if output == "score" else torch.zeros_like(dy)
    return {
        output: outputs[output],
        "dx": (norm_gradient(dh, g, xn, scale) + apart, norm_gradient(DH, g, xn, scale) + DY),
        "dnorm_weight": ((dh * xn).sum((0, 1)), (DH * xn + dh * XN).sum((0, 1))),
        "dnorm_bias": (dh.sum((0, 1)), DH.sum((0, 1))),
        "dencoder_weight": (outer(du, h), outer(DU, h) + outer(du, H)),
        "dencoder_bias": (du.sum((0, 1)), DU.sum((0, 1))),
        "dbasis": (
            to_basis(outer(dp, s.flatten(1)) + outer(z, dr.flatten(1))),
            to_basis(
                outer(DP, s.flatten(1))
                + outer(dp, S.flatten(1))
                + outer(Z, dr.flatten(1))
                + outer(z, DR.flatten(1))
            ),
        ),
        "dmid_norm_weight": ((dq * pn).sum(0), (DQ * pn + dq * PN).sum(0)),
        "dmid_norm_bias": (dq.sum(0), DQ.sum(0)),
        "dmid_weight": (outer(dv, q), outer(DV, q) + outer(dv, Q)),
        "dmid_bias": (dv.sum(0), DV.sum(0)),
        "ddecoder_weight": (outer(dy, r), outer(DY, r) + outer(dy, R)),
        "ddecoder_bias": (dy.sum((0, 1)), DY.sum((0, 1))),
    }


def _scale(value: float, last: float, inside: float, dtype: torch.dtype, data: torch.dtype):
    """The rule's scale, with the inner sums weighted down.

    They count for a 256th, because errors average out over six layers, but for at most eight times
    the outermost sum; otherwise an all-zero result would pass. In float32 they count for at least a
    1024th, because a norm over few values cancels most of what it is computed from. In float64 they
    count in full, because the reference rounds too.
    """
    if data == torch.float64:
        return scale(value, last, inside, dtype)
    least = inside / 1024 if data == torch.float32 else 0.0
    return scale(value, last, min(inside / 256, max(8 * last, least)), dtype)


def _finite(t: Tensor) -> Tensor:
    return t.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _weight_bytes(case: Case) -> int:
    _, frames, mels = case.shape
    sizes = (mels, frames, case.extra["latent"], case.extra["slice_latent"])
    elements = sum(torch.Size(shape).numel() for shape in shapes(*sizes).values())
    return elements * case.dtype.itemsize


def traffic(case: Case, mode: str) -> Traffic:
    """Forward reads x and writes the output. Backward reads the gradient and again x, and writes dx
    and the gradients of the weights. The reconstruction is as large as x; a score has at least 4
    bytes. A train step could do everything in one pass over x."""
    rows, frames, mels = case.shape
    itemsize, weights = case.dtype.itemsize, _weight_bytes(case)
    x = rows * frames * mels * itemsize
    if mode == STEP:
        return Traffic(data=x + weights, weights=weights)
    out = x if case.extra["output"] == "reconstruction" else rows * max(4, itemsize)
    if mode == FORWARD:
        return Traffic(data=x + out, weights=weights)
    return Traffic(data=2 * x + 2 * out + weights, weights=weights, again=x + weights)


def operations(case: Case, mode: str) -> int:
    """Those of the GEMMs. Each layer before the decoder has one in forward and two in backward; a
    train step omits the one for dx."""
    rows, frames, mels = case.shape
    latent, slices = case.extra["latent"], case.extra["slice_latent"]
    encoder = rows * frames * mels * slices
    others = rows * (frames * slices * latent + latent * latent)
    decoder = _decoder_products(rows, frames, mels, latent, slices, backward=mode != FORWARD)
    counts = {FORWARD: (1, 1), BOTH: (3, 3), STEP: (2, 3)}[mode]
    return 2 * (counts[0] * encoder + counts[1] * others + decoder)


def _decoder_products(rows, frames, mels, latent, slices, backward: bool) -> int:
    """The fewest multiplications from z to y and back.

    There are two ways. One goes through r = z @ basis. The other first folds the decoder into the
    basis. The folded matrix depends only on weights and could be kept from call to call, so it is
    free here. In backward, each result may use either way.

    In a train step, expanding the square of the loss would save one more GEMM. It is not counted,
    because the expanded sum cancels when the reconstruction is good.
    """
    through_slices = rows * frames * slices
    folded = rows * frames * mels * latent
    of_weights = frames * mels * slices * latent
    shared = {
        "folded": 0,
        "r": through_slices * latent,
        "dr": through_slices * mels,
        "dfolded": folded,
    }
    # For each result, the possible ways: the shared product that it needs, and its own cost.
    y = (("r", through_slices * mels), ("folded", folded))
    dz = (("dr", through_slices * latent), ("folded", folded))
    ddecoder = (("r", through_slices * mels), ("dfolded", of_weights))
    dbasis = (("dr", through_slices * latent), ("dfolded", of_weights))
    wanted = (y, dz, ddecoder, dbasis) if backward else (y,)
    return min(
        sum(shared[name] for name in {first for first, _ in ways}) + sum(own for _, own in ways)
        for ways in product(*wanted)
    )


def modes(case: Case) -> tuple[str, ...]:
    return (STEP,) if case.extra["output"] in LOSSES else MODES


FAMILY = Family(
    name="autoencoder",
    rank=3,
    extra={"latent": None, "slice_latent": None, "output": ("reconstruction", "score", *LOSSES)},
    build=build,
    reference=reference,
    traffic=traffic,
    operations=operations,
    tiny=Case(
        "autoencoder",
        "tiny",
        (1, 2, 8),
        "float32",
        extra={"latent": 4, "slice_latent": 2, "output": "reconstruction"},
    ),
    checked=tuple(
        Case(
            "autoencoder",
            f"{name} {output}",
            shape,
            "float32",
            extra={"latent": latent, "slice_latent": slices, "output": output},
        )
        for name, shape, latent, slices in (
            ("37 rows", (37, 5, 64), 32, 64),
            ("odd", (5, 3, 33), 7, 19),
            ("one row", (1, 5, 64), 32, 64),
        )
        for output in ("reconstruction", "score")
    ),
    layouts=("contiguous", "channels_last"),
    baselines=(REDUCE_OVERHEAD, GRAPHED),
    modes=modes,
)
