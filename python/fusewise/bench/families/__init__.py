"""The operator families of the benchmark. A new family adds its module and one line here."""

from . import autoencoder, batch_norm_act, batch_norm_excite, linear_act, mlp, squeeze_excite
from .family import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        squeeze_excite,
        batch_norm_act,
        batch_norm_excite,
        linear_act,
        mlp,
        autoencoder,
    )
}

__all__ = ["FAMILIES", "Family"]
