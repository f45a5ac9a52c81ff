"""The autoencoder as a function, called like those in `fusewise.functional`."""

import torch
import torch.nn.functional as F

from .. import _ops
from .._torch_private import is_any_autocast_enabled
from ..functional._call import Function
from ..functional._products import autocast_dtype, product_math, without_autocast
from ..functional._transforms import is_symbolic


def autoencoder(x, *weights, output="reconstruction"):
    """SpectralShapeAutoencoder on plain tensors: x and the eleven weights in the module's order.

    `output` is "reconstruction" (x's shape), "latent" `[N, L]` or "score" `[N]`.
    """
    if is_symbolic(x):
        return _call((x, *weights), (output,), (False,))
    try:
        if is_any_autocast_enabled():
            x, weights = _autocast(x, weights)
        tf32 = x.is_cuda and product_math(x)[0]
    except AttributeError as error:
        raise _ops.AUTOENCODER.wrong_type((x, *weights)) or error from None
    return _call((x, *weights), (output,), (tf32,))


def _autocast(x, weights):
    """Casts x to autocast's dtype, and weights that are in the other half-precision dtype.

    float32 weights stay as they are. float64 is never cast.
    """
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weights
    kept = (dtype, torch.float32, torch.float64)
    return x.to(dtype), tuple(w if w.dtype in kept else w.to(dtype) for w in weights)


def formula(x, *weights_and_output):
    """The operator's formula in torch's own operators."""
    *weights, output = weights_and_output
    sizes = _ops.AUTOENCODER.check((x, *weights), (output,))
    frames, mels = sizes["F"], sizes["M"]
    dtype = _ops.wide_dtype(x)
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


_call = Function(_ops.AUTOENCODER, formula)
