"""The operators for a linear layer + activation and for stacks of them.

A C++ description cannot express lists of tensors. The fake kernels of a stack are therefore written
here, layer by layer, on top of those of the single layer.
"""

import torch

from ._operator import Operator

LINEAR_ACT = Operator("linear_act")
ACTIVATIONS = LINEAR_ACT.choices["activation"]

mlp = torch.ops.fusewise._mlp.default
mlp_backward = torch.ops.fusewise._mlp_backward.default

_IS_KEPT = {
    (activation, last): torch.ops.fusewise._mlp_is_kept(activation, last)
    for activation in ACTIVATIONS
    for last in (False, True)
}
"""Whether a layer's forward saves something for backward."""


def in_layer(layer: int, function, *arguments):
    """Calls the function; prefixes an error with the number of the layer."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise RuntimeError(f"layer {layer}: {error}") from None


def wrong_words(activation: str, final_activation: str) -> Exception | None:
    """The error for an unknown activation of a stack, or None."""
    return LINEAR_ACT.wrong_word("activation", activation) or LINEAR_ACT.wrong_word(
        "activation", final_activation, "final_activation"
    )


@torch.library.register_fake("fusewise::_mlp")
def _(x, weights, biases, activation, final_activation, save, *options):
    if error := wrong_words(activation, final_activation):
        raise error
    y, hidden, kept = x, [], []
    for i, w in enumerate(weights):
        last = i + 1 == len(weights)
        kind = final_activation if last else activation
        keeps = save and _IS_KEPT.get((kind, last), False)
        if save and i > 0:
            hidden.append(y)
        b = biases[i] if biases else None
        y, *saved = in_layer(i, LINEAR_ACT.fake_forward, y, w, b, kind, *options[:-1], keeps, "")
        kept += saved
    return y, hidden + kept


@torch.library.register_fake("fusewise::_mlp_backward")
def _(dy, x, weights, saved, activation, final_activation, dx, needs, *options):
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
