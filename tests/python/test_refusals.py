"""Tools and tensors that fused operators do not take: an error that names what to do instead."""

import pytest
import torch
from torch import nn

import fusewise
from fusewise.functional import linear_act, mlp, squeeze_excite
from test_parts import PART, pair

SCRIPT = "torch.jit.script cannot compile fusewise's operators; use torch.export"


@pytest.mark.parametrize("kind", PART)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_a_module(kind):
    ours, _, _ = pair(kind, "cpu")
    for model in (ours, nn.Sequential(nn.Identity(), ours)):
        with pytest.raises(RuntimeError, match=SCRIPT):
            torch.jit.script(model)


def calls_linear_act(x: torch.Tensor, w: torch.Tensor):
    return linear_act(x, w)


@pytest.mark.parametrize("function", (calls_linear_act, linear_act, mlp, squeeze_excite))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_a_function(function):
    with pytest.raises(RuntimeError, match=SCRIPT):
        torch.jit.script(function)


@pytest.mark.parametrize("layout", (torch.jagged, torch.strided), ids=str)
@pytest.mark.parametrize("gradient", (True, False), ids=("grad", "no_grad"))
@pytest.mark.parametrize("kind", PART)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(device, kind, gradient, layout):
    ours, _, x = pair(kind, device)
    nested = torch.nested.nested_tensor([x[0], x[0][:1]], layout=layout)
    with (
        torch.set_grad_enabled(gradient),
        pytest.raises(
            RuntimeError,
            match=r"^x: expected a dense tensor, got a nested one; .*fusewise.implementation\(\"to",
        ),
    ):
        ours(nested)


@pytest.mark.parametrize("layout", (torch.jagged, torch.strided), ids=str)
@pytest.mark.parametrize("kind", ("linear_act", "mlp"))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_as_torchs_operators(device, kind, layout):
    """The way out that the error names."""
    ours, _, x = pair(kind, device)
    rows = [x[:2], x[2:]]
    with fusewise.implementation("torch"):
        found = ours(torch.nested.nested_tensor(rows, layout=layout)).unbind()
    torch.testing.assert_close(list(found), [ours(each) for each in rows])


def test_an_exported_program_needs_the_import(run_python, tmp_path):
    """As the README says: the file names operators that only fusewise brings."""
    path = tmp_path / "model.pt2"
    ours, theirs, x = pair("mlp", "cpu")
    torch.export.save(torch.export.export(ours, (x,)), path)
    load = f"import torch; program = torch.export.load({str(path)!r})"
    with pytest.raises(AssertionError, match="fusewise"):
        run_python(load)
    run_python("import fusewise; " + load)
    torch.testing.assert_close(torch.export.load(path).module()(x), theirs(x))
