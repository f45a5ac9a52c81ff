"""Whole models as one fused operator each way."""

from .spectral_shape_autoencoder import SpectralShapeAutoencoder

__all__ = ["SpectralShapeAutoencoder"]
