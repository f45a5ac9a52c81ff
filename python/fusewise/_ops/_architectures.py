"""Which GPUs a build of the CUDA kernels runs on."""

_OLDEST = (8, 0)  # the oldest compute capability that the kernels can be built for


def runs_on(capability: tuple[int, int], architectures: str) -> bool:
    """Whether a GPU can run a build for these architectures, in CMake's names: "90-real
    90-virtual".

    A binary runs on GPUs of the same major version with the same or a higher minor version. PTX
    runs on all GPUs that are as new or newer. Other names ("native", "all", "90a") are not
    interpreted; for them the answer is yes.
    """
    for name in architectures.split():
        number, _, kind = name.partition("-")
        if not number.isdigit():
            return True
        built = divmod(int(number), 10)
        if built <= capability and (kind != "real" or built[0] == capability[0]):
            return True
    return False


def why_unsupported(capability: tuple[int, int], architectures: str) -> str:
    """Why a build has no kernels for a GPU, and what to do about it; '' if it has some."""
    if runs_on(capability, architectures):
        return ""
    number = "".join(map(str, capability))
    if capability < _OLDEST:
        remedy = f"its kernels need sm_{_OLDEST[0]}{_OLDEST[1]} or newer"
    else:
        remedy = f"build it for this GPU: `CUDAARCHS={number} pip install .` in its source tree"
    return f"which is sm_{number}, but this build of fusewise is for {architectures}; {remedy}"
