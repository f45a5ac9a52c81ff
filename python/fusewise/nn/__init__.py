"""Modules for the fused operators, with the parameter names of the modules they replace."""

from .batch_norm import BatchNormAct2d
from .batch_norm_tools import convert_sync_batchnorm, update_bn
from .li_batch_norm import LIBatchNorm2d
from .li_blocks import LIBasicBlock, LIBottleneck
from .li_conv import LIConv2d
from .linear_act import LinearAct
from .mlp import MLP
from .squeeze_excitation import SqueezeExcitation

__all__ = [
    "MLP",
    "BatchNormAct2d",
    "LIBasicBlock",
    "LIBatchNorm2d",
    "LIBottleneck",
    "LIConv2d",
    "LinearAct",
    "SqueezeExcitation",
    "convert_sync_batchnorm",
    "update_bn",
]
