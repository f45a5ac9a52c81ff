"""Whole models on the fused operators."""

from .li_resnet import LIResNet, li_resnet18, li_resnet34, li_resnet50
from .spectral_shape_autoencoder import SpectralShapeAutoencoder

__all__ = [
    "LIResNet",
    "SpectralShapeAutoencoder",
    "li_resnet18",
    "li_resnet34",
    "li_resnet50",
]
