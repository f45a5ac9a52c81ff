"""The operator families that the benchmark knows. A new one adds its module and a line here."""

from . import squeeze_excite
from .family import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (squeeze_excite.FAMILY,)}

__all__ = ["FAMILIES", "Family"]
