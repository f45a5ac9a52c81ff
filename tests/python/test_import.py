"""What `import fusewise` needs, loads, and says where something is missing."""

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fusewise
from fusewise import _ops

pytestmark = pytest.mark.any_device


def test_version_is_the_headers():
    header = Path(__file__).parents[2] / "include" / "fusewise" / "version.h"
    assert fusewise.__version__ == re.search(r'"(.+)"', header.read_text())[1]
    assert _ops.build_info()["fusewise"] == fusewise.__version__


def test_public_names():
    for name in fusewise.__all__:
        assert hasattr(fusewise, name)
    assert (Path(fusewise.__file__).parent / "py.typed").is_file()


def test_import_is_light(run_python):
    """Beyond torch only fusewise itself is loaded: nothing for plots, tables or compilation."""
    loaded = run_python(
        """
        import sys, torch
        before = set(sys.modules)
        import fusewise
        print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
        """
    )
    assert loaded.split() == ["fusewise"]


def test_import_does_not_start_cuda(run_python):
    run_python("import fusewise, torch; assert not torch.cuda.is_initialized()")


@pytest.mark.parametrize("version", ["2.10.1+cpu", "1.13.0"])
def test_an_older_torch_is_named(version):
    with pytest.raises(
        ImportError, match=f"needs torch 2.11 or newer; this is torch {re.escape(version)}"
    ):
        fusewise._check_torch(version)


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.15.0a0+git123", "3.0.0"])
def test_a_newer_torch_is_taken(version):
    fusewise._check_torch(version)


CUDA_TENSOR = """
    import torch
    {before}
    import fusewise
    from torch._subclasses import FakeTensorMode
    from fusewise import _ops
    module = fusewise.nn.SqueezeExcitation(4, 2, 'relu')
    assert module(torch.randn(1, 4, 3, 3)).shape == (1, 4, 3, 3)
    with FakeTensorMode():
        x = torch.empty(1, 4, 3, 3, device="cuda")
    print(_ops.rephrased(NotImplementedError("no kernel"), x=x))
"""


def test_another_cuda_major_names_both(run_python):
    library = Path(fusewise.__file__).parent / "_lib" / "libfusewise_torch_cuda.so"
    if not library.is_file():
        pytest.skip("this build has no CUDA part")
    said = run_python(CUDA_TENSOR.format(before="torch.version.cuda = '12.8'"))
    assert said.startswith("x: is on cuda:0, but fusewise's CUDA part is built for CUDA 13")
    assert "this torch has CUDA 12.8" in said


def test_a_torch_without_cuda(run_python):
    said = run_python(CUDA_TENSOR.format(before="torch.version.cuda = None"))
    assert said.strip() == "x: is on cuda:0, but this torch has no CUDA"


# Makes one library look absent.
HIDE = """
    import pathlib
    is_file = pathlib.Path.is_file
    pathlib.Path.is_file = lambda path: path.name != "{library}" and is_file(path)
"""


def test_a_build_without_cuda(run_python):
    before = "torch.version.cuda = '13.0'" + HIDE.format(library="libfusewise_torch_cuda.so")
    said = run_python(CUDA_TENSOR.format(before=before))
    assert said.startswith("x: is on cuda:0, but this build of fusewise has no CUDA part")


def test_a_source_tree_without_a_build(run_python):
    said = run_python(
        HIDE.format(library="libfusewise_torch.so")
        + """
    try:
        import fusewise
    except ImportError as error:
        print(error)
        """
    )
    assert "compiled operators are missing" in said and "make build" in said


def test_other_failures_keep_their_error():
    error = RuntimeError("x: expected 4 dimensions")
    assert _ops.rephrased(error, x=torch.ones(1)) is error
    with FakeTensorMode():
        other = torch.empty(1, device="xla")
    assert str(_ops.rephrased(NotImplementedError(), x=other)).startswith(
        "x: expected a tensor on cpu or cuda"
    )
