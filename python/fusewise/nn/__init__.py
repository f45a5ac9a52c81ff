"""Modules around the fused operators, with the names and state dicts of those they stand for."""

from .squeeze_excitation import SqueezeExcitation

__all__ = ["SqueezeExcitation"]
