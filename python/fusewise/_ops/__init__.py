"""Loads the operator libraries and adds what the stable ABI cannot express.

That is fake kernels for tracing, and torch's own exception types. Everything here is private;
`fusewise.functional` is the public interface.
"""

from . import _flops  # noqa: F401 - registers the formulas for torch's FLOP counter
from ._library import (
    CUDA_MISSING,
    OPERATOR_NAMES,
    WAY_OUT,
    build_info,
    dtensor_error,
    refuse_onnx,
    rephrased,
)
from ._operator import Operator, has_adjacent_channels, wide_dtype, wrong_number, wrong_whole
from .autoencoder import AUTOENCODER, AUTOENCODER_WEIGHTS
from .batch_norm import (
    BATCH_NORM_ACT,
    BATCH_NORM_ACT_POOL,
    BATCH_NORM_EXCITE,
    batch_norm_statistics,
)
from .li_block import li_block, li_block_backward
from .li_conv import check_li_conv, li_conv, li_conv_backward, li_conv_explain
from .linear_act import ACTIVATIONS, LINEAR_ACT, in_layer, mlp, mlp_backward, wrong_words
from .squeeze_excite import SQUEEZE_EXCITE, missing_activation

__all__ = [
    "ACTIVATIONS",
    "AUTOENCODER",
    "AUTOENCODER_WEIGHTS",
    "BATCH_NORM_ACT",
    "BATCH_NORM_ACT_POOL",
    "BATCH_NORM_EXCITE",
    "CUDA_MISSING",
    "LINEAR_ACT",
    "OPERATOR_NAMES",
    "SQUEEZE_EXCITE",
    "WAY_OUT",
    "Operator",
    "batch_norm_statistics",
    "build_info",
    "check_li_conv",
    "dtensor_error",
    "has_adjacent_channels",
    "in_layer",
    "li_block",
    "li_block_backward",
    "li_conv",
    "li_conv_backward",
    "li_conv_explain",
    "missing_activation",
    "mlp",
    "mlp_backward",
    "refuse_onnx",
    "rephrased",
    "wide_dtype",
    "wrong_number",
    "wrong_whole",
    "wrong_words",
]
