"""A GPU that a build has no kernels for gets an error that says so, and what to do."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusewise._ops import _library
from fusewise._ops._architectures import runs_on

ROOT = Path(__file__).parents[2]

DEFAULT = "90-real 90-virtual"
FAILED = RuntimeError("CUDA: looking for kernels for this GPU failed: no kernel image")


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("90-real", (9, 0), True),
        ("90-real", (8, 9), False),
        ("90-real", (10, 0), False),
        ("80-real", (8, 6), True),
        ("86-real", (8, 0), False),
        (DEFAULT, (8, 0), False),
        (DEFAULT, (10, 0), True),
        (DEFAULT, (12, 0), True),
        ("80 86", (9, 0), True),
        ("native", (7, 5), True),
    ],
)
def test_which_gpus_a_build_runs_on(architectures, capability, runs):
    assert runs_on(capability, architectures) is runs


def test_the_release_runs_on_every_supported_gpu():
    presets = json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
    (release,) = (preset for preset in presets if preset["name"] == "release")
    built = release["cacheVariables"]["CMAKE_CUDA_ARCHITECTURES"].split(";")
    for number in (80, 86, 89, 90, 100, 120):
        assert f"{number}-real" in built
    assert runs_on((13, 0), " ".join(built))


def test_the_default_build_runs_on_newer_gpus():
    """It has PTX of its newest architecture."""
    if _library.CUDA_MISSING:
        pytest.skip("built without CUDA")
    built = _library.build_info()["architectures"].split()
    newest = max(int(name.split("-")[0]) for name in built)
    assert f"{newest}-virtual" in built


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that CUDA is there, built for `architectures`, on a GPU of a capability."""

    def pretend(capability, architectures=DEFAULT):
        monkeypatch.setattr(_library, "CUDA_MISSING", "")
        monkeypatch.setattr(_library, "build_info", lambda: {"architectures": architectures})
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))

    return pretend


def test_an_unsupported_gpu_is_named_with_the_build_and_the_remedy(gpu):
    error = _library.rephrased(FAILED, b=None, x=gpu((8, 6)))
    assert str(error) == (
        "x: is on cuda:1, which is sm_86, but this build of fusewise is for 90-real 90-virtual; "
        "build it for this GPU: `CUDAARCHS=86 pip install .` in its source tree"
    )
    layer = RuntimeError(f"layer 2: {FAILED}")
    assert "which is sm_86" in str(_library.rephrased(layer, x=gpu((8, 6))))


def test_a_gpu_that_no_build_supports(gpu):
    error = _library.rephrased(FAILED, x=gpu((7, 5)))
    assert str(error).endswith("its kernels need sm_80 or newer")


def test_other_errors_and_supported_gpus_are_left_alone(gpu):
    assert _library.rephrased(FAILED, x=gpu((9, 0))) is FAILED
    other = RuntimeError("x: expected 4 dimensions")
    assert _library.rephrased(other, x=gpu((8, 6))) is other
