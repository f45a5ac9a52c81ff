"""Squeeze-and-Excitation's operator."""

from ._operator import Operator

SQUEEZE_EXCITE = Operator("squeeze_excite")


def missing_activation():
    words = SQUEEZE_EXCITE.words("activation")
    return TypeError(
        f"activation: expected {words}, got nothing; it has no default because torchvision's "
        "SqueezeExcitation has 'relu' and timm's depends on the model"
    )
