"""The operator families that the benchmark knows. A new one adds its module and a line here."""

from . import autoencoder, linear_act, mlp, squeeze_excite
from .family import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (squeeze_excite, linear_act, mlp, autoencoder)
}

__all__ = ["FAMILIES", "Family"]
