"""Whole models, each with one fused operator for forward and one for backward."""

from .spectral_shape_autoencoder import SpectralShapeAutoencoder

__all__ = ["SpectralShapeAutoencoder"]
