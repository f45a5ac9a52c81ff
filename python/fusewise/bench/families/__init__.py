"""The operator families that the benchmark knows. A new one adds its module and a line here."""

from . import autoencoder, squeeze_excite
from .family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (squeeze_excite.FAMILY, autoencoder.FAMILY, autoencoder.SCORE_FAMILY)
}

__all__ = ["FAMILIES", "Family"]
