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
from .autoencoder import (
    AUTOENCODER_WEIGHTS,
    autoencoder,
    autoencoder_backward,
    autoencoder_explain,
    autoencoder_score_dtype,
    autoencoder_wrong_type,
    check_autoencoder,
    check_rows,
)
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
from .squeeze_excite import (
    SQUEEZE_EXCITE_ACTIVATIONS,
    SQUEEZE_EXCITE_GATES,
    check_squeeze_excite,
    missing_activation,
    saved_dtype,
    squeeze_excite,
    squeeze_excite_backward,
    squeeze_excite_explain,
    wrong_type,
)

__all__ = [
    "AUTOENCODER_WEIGHTS",
    "ACTIVATIONS",
    "CUDA_MISSING",
    "SQUEEZE_EXCITE_ACTIVATIONS",
    "SQUEEZE_EXCITE_GATES",
    "WAY_OUT",
    "autoencoder",
    "autoencoder_backward",
    "autoencoder_explain",
    "autoencoder_score_dtype",
    "autoencoder_wrong_type",
    "build_info",
    "check_autoencoder",
    "check_linear_act",
    "check_rows",
    "check_squeeze_excite",
    "dtensor_error",
    "linear_act",
    "linear_act_backward",
    "linear_act_explain",
    "missing_activation",
    "mlp",
    "mlp_backward",
    "refuse_onnx",
    "rephrased",
    "saved_dtype",
    "squeeze_excite",
    "squeeze_excite_backward",
    "squeeze_excite_explain",
    "wrong_linear_type",
    "wrong_type",
]
