"""The autoencoder's operator."""

from ._operator import Operator

AUTOENCODER = Operator("autoencoder")
AUTOENCODER_WEIGHTS = tuple(rule.name for rule in AUTOENCODER.inputs[1:])
