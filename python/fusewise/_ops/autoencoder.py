"""The autoencoder's operators, and what they look like to a tracer."""

import torch

from ._library import refuse_onnx

autoencoder = torch.ops.fusewise._autoencoder.default
autoencoder_backward = torch.ops.fusewise._autoencoder_backward.default
autoencoder_explain = torch.ops.fusewise._autoencoder_explain.default

# In the operators' order; each with its shape in terms of M, F, L and S.
_SHAPES = {
    "norm_weight": ("M",),
    "norm_bias": ("M",),
    "encoder_weight": ("S", "M"),
    "encoder_bias": ("S",),
    "basis": ("L", "FS"),
    "mid_norm_weight": ("L",),
    "mid_norm_bias": ("L",),
    "mid_weight": ("L", "L"),
    "mid_bias": ("L",),
    "decoder_weight": ("M", "S"),
    "decoder_bias": ("M",),
}
AUTOENCODER_WEIGHTS = tuple(_SHAPES)
_OUTPUTS = ("reconstruction", "latent", "score")

_HALF = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.float64, *_HALF)


def autoencoder_wrong_type(x, weights):
    """A TypeError that names the first argument that is no tensor, or None."""
    for name, value in (("x", x), *zip(AUTOENCODER_WEIGHTS, weights, strict=True)):
        if not isinstance(value, torch.Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            got = "None" if value is None else kind.removeprefix("builtins.")
            return TypeError(f"{name}: expected a tensor, got {got}")
    return None


def check_autoencoder(x, weights, output):
    """The operator's own checks, for the ways that do not reach it: tracing and torch.func.

    Sizes may be symbols here; nothing compares the batch, so it stays free. Returns frames and mel
    bands of a row.
    """
    if error := autoencoder_wrong_type(x, weights):
        raise error

    def refuse(message):
        raise RuntimeError(message)

    named = dict(zip(AUTOENCODER_WEIGHTS, weights, strict=True))
    if x.dtype not in _FLOATING:
        refuse(f"x: expected a floating dtype, got {x.dtype}")
    encoder, basis = named["encoder_weight"], named["basis"]
    if encoder.dim() != 2 or min(encoder.shape) < 1:
        got = list(encoder.shape)
        refuse(f"encoder_weight: expected [S, M] with S and M >= 1, got {got}")
    slices, mels = encoder.shape
    if basis.dim() != 2 or min(basis.shape) < 1 or basis.shape[1] % slices:
        got = list(basis.shape)
        refuse(f"basis: expected [L, F * {slices}] with L and F >= 1, got {got}")
    sizes = {"M": mels, "S": slices, "L": basis.shape[0], "FS": basis.shape[1]}
    for name, tensor in named.items():
        expected = [sizes[letter] for letter in _SHAPES[name]]
        if tensor.device != x.device:
            refuse(f"{name}: expected a tensor on {x.device}, got one on {tensor.device}")
        if list(tensor.shape) != expected:
            refuse(f"{name}: expected {expected}, got {list(tensor.shape)}")
        if tensor.dtype != encoder.dtype:
            refuse(f"{name}: expected {encoder.dtype} as the other weights, got {tensor.dtype}")
    frames = basis.shape[1] // slices
    check_rows(x, frames, mels)
    if encoder.dtype != x.dtype and not (x.dtype in _HALF and encoder.dtype == torch.float32):
        wanted = f"{x.dtype} as x, or torch.float32 beside half x"
        refuse(f"encoder_weight: expected {wanted}, got {encoder.dtype}")
    if output not in _OUTPUTS:
        refuse(f"output: expected 'reconstruction', 'latent' or 'score', got '{output}'")
    return frames, mels


def check_rows(x, frames, mels):
    shape = list(x.shape)
    if len(shape) not in (2, 3):
        raise RuntimeError(
            f"x: expected [N, {frames * mels}] or [N, {frames}, {mels}], got {shape}"
        )
    if len(shape) == 2 and shape[1] != frames * mels:
        row = f"{frames} x {mels} = {frames * mels}"
        raise RuntimeError(f"x: expected rows of {row} values, got {shape[1]}")
    if len(shape) == 3 and shape[1:] != [frames, mels]:
        raise RuntimeError(f"x: expected rows of {frames} frames of {mels} values, got {shape}")


def autoencoder_score_dtype(x):
    """The type of scores, and of all that is computed between x and an output."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@torch.library.register_fake("fusewise::_autoencoder")
def _(x, weights, output, tf32, save, implementation):
    refuse_onnx("autoencoder")
    check_autoencoder(x, weights, output)
    rows, latent, wide = x.shape[0], weights[4].shape[0], autoencoder_score_dtype(x)
    result = {
        "reconstruction": lambda: torch.empty_like(x),
        "latent": lambda: x.new_empty(rows, latent),
        "score": lambda: x.new_empty(rows, dtype=wide),
    }[output]()
    return [result, x.new_empty(rows, latent, dtype=wide)] if save else [result]


@torch.library.register_fake("fusewise::_autoencoder_backward")
def _(gradient, x, weights, projection, output, tf32, needed, implementation):
    check_autoencoder(x, weights, output)
    wanted = [weight for i, weight in enumerate(weights) if needed >> 1 + i & 1]
    gradients = [weight.new_empty(weight.shape) for weight in wanted]
    return [torch.empty_like(x), *gradients] if needed & 1 else gradients
