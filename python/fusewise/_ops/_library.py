"""Loading of the two libraries: schemas with CPU kernels, and CUDA kernels."""

from pathlib import Path

import torch

# The major version that the CUDA library is linked for; the stable ABI does not cover CUDA's own.
CUDA_MAJOR = "13"
_OLDEST_GPU = (8, 0)  # that the kernels can be built for

_FOLDER = Path(__file__).parent.parent / "_lib"


def _load() -> str:
    """Loads what this torch can run; returns why CUDA tensors cannot be served, or ''."""
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


def build_info() -> dict[str, str]:
    """How the loaded libraries were built: compiler, instruction sets, CUDA version, ..."""
    text = torch.ops.fusewise._build_info()
    if not CUDA_MISSING:
        text += "\n" + torch.ops.fusewise._cuda_build_info()
    return dict(line.split("\t", 1) for line in text.splitlines() if line)


def runs_on(capability: tuple[int, int], architectures: str) -> bool:
    """Whether a GPU runs a build for these architectures, named as by CMake: "90-real 90-virtual".

    Binaries run on GPUs of the same generation that are as new, PTX on all that are as new. Of
    other names ("native", "all", "90a") nothing is known; then the answer is yes.
    """
    for name in architectures.split():
        number, _, kind = name.partition("-")
        if not number.isdigit():
            return True
        built = divmod(int(number), 10)
        if built <= capability and (kind != "real" or built[0] == capability[0]):
            return True
    return False


def _unsupported_gpu(tensor: torch.Tensor) -> str:
    """Why a tensor's GPU has no kernels in this build, and what to do; '' where it has some."""
    capability = torch.cuda.get_device_capability(tensor.device)
    built = build_info().get("architectures", "")
    if runs_on(capability, built):
        return ""
    number = "".join(map(str, capability))
    if capability < _OLDEST_GPU:
        remedy = f"its kernels need sm_{_OLDEST_GPU[0]}{_OLDEST_GPU[1]} or newer"
    else:
        remedy = f"build it for this GPU: `CUDAARCHS={number} pip install .` in its source tree"
    return f"which is sm_{number}, but this build of fusewise is for {built}; {remedy}"


def rephrased(error: RuntimeError, **tensors: torch.Tensor | None) -> RuntimeError:
    """The error that an operator's failure should be.

    The stable ABI turns every exception into a RuntimeError, and the dispatcher says of tensors
    without a kernel only that there is none; here, on the error path alone, both become clear.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return error
    if str(error).startswith("out of memory: "):
        return torch.OutOfMemoryError(str(error))
    if "CUDA: " in str(error) and not CUDA_MISSING:
        for name, tensor in tensors.items():
            if tensor is not None and tensor.is_cuda and (reason := _unsupported_gpu(tensor)):
                return RuntimeError(f"{name}: is on {tensor.device}, {reason}")
    if isinstance(error, NotImplementedError):
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.layout is not torch.strided or tensor.is_nested:
                kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
                return RuntimeError(f"{name}: expected a dense tensor, got a {kind} one")
            if tensor.is_quantized:
                return RuntimeError(f"{name}: expected a floating dtype, got {tensor.dtype}")
            if tensor.is_cuda and CUDA_MISSING:
                return RuntimeError(f"{name}: is on {tensor.device}, but {CUDA_MISSING}")
            if tensor.device.type not in ("cpu", "cuda", "meta"):
                return RuntimeError(f"{name}: expected cpu or cuda, got {tensor.device}")
    return error
