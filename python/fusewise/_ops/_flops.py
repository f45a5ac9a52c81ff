"""FLOP formulas of the operators for `torch.utils.flop_counter.FlopCounterMode`.

They count the GEMMs of the same layers in torch, forward and backward. Like torch's formulas they
leave out pointwise operations. They also leave out what backward recomputes.
"""

import sys
from math import prod

import torch

from .autoencoder import AUTOENCODER_WEIGHTS

_COUNTER = "torch.utils.flop_counter"

# torch's counter passes the shapes in place of the tensors.


def _linear_act(x, w, *_, **__):
    return 2 * prod(x) * w[0]


def _linear_act_backward(gradient, x, w, saved, activation, tf32, sums, tune, needed, *_, **__):
    return _linear_act(x, w) * ((needed & 1) + (needed >> 1 & 1))


def _mlp(x, weights, *_, **__):
    rows = prod(x[:-1])
    return sum(2 * rows * prod(w) for w in weights)


def _mlp_backward(dy, x, weights, saved, activation, final_activation, dx, needs, *_, **__):
    rows, layers, total = prod(x[:-1]), len(weights), 0
    needed = bool(dx)  # whether the gradient of the layer's input is needed
    for w, dw, db in zip(weights, needs[:layers], needs[layers:], strict=True):
        total += 2 * rows * prod(w) * (needed + bool(dw))
        needed = bool(needed or dw or db)
    return total


def _squeeze_excite(x, w1, *_, **__):
    return 4 * x[0] * prod(w1)


def _squeeze_excite_backward(gradient, x, w1, w2, saved, activation, gate, needed, *_, **__):
    dx, dw1, db1, dw2, _ = (needed >> i & 1 for i in range(5))
    return 2 * x[0] * prod(w1) * (dw2 + (dx | dw1 | db1) + dw1 + dx)


def _batch_norm_excite(x, running_mean, running_var, weight, bias, w1, *_, **__):
    return _squeeze_excite(x, w1)


def _batch_norm_excite_backward(gradient, x, weight, bias, w1, w2, *others, **_):
    _, _, _, _, _, needed, *_ = others
    norm = needed & 1 | needed >> 3 & 3  # x, weight or bias, which the excitation depends on
    excitation = needed >> 5 & 0b1111  # w1, b1, w2, b2
    needed = bool(norm) | excitation << 1
    return _squeeze_excite_backward(gradient, x, w1, w2, None, "", "", needed)


def _autoencoder_products(x, weights):
    """FLOPs of the encoder, of the basis projection and of the middle layer; decoder as encoder."""
    rows, mels, (latent, codes) = x[0], weights[0][0], weights[4]
    return 2 * rows * codes * mels, 2 * rows * codes * latent, 2 * rows * latent * latent


def _autoencoder(x, *arguments, **_):
    *weights, output = arguments[: len(AUTOENCODER_WEIGHTS) + 1]
    encoder, basis, middle = _autoencoder_products(x, weights)
    return encoder + basis + middle + (0 if output == "latent" else basis + encoder)


def _autoencoder_backward(gradient, x, *arguments, **_):
    count = len(AUTOENCODER_WEIGHTS)
    weights, (_, output, _, needed) = arguments[:count], arguments[count : count + 4]
    encoder, basis, middle = _autoencoder_products(x, weights)
    names = ("x", *AUTOENCODER_WEIGHTS)
    need = {name: needed >> i & 1 for i, name in enumerate(names)}
    # Whether the input of each of the four linear maps, or anything before it, needs a gradient.
    row = need["x"] | need["norm_weight"] | need["norm_bias"]
    code = row | need["encoder_weight"] | need["encoder_bias"]
    projected = code | need["basis"] | need["mid_norm_weight"] | need["mid_norm_bias"]
    latent = projected | need["mid_weight"] | need["mid_bias"]
    total = encoder * (need["encoder_weight"] + row)
    total += basis * (need["basis"] + code)
    total += middle * (need["mid_weight"] + projected)
    if output != "latent":
        total += basis * (need["basis"] + latent) + encoder * (need["decoder_weight"] + latent)
    return total


class _Convolution:
    """FLOPs of a LINet convolution: of each stream, of its mixture, and of the integrated stream.

    image: the shape of one stream's image; previous: the shape of its weight, or None.
    """

    def __init__(self, image, weights, mix, previous, stride, padding):
        n, _, h, w = image
        kernel = weights[0][2]
        self.size = [(size + 2 * padding - kernel) // stride + 1 for size in (h, w)]
        pixels = n * prod(self.size)
        self.streams = [2 * pixels * prod(shape) for shape in weights]
        self.mixtures = [2 * pixels * prod(shape) for shape in mix]
        self.integrated = 0 if previous is None else 2 * pixels * prod(previous)

    def forward(self):
        return sum(self.streams) + sum(self.mixtures) + self.integrated

    def backward(self, images, needs):
        """images: for each stream whether dx is needed; needs: for each weight."""
        count = len(self.streams)
        total = self.integrated * (bool(needs[2 * count]) + bool(images[0]))
        for i, (dx, dw, dmix) in enumerate(
            zip(images, needs[:count], needs[count : 2 * count], strict=True)
        ):
            total += self.streams[i] * (bool(dx) + bool(dw))
            total += self.mixtures[i] * (bool(dmix) + bool(dx or dw))
        return total


def _convolution(x, weights, mix, previous, stride, padding):
    image = x[0] if previous is None else x[0][1:]
    return _Convolution(image, weights, mix, previous, stride, padding)


def _li_conv(*arguments, **_):
    return _convolution(*arguments[:6]).forward()


def _li_conv_backward(gradient, u, cast, x, weights, mix, previous, stride, padding, *others, **_):
    convolution = _convolution(x, weights, mix, previous, stride, padding)
    _, needs, *_ = others
    images, needs = needs[: len(x)], needs[len(x) :]
    return convolution.backward(images if previous is None else images * len(weights), needs)


def _block(x, weights, strides, shortcut):
    """The convolutions of a residual block."""
    streams, image = x[0] - 1, x[1:]
    each, found = 2 * streams + 1, []
    for i, stride in enumerate(strides):
        own = weights[i * each : (i + 1) * each]
        if i == len(strides) - shortcut:
            image = x[1:]
        kernels, mix = own[:streams], own[streams:-1]
        convolution = _Convolution(image, kernels, mix, own[-1], stride, kernels[0][2] // 2)
        found.append(convolution)
        image = (image[0], kernels[0][0], *convolution.size)
    return found


def _li_block(x, weights, norms, running, blanked, strides, shortcut, *_, **__):
    return sum(convolution.forward() for convolution in _block(x, weights, strides, shortcut))


def _li_block_backward(gradient, x, kept, statistics, parameters, cast, weights, *others, **_):
    _, strides, shortcut, _, _, (dx, *needs), *_ = others
    streams, count = x[0] - 1, len(strides)
    norms, needs, each = needs[:count], needs[count:], 2 * streams + 1
    total, needed = 0, dx  # whether the gradient of what the convolution reads is needed
    for i, convolution in enumerate(_block(x, weights, strides, shortcut)):
        own = needs[i * each : (i + 1) * each]
        if i == count - shortcut:
            needed = dx
        total += convolution.backward([needed] * streams, own)
        needed = needed or any(own) or norms[i]
    return total


_FORMULAS = (
    _linear_act,
    _linear_act_backward,
    _mlp,
    _mlp_backward,
    _squeeze_excite,
    _squeeze_excite_backward,
    _batch_norm_excite,
    _batch_norm_excite_backward,
    _autoencoder,
    _autoencoder_backward,
    _li_conv,
    _li_conv_backward,
    _li_block,
    _li_block_backward,
)


def _register(counter) -> None:
    for formula in _FORMULAS:
        operator = getattr(torch.ops.fusewise, formula.__name__)
        counter.register_flop_formula(operator)(formula)


class _WhenImported:
    """An import hook that registers the formulas once torch's FLOP counter is imported.

    Importing the counter loads Triton, which `import fusewise` must not do.
    """

    def find_spec(self, name, path=None, target=None):
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register
        return spec


if _COUNTER in sys.modules:
    _register(sys.modules[_COUNTER])
else:
    sys.meta_path.insert(0, _WhenImported())
