"""Names of torch that it does not promise to keep: all in one file, and they do what it says."""

import re
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

import fusewise
from fusewise import _torch_private as private

pytestmark = pytest.mark.any_device


def test_private_names_are_in_one_file():
    pattern = re.compile(r"torch(\.\w+)*\._[a-z]\w*|\b_dynamo\b|\b_pytree\b|\b_current_level\b")
    folder = Path(fusewise.__file__).parent
    found = [
        f"{path.relative_to(folder)}: {match[0]}"
        for path in folder.rglob("*.py")
        if path.name != "_torch_private.py"
        for match in pattern.finditer(path.read_text().replace("torch.ops.fusewise._", ""))
    ]
    assert not found


def test_autocast():
    assert not private.is_any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert private.is_any_autocast_enabled()


def test_transforms():
    seen = []

    def look(x):
        seen.append(private.needs_formula())
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    assert seen == [False, True, True]


def test_forward_mode():
    assert not private.needs_formula()
    with forward_ad.dual_level():
        assert private.needs_formula()
    assert not private.needs_formula()


def test_batched_gradients():
    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            seen.append(private.is_batched_gradient(dy))
            return dy

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Identity.apply(x), x, torch.ones(3))
    torch.autograd.grad(Identity.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert seen == [False, True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_tracing():
    seen = []

    def look(x):
        seen.append(private.jit_tracing_state() is not None)
        return x + 1

    look(torch.ones(1))
    torch.jit.trace(look, torch.ones(1), check_trace=False)
    assert seen == [False, True]


def test_settings_of_products():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("tf32", "ieee"):
            matmul.fp32_precision = precision
            assert private.fp32_precision("cuda", "matmul") == precision
    finally:
        matmul.fp32_precision = before
    for name, allows in (
        ("allow_fp16_reduced_precision_reduction", private.allows_fp16_reduced_sums),
        ("allow_bf16_reduced_precision_reduction", private.allows_bf16_reduced_sums),
    ):
        before = getattr(matmul, name)
        try:
            for allowed in (False, True):
                setattr(matmul, name, allowed)
                assert allows()[0] is allowed
        finally:
            setattr(matmul, name, before)


def test_constants_of_a_compiled_function():
    calls = []

    @private.constant_when_compiled
    def setting():
        calls.append(0)
        return 3

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        return x + setting()

    assert compiled(torch.ones(1)).item() == 4
    traced = len(calls)
    assert compiled(torch.zeros(1)).item() == 3
    assert len(calls) == traced


def test_leaves():
    tree = {"a": [1, (2,)], "b": 3}
    assert private.tree_leaves(tree) == [1, 2, 3]
    leaves, form = private.tree_flatten(tree)
    assert private.tree_unflatten([2 * leaf for leaf in leaves], form) == {"a": [2, (4,)], "b": 6}


def test_copies_of_a_list():
    into = [torch.zeros(2), torch.zeros(3, dtype=torch.float16)]
    private.copy_each(into, [torch.ones(2), torch.ones(3, dtype=torch.float16)])
    assert all(bool(t.all()) for t in into)
