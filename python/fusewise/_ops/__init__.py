"""Loads the operator libraries and adds what the stable ABI cannot: fake kernels and torch's own
error types. Everything here is private; `fusewise.functional` is the door."""

from . import _flops  # noqa: F401 - registers what torch's counter of operations asks for
from ._library import (
    CUDA_MISSING,
    WAY_OUT,
    build_info,
    dtensor_error,
    refuse_onnx,
    rephrased,
)
from ._operator import Operator, wide_dtype
from .autoencoder import AUTOENCODER, AUTOENCODER_WEIGHTS
from .linear_act import (
    ACTIVATIONS,
    check_linear_act,
    linear_act,
    linear_act_backward,
    linear_act_explain,
    mlp,
    mlp_backward,
    wrong_linear_type,
)
from .squeeze_excite import SQUEEZE_EXCITE, missing_activation

__all__ = [
    "ACTIVATIONS",
    "AUTOENCODER",
    "AUTOENCODER_WEIGHTS",
    "CUDA_MISSING",
    "SQUEEZE_EXCITE",
    "WAY_OUT",
    "Operator",
    "build_info",
    "check_linear_act",
    "dtensor_error",
    "linear_act",
    "linear_act_backward",
    "linear_act_explain",
    "missing_activation",
    "mlp",
    "mlp_backward",
    "refuse_onnx",
    "rephrased",
    "wide_dtype",
    "wrong_linear_type",
]
