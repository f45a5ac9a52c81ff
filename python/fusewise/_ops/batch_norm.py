"""BatchNorm's operator."""

from ._operator import Operator

BATCH_NORM_ACT = Operator("batch_norm_act")
