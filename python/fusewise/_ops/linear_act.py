"""The operators of linear + activation and of stacks of it, and what they look like to a tracer."""

import torch

from ._library import refuse_onnx

linear_act = torch.ops.fusewise._linear_act.default
linear_act_backward = torch.ops.fusewise._linear_act_backward.default
linear_act_explain = torch.ops.fusewise._linear_act_explain.default
mlp = torch.ops.fusewise._mlp.default
mlp_backward = torch.ops.fusewise._mlp_backward.default

ACTIVATIONS = ("identity", "relu", "gelu", "gelu_tanh", "silu")
_IS_KEPT = {
    (activation, last): torch.ops.fusewise._mlp_is_kept(activation, last)
    for activation in ACTIVATIONS
    for last in (False, True)
}
"""Whether forward of a layer keeps something for backward."""
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _name_of(value):
    if value is None:
        return "None"
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def wrong_linear_type(x, w, b, activation):
    """A TypeError that names the first argument that is no tensor or no text, or None.

    Asked after something has failed: what is said then is about attributes and schemas.
    """
    for name, value in (("x", x), ("w", w), ("b", b)):
        optional = name == "b"
        if not isinstance(value, torch.Tensor) and not (optional and value is None):
            kind = "a tensor" + " or None" * optional
            return TypeError(f"{name}: expected {kind}, got {_name_of(value)}")
    if not isinstance(activation, str):
        return TypeError(f"activation: expected a text, got {activation!r}")
    return None


def check_linear_act(x, w, b, activation):
    """The operator's own checks, for the ways that do not reach it: tracing and torch.func.

    Sizes may be symbols here; nothing compares the leading ones, so they stay free.
    """
    if error := wrong_linear_type(x, w, b, activation):
        raise error

    def refuse(message):
        raise RuntimeError(message)

    if x.dtype not in _FLOATING:
        refuse(f"x: expected a floating dtype, got {x.dtype}")
    if x.dim() < 1:
        refuse("x: expected at least 1 dimension, got a scalar")
    if w.dim() != 2:
        refuse(f"w: expected 2 dimensions [N, K], got {list(w.shape)}")
    if w.shape[1] != x.shape[-1]:
        refuse(
            f"w: expected [N, {x.shape[-1]}] as x has {x.shape[-1]} features, got {list(w.shape)}"
        )
    if b is not None and list(b.shape) != [w.shape[0]]:
        refuse(f"b: expected [{w.shape[0]}], got {list(b.shape)}")
    for name, tensor in (("w", w), ("b", b)):
        if tensor is None:
            continue
        if tensor.device != x.device:
            refuse(f"{name}: expected a tensor on {x.device}, got one on {tensor.device}")
        if tensor.dtype != x.dtype:
            refuse(f"{name}: expected dtype {x.dtype}, got {tensor.dtype}")
    if activation not in ACTIVATIONS:
        names = ", ".join(f"'{name}'" for name in ACTIVATIONS[:-1])
        refuse(f"activation: expected {names} or '{ACTIVATIONS[-1]}', got '{activation}'")


def _rows(x):
    rows = 1
    for size in x.shape[:-1]:
        rows = rows * size
    return rows


def _fake_layer(x, w, b, activation, save):
    refuse_onnx("linear_act")
    check_linear_act(x, w, b, activation)
    y = x.new_empty((*x.shape[:-1], w.shape[0]))
    if not save or activation == "identity":
        return y, x.new_empty(0)
    if activation == "relu":
        return y, x.new_empty((_rows(x), (w.shape[0] + 7) // 8), dtype=torch.uint8)
    return y, torch.empty_like(y)


@torch.library.register_fake("fusewise::_linear_act")
def _(x, w, b, activation, save, tf32, reduced_sums, tune, implementation):
    return _fake_layer(x, w, b, activation, save)


@torch.library.register_fake("fusewise::_linear_act_backward")
def _(dy, x, w, kept, activation, dx, dw, db, tf32, reduced_sums, tune, implementation):
    check_linear_act(x, w, None, activation)
    return (
        torch.empty_like(x) if dx else x.new_empty(0),
        torch.empty_like(w) if dw else x.new_empty(0),
        w.new_empty(w.shape[0] if db else 0),
    )


@torch.library.register_fake("fusewise::_mlp")
def _(
    x,
    weights,
    biases,
    activation,
    final_activation,
    save,
    tf32,
    reduced_sums,
    tune,
    implementation,
):
    y, hidden, kept = x, [], []
    for i, w in enumerate(weights):
        last = i + 1 == len(weights)
        kind = final_activation if last else activation
        keeps = save and _IS_KEPT.get((kind, last), False)
        if save and i > 0:
            hidden.append(y)
        try:
            y, what = _fake_layer(y, w, biases[i] if biases else None, kind, keeps)
        except RuntimeError as error:
            raise RuntimeError(f"layer {i}: {error}") from None
        if keeps:
            kept.append(what)
    return y, hidden + kept


@torch.library.register_fake("fusewise::_mlp_backward")
def _(
    dy,
    x,
    weights,
    saved,
    activation,
    final_activation,
    dx,
    needs,
    tf32,
    reduced_sums,
    tune,
    implementation,
):
    layers = len(weights)
    return [
        torch.empty_like(x) if dx else x.new_empty(0),
        *(
            torch.empty_like(w) if need else x.new_empty(0)
            for w, need in zip(weights, needs[:layers], strict=True)
        ),
        *(
            w.new_empty(w.shape[0] if need else 0)
            for w, need in zip(weights, needs[layers:], strict=True)
        ),
    ]
