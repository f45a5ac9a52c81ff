"""The operators of linear + activation and of stacks of it. Lists of tensors have no description:
what a tracer sees of a stack is written here, layer by layer from that of linear + activation."""

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
"""Whether forward of a layer keeps something for backward."""


def in_layer(layer: int, function, *arguments):
    """What the function returns; an error gets the layer's number in front."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        raise RuntimeError(f"layer {layer}: {error}") from None


def wrong_words(activation: str, final_activation: str) -> Exception | None:
    """What a stack's activations get where one is not known."""
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
        y, what = in_layer(i, LINEAR_ACT.fake_forward, y, w, b, kind, *options[:-1], keeps, "")
        if keeps:
            kept.append(what)
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
