"""The autoencoder as a function: the shortest way to its operator, as in `fusewise.functional`."""

import torch
import torch.nn.functional as F

from .. import _ops
from .._explain import record, record_torch
from .._settings import TORCH, settings
from .._torch_private import is_any_autocast_enabled
from ..functional._products import autocast_dtype, product_math, without_autocast
from ..functional._transforms import (
    SEEN_THROUGH,
    direct_apply,
    formula_gradients,
    needs_formula,
    needs_graph,
    refuse_exporters,
    refuse_forced,
)


def autoencoder(x, *weights, output="reconstruction"):
    """SpectralShapeAutoencoder on plain tensors: the eleven weights in the module's order.

    `output` is "reconstruction" (x's shape), "latent" `[N, L]` or "score" `[N]`.
    """
    forced, forced_backward = settings.autoencoder, settings.autoencoder_backward
    if forced != TORCH:
        refuse_exporters("autoencoder", x)
    try:
        if is_any_autocast_enabled():
            x, weights = _autocast(x, weights)
        wants_gradient = torch.is_grad_enabled() and (
            x.requires_grad or any(weight.requires_grad for weight in weights)
        )
        tf32 = x.is_cuda and product_math(x)[0]
    except AttributeError as error:
        raise _ops.autoencoder_wrong_type(x, weights) or error from None
    if forced == TORCH or needs_formula():
        return _with_torch(x, weights, output, forced)
    if wants_gradient:
        result = _apply((output, tf32, forced, forced_backward), x, *weights)
    else:
        (result,) = _forward(x, weights, output, tf32, False, forced)
    if settings.records is not None:
        _record(x, weights, output, tf32, wants_gradient)
    return result


def _autocast(x, weights):
    """x in autocast's dtype, and half weights of another one; float32 weights stay as they are.
    float64 is never cast."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weights
    kept = (dtype, torch.float32, torch.float64)
    return x.to(dtype), tuple(w if w.dtype in kept else w.to(dtype) for w in weights)


class _Autoencoder(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, x, *weights):
        output, tf32, forced, _ = options
        result, projection = _forward(x, weights, output, tf32, True, forced)
        ctx.save_for_backward(x, projection, *weights)
        ctx.options = options
        return result

    @staticmethod
    def backward(ctx, gradient):
        x, projection, *weights = ctx.saved_tensors
        output, tf32, _, forced = ctx.options
        needed = ctx.needs_input_grad[1:]
        if needs_graph(gradient):
            found = formula_gradients(
                lambda x, *weights: formula(x, weights, output), (x, *weights), needed, gradient
            )
            return None, *found
        mask = sum(1 << i for i, need in enumerate(needed) if need)
        try:
            found = _ops.autoencoder_backward(
                gradient, x, weights, projection, output, tf32, mask, forced
            )
        except RuntimeError as error:
            raise _ops.rephrased(error, gradient=gradient) from None
        found = iter(found)
        return None, *[next(found) if need else None for need in needed]


_apply = direct_apply(_Autoencoder)


def _forward(x, weights, output, tf32, save, forced):
    try:
        return _ops.autoencoder(x, weights, output, tf32, save, forced)
    except (RuntimeError, ValueError) as error:
        if wrong := _ops.autoencoder_wrong_type(x, weights):
            raise wrong from None
        named = dict(zip(_ops.AUTOENCODER_WEIGHTS, weights, strict=True))
        raise _ops.rephrased(error, x=x, **named) from None


def _record(x, weights, output, tf32, wants_gradient):
    forced = {"forward": settings.autoencoder}
    if wants_gradient:
        forced["backward"] = settings.autoencoder_backward
    for direction, name in forced.items():
        answer = _ops.autoencoder_explain(x, weights, output, tf32, direction == "backward", name)
        record("autoencoder", direction, x, answer)


def _with_torch(x, weights, output, forced):
    why = "" if forced == TORCH else SEEN_THROUGH
    if why:
        refuse_forced("autoencoder", why)
    result = formula(x, weights, output)
    if settings.records is not None:
        record_torch("autoencoder", x, result, why)
    return result


def formula(x, weights, output):
    """The operator in torch's own terms, which every transform of torch can see through."""
    frames, mels = _ops.check_autoencoder(x, weights, output)
    dtype = _ops.autoencoder_score_dtype(x)
    (
        norm_weight,
        norm_bias,
        encoder_weight,
        encoder_bias,
        basis,
        mid_norm_weight,
        mid_norm_bias,
        mid_weight,
        mid_bias,
        decoder_weight,
        decoder_bias,
    ) = (weight.to(dtype) for weight in weights)
    with without_autocast(x):
        wide = x.to(dtype).reshape(x.shape[0], frames, mels)
        slices = F.layer_norm(wide, (mels,), norm_weight, norm_bias)
        slices = F.gelu(F.linear(slices, encoder_weight, encoder_bias))
        basis = F.normalize(basis, dim=1)
        z = F.linear(slices.flatten(1), basis)
        z = F.layer_norm(z, mid_norm_weight.shape, mid_norm_weight, mid_norm_bias)
        z = F.gelu(F.linear(z, mid_weight, mid_bias))
        if output == "latent":
            return z.to(x.dtype)
        y = F.linear((z @ basis).unflatten(1, (frames, -1)), decoder_weight, decoder_bias)
        if output == "score":
            return (y - wide).square().mean((1, 2))
        return y.reshape(x.shape).to(x.dtype)
