"""Stacks of linear layers in the benchmark: their baselines, their reference and their floor."""

import torch
import torch.nn.functional as F
from torch import Tensor

import fusewise

from ..accuracy import Expected, Results
from .family import BOTH, Case, Family, Traffic, Workload
from .linear_act import PRODUCTS
from .linear_stack import ACTIVATIONS, Stack


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
    return _stack(case, workload).expected(workload.gradients[0])


def given(case: Case, workload: Workload, results: Results, kept: list[Tensor]) -> Results:
    """Also checks relu's hidden activations, and computes the later layers' reference from them."""
    stack = _stack(case, workload, kept)
    if not stack.hidden:
        return results
    return Results(results.outputs | stack.hidden, stack.expected(workload.gradients[0]))


def _stack(case: Case, workload: Workload, kept=()) -> Stack:
    layers = len(workload.weights) // 2
    weights, biases = workload.weights[:layers], workload.weights[layers:]
    kinds = [case.extra["activation"]] * (layers - 1) + ["identity"]
    return Stack(*workload.inputs[0], weights, biases, kinds, case.tf32, kept)


def traffic(case: Case, mode: str) -> Traffic:
    """As for a single layer, from the first layer's input to the last layer's output. The
    activations in between need not leave the chip."""
    rows, *sizes = case.shape
    products = sum(a * b for a, b in zip(sizes, sizes[1:], strict=False))
    x, w, y = (n * case.dtype.itemsize for n in (rows * sizes[0], products, rows * sizes[-1]))
    if mode == BOTH:
        return Traffic(data=2 * x + 2 * y + w, weights=w, again=x + w)
    return Traffic(data=x + y, weights=w)


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
    given=given,
    traffic=traffic,
    operations=operations,
    baselines=("layers", PRODUCTS),
    tiny=Case("mlp", "tiny", (2, 8, 8, 8), "float32", extra={"activation": "relu"}),
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
