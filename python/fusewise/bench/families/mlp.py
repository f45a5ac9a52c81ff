"""Stacks of linear layers: what is compared, with what, and what they cost at least."""

import torch
import torch.nn.functional as F

import fusewise

from ..accuracy import Expected
from .family import BOTH, Case, Family, Workload
from .linear_act import ACTIVATIONS, PRODUCTS, Layer, Rounding


def build(case: Case, device: str, buffers: int) -> Workload:
    rows, *sizes = case.shape
    layers = len(sizes) - 1
    activation = case.extra["activation"]
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape, scale=1.0, learned=True):
        value = torch.empty(shape, dtype=case.dtype, device=device)
        return value.normal_(0, scale, generator=generator).requires_grad_(learned)

    def activation_of(i):
        return activation if i + 1 < layers else "identity"

    def ours(x, *parameters):
        weights, biases = parameters[:layers], parameters[layers:]
        return fusewise.functional.mlp(x, weights, biases, activation)

    def eager(x, *parameters):
        for i in range(layers):
            x = ACTIVATIONS[activation_of(i)](F.linear(x, parameters[i], parameters[layers + i]))
        return x

    def single(x, *parameters):
        for i in range(layers):
            x = fusewise.functional.linear_act(
                x, parameters[i], parameters[layers + i], activation_of(i)
            )
        return x

    def products(x, *parameters):
        for weight in parameters[:layers]:
            x = fusewise.functional.linear_act(x, weight, None, "identity")
        return x

    return Workload(
        inputs=[(random(rows, sizes[0]),) for _ in range(buffers)],
        gradients=[random(rows, sizes[-1], learned=False) for _ in range(buffers)],
        weights=(
            *(random(sizes[i + 1], sizes[i], scale=sizes[i] ** -0.5) for i in range(layers)),
            *(random(size) for size in sizes[1:]),
        ),
        functions={"fusewise": ours, "eager": eager, "layers": single, PRODUCTS: products},
        unchecked=frozenset({PRODUCTS}),
    )


def reference(case: Case, workload: Workload) -> dict[str, Expected]:
    parameters = workload.weights
    layers = len(parameters) // 2
    return expected(
        *workload.inputs[0],
        parameters[:layers],
        parameters[layers:],
        workload.gradients[0],
        case.extra["activation"],
        tf32=case.tf32,
    )


@torch.no_grad()
def expected(x, weights, biases, dy, activation, final_activation="identity", tf32=False):
    """y, dx and the gradients of weights and biases, by name, with their scales; in fp64."""
    rounding = Rounding(x.dtype, tf32)
    layers, y, error = [], x.double(), None
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        kind = activation if i + 1 < len(weights) else final_activation
        layers.append(Layer(y, w.double(), b.double(), kind, rounding, error))
        y, error = layers[-1].y, layers[-1].y_error
    found = {"y": (y, error)}
    gradient, error = dy.double(), None
    for i in reversed(range(len(layers))):
        results = layers[i].backward(gradient, error)
        gradient, error = found["dx"] = results["dx"]
        found |= {f"dw{i}": results["dw"], f"db{i}": results["db"]}
    names = ["y", "dx", *(f"d{kind}{i}" for kind in "wb" for i in range(len(layers)))]
    return {name: Expected(found[name][0], rounding.scale(found[name][1])) for name in names}


def bytes_moved(case: Case, mode: str) -> int:
    """Of each layer: forward reads input and weight and writes the output; backward reads both
    again and the gradient of the output, and writes those of input and weight."""
    rows, *sizes = case.shape
    elements = 0
    for inputs, results in zip(sizes, sizes[1:], strict=False):
        x, w, y = rows * inputs, results * inputs, rows * results
        elements += 3 * x + 3 * w + 2 * y if mode == BOTH else x + w + y
    return elements * case.dtype.itemsize


def operations(case: Case, mode: str) -> int:
    rows, *sizes = case.shape
    products = sum(a * b for a, b in zip(sizes, sizes[1:], strict=False))
    return 2 * rows * products * (3 if mode == BOTH else 1)


FAMILY = Family(
    name="mlp",
    rank=None,
    extra={"activation": tuple(ACTIVATIONS)},
    build=build,
    reference=reference,
    bytes_moved=bytes_moved,
    operations=operations,
    baselines=("layers", PRODUCTS),
    checked=tuple(
        Case(
            "mlp",
            f"{activation} 64x33-48-17",
            (64, 33, 48, 17),
            "float32",
            extra={"activation": activation},
        )
        for activation in ("relu", "gelu", "gelu_tanh", "silu")
    ),
)
