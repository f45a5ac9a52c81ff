"""Squeeze-and-Excitation's operator."""

from ._operator import Operator

SQUEEZE_EXCITE = Operator("squeeze_excite")


def missing_activation():
    *rest, last = (f"'{word}'" for word in SQUEEZE_EXCITE.choices["activation"])
    return TypeError(
        f"activation: expected {', '.join(rest)} or {last}, got nothing; it has no default because "
        "torchvision's SqueezeExcitation has 'relu' and timm's depends on the model"
    )
