"""Loads the two libraries: one with the schemas and CPU kernels, one with the CUDA kernels."""

import sys
from pathlib import Path

import torch

from ._architectures import why_unsupported

# The major version that the CUDA library is linked against: torch's stable ABI does not cover CUDA.
CUDA_MAJOR = "13"

_FOLDER = Path(__file__).parent.parent / "_lib"


def _load() -> str:
    """Loads the libraries that this torch can run; returns why CUDA is not available, or ''."""
    library = _FOLDER / "libfusewise_torch.so"
    if not library.is_file():
        raise ImportError(
            "fusewise: the compiled operators are missing from this source tree; "
            "run `make build`, or install the package with `pip install .`"
        )
    torch.ops.load_library(library)
    cuda_library = _FOLDER / "libfusewise_torch_cuda.so"
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    if not cuda_library.is_file():
        return "this build of fusewise has no CUDA part; build it where nvcc is on the path"
    if torch.version.cuda.split(".")[0] != CUDA_MAJOR:
        return (
            f"fusewise's CUDA part is built for CUDA {CUDA_MAJOR}, this torch has CUDA "
            f"{torch.version.cuda}; install a torch with CUDA {CUDA_MAJOR}"
        )
    torch.ops.load_library(cuda_library)
    return ""


CUDA_MISSING = _load()


OPERATOR_NAMES = torch.ops.fusewise._operators().split()


def build_info() -> dict[str, str]:
    """How the loaded libraries were built: compiler, instruction sets, CUDA version, ..."""
    text = torch.ops.fusewise._build_info()
    if not CUDA_MISSING:
        text += "\n" + torch.ops.fusewise._cuda_build_info()
    return dict(line.split("\t", 1) for line in text.splitlines() if line)


WAY_OUT = 'use `with fusewise.implementation("torch"):`, which runs torch\'s own operators instead'


def refuse_onnx(operator: str) -> None:
    """Raises during an ONNX export, because ONNX has no fused operators."""
    onnx = sys.modules.get("torch.onnx")  # importing it here would take longer than all of fusewise
    if onnx is not None and onnx.is_in_onnx_export():
        raise RuntimeError(f"{operator}: ONNX has no such operator; {WAY_OUT}")


def dtensor_error(name: str, tensor: torch.Tensor | None) -> RuntimeError | None:
    """The error for parameters distributed by tensor parallelism or by an inner `fully_shard`."""
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: no DTensor exists
    if module is None or not isinstance(tensor, module.DTensor):
        return None
    return RuntimeError(
        f"{name}: expected a plain tensor, got a DTensor, which fusewise does not take; apply "
        "fully_shard to the whole fusewise module, not to its layers, and leave it out of a "
        f"tensor-parallel plan; or {WAY_OUT}"
    )


def rephrased(error: Exception, **tensors: torch.Tensor | None) -> Exception:
    """Turns an operator's error into the one that the user should see.

    The stable ABI turns every exception into a RuntimeError. For a tensor without a kernel, the
    dispatcher only says that there is none. The C++ core's list of implementations does not include
    "torch". This corrects all three, and only runs after an error.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return error
    if str(error).startswith("out of memory: "):
        return torch.OutOfMemoryError(str(error))
    if "implementation: " in str(error):
        return RuntimeError(f"{error}; 'torch' would take it")
    for name, tensor in tensors.items():
        if clearer := dtensor_error(name, tensor):
            return clearer
    if isinstance(error, NotImplementedError):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.layout is not torch.strided or tensor.is_nested:
                kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
                return RuntimeError(
                    f"{name}: expected a dense tensor, got a {kind} one; convert it first "
                    f"(to_padded_tensor, to_dense); for a linear layer you can also {WAY_OUT}"
                )
            if tensor.is_quantized:
                return RuntimeError(f"{name}: expected a floating dtype, got {tensor.dtype}")
            if tensor.is_cuda and CUDA_MISSING:
                return RuntimeError(f"{name}: is on {tensor.device}, but {CUDA_MISSING}")
            if tensor.device.type not in ("cpu", "cuda", "meta"):
                return RuntimeError(
                    f"{name}: expected a tensor on cpu or cuda, got one on {tensor.device}"
                )
    if "CUDA: " in str(error) and not CUDA_MISSING:
        for name, tensor in tensors.items():
            if tensor is None or not tensor.is_cuda:
                continue
            capability = torch.cuda.get_device_capability(tensor.device)
            if reason := why_unsupported(capability, build_info()["architectures"]):
                return RuntimeError(f"{name}: is on {tensor.device}, {reason}")
    return error
