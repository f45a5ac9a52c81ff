"""Squeeze-and-Excitation's operators, and what they look like to a tracer."""

import torch

from ._library import refuse_onnx

squeeze_excite = torch.ops.fusewise._squeeze_excite.default
squeeze_excite_backward = torch.ops.fusewise._squeeze_excite_backward.default
squeeze_excite_explain = torch.ops.fusewise._squeeze_excite_explain.default

SQUEEZE_EXCITE_ACTIVATIONS = ("silu", "relu", "hardswish")
SQUEEZE_EXCITE_GATES = ("sigmoid", "hardsigmoid")

_HALF = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.float64, *_HALF)


def _names(known):
    return ", ".join(f"'{name}'" for name in known[:-1]) + f" or '{known[-1]}'"


def missing_activation():
    names = _names(SQUEEZE_EXCITE_ACTIVATIONS)
    return TypeError(
        f"activation: expected {names}, got nothing; it has no default because torchvision's "
        "SqueezeExcitation has 'relu' and timm's depends on the model"
    )


def wrong_type(x, w1, b1, w2, b2, activation, gate):
    """A TypeError that names the first argument that is no tensor or no text, or None.

    Asked after something has failed: what is said then is about attributes and schemas.
    """
    for name, value in (("x", x), ("w1", w1), ("b1", b1), ("w2", w2), ("b2", b2)):
        optional = name[0] == "b"
        if not isinstance(value, torch.Tensor) and not (optional and value is None):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            got = "None" if value is None else kind.removeprefix("builtins.")
            return TypeError(f"{name}: expected a tensor{' or None' * optional}, got {got}")
    for name, value, known in (
        ("activation", activation, SQUEEZE_EXCITE_ACTIVATIONS),
        ("gate", gate, SQUEEZE_EXCITE_GATES),
    ):
        if not isinstance(value, str):
            return TypeError(f"{name}: expected {_names(known)}, got {value!r}")
    return None


def check_squeeze_excite(x, w1, b1, w2, b2, activation, gate):
    """The operator's own checks, for the ways that do not reach it: tracing and torch.func.

    Sizes may be symbols here; nothing compares the batch, so it stays free.
    """

    if error := wrong_type(x, w1, b1, w2, b2, activation, gate):
        raise error

    def refuse(message):
        raise RuntimeError(message)

    shape = list(x.shape)
    if x.dtype not in _FLOATING:
        refuse(f"x: expected a floating dtype, got {x.dtype}")
    if len(shape) != 4:
        refuse(f"x: expected 4 dimensions [N, C, H, W], got {shape}")
    if shape[1] < 1:
        refuse(f"x: expected at least one channel, got {shape}")
    if shape[2] < 1 or shape[3] < 1:
        refuse(f"x: expected at least one pixel, got {shape}")
    if w1.dtype != x.dtype and not (x.dtype in _HALF and w1.dtype == torch.float32):
        refuse(f"w1: expected {x.dtype} as x, or torch.float32 beside half x, got {w1.dtype}")
    c = shape[1]
    r = w1.shape[0] if w1.dim() else 0
    if r < 1:
        refuse(f"w1: expected [R, {c}] with R >= 1, got {list(w1.shape)}")
    parameters = (("w1", w1, [r, c]), ("w2", w2, [c, r]), ("b1", b1, [r]), ("b2", b2, [c]))
    for name, tensor, expected in parameters:
        if tensor is None:
            continue
        got = list(tensor.shape)
        if got != expected and not (len(expected) == 2 and got == [*expected, 1, 1]):
            refuse(f"{name}: expected {expected}, got {got}")
        if tensor.device != x.device:
            refuse(f"{name}: expected a tensor on {x.device}, got one on {tensor.device}")
        if tensor.dtype != w1.dtype:
            refuse(f"{name}: expected {w1.dtype} as the other weights, got {tensor.dtype}")
    for name, value, known in (
        ("activation", activation, SQUEEZE_EXCITE_ACTIVATIONS),
        ("gate", gate, SQUEEZE_EXCITE_GATES),
    ):
        if value not in known:
            refuse(f"{name}: expected {_names(known)}, got '{value}'")


def saved_dtype(x):
    """The type that statistics and gates are computed and kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.register_fake("fusewise::_squeeze_excite")
def _(x, w1, b1, w2, b2, activation, gate, save, implementation):
    refuse_onnx("squeeze_excite")
    check_squeeze_excite(x, w1, b1, w2, b2, activation, gate)
    n, c = x.shape[:2]
    kept = n * (2 * c + w1.shape[0]) if save else 0
    return torch.empty_like(x), x.new_empty(kept, dtype=saved_dtype(x))


@torch.library.register_fake("fusewise::_squeeze_excite_backward")
def _(dy, x, w1, w2, saved, activation, gate, dx, dw1, db1, dw2, db2, implementation):
    check_squeeze_excite(x, w1, None, w2, None, activation, gate)
    return (
        torch.empty_like(x) if dx else x.new_empty(0),
        w1.new_empty(w1.shape if dw1 else 0),
        w1.new_empty(w1.shape[0] if db1 else 0),
        w2.new_empty(w2.shape if dw2 else 0),
        w2.new_empty(w2.shape[0] if db2 else 0),
    )
