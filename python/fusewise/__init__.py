"""Fused neural-network operators that move each byte once.

`fusewise.nn` has modules, `fusewise.functional` has functions and `fusewise.models` has whole
models. `fusewise.optimize` swaps fused modules into a model that you have.
`fusewise.implementation` forces an implementation. `fusewise.explain` reports which one runs, and
why. `fusewise.graphed` runs a model as CUDA graphs.
"""

import re
from pathlib import Path

import torch

_TORCH_NEEDED = (2, 11)


def _check_torch(version: str) -> None:
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _TORCH_NEEDED:
        needed = ".".join(str(part) for part in _TORCH_NEEDED)
        raise ImportError(f"fusewise needs torch {needed} or newer; this is torch {version}")


def _find_version() -> str:
    """From the C++ header in a source tree; from the package's metadata if it is installed."""
    header = Path(__file__).parents[2] / "include" / "fusewise" / "version.h"
    if header.is_file():
        return re.search(r'FUSEWISE_VERSION "(.+)"', header.read_text())[1]
    from importlib import metadata

    return metadata.version("fusewise")


_check_torch(torch.__version__)
__version__ = _find_version()

from . import (  # noqa: E402 - the libraries load only under a torch that fits them
    functional,
    models,
    nn,
)
from ._explain import explain  # noqa: E402
from ._settings import implementation  # noqa: E402
from .graphed import graphed  # noqa: E402
from .rewrite import optimize  # noqa: E402

__all__ = [
    "__version__",
    "explain",
    "functional",
    "graphed",
    "implementation",
    "models",
    "nn",
    "optimize",
]
