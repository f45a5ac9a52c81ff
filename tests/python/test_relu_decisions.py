"""ReLU of half data decides as exact arithmetic does, wherever sums in float32 can tell: no product
is rounded to half before the bias is added."""

import pytest
import torch

from fusewise.functional import linear_act
from linear_reference import DTYPES, make_case, make_mlp_case

SIZES = [("fp16", 1000, 784, 63), ("bf16", 129, 1024, 1001), ("bf16", 4099, 3, 8)]


@pytest.mark.parametrize("dtypes, m, k, n", SIZES)
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "no_bias"))
def test_sizes_that_are_no_multiple_of_8(device, dtypes, m, k, n, bias):
    make_case((m,), k, n, device, DTYPES[dtypes], "relu", bias).check_every_implementation()


@pytest.mark.parametrize("dtypes", ("fp16", "bf16"))
def test_hidden_sizes_that_are_no_multiple_of_8(device, dtypes):
    make_mlp_case((129,), (784, 63, 1001, 3), device, DTYPES[dtypes]).check_every_implementation()


@pytest.mark.parametrize("dtypes", ("fp16", "bf16", "bf16-fp32"))
@pytest.mark.parametrize("layout", ("contiguous", "row_slice", "transposed"))
def test_any_leading_dimensions(device, dtypes, layout):
    """Of x that is no matrix, torch's own linear may round the product first."""
    case = make_case((3, 5, 40), 65, 63, device, DTYPES[dtypes], "relu", layout=layout)
    case.check_every_implementation()


@pytest.mark.parametrize("dtypes", ("fp16", "bf16"))
@pytest.mark.parametrize("k, n", [(3, 8), (24, 17), (17, 24), (64, 64)])
def test_a_product_that_the_bias_cancels(device, dtypes, k, n):
    """1 ± 2^-14 and a bias of -1: rounded to half first, every product would be 1 and every z 0."""
    case = make_case((33,), k, n, device, DTYPES[dtypes], "relu")
    signs = (torch.arange(33, device=device) % 2 * 2 - 1).to(case.x.dtype)
    for t in (case.x, case.w):
        t.zero_()[:, 0] = 1
    case.x[:, 1], case.w[:, 1] = signs * 2**-7, 2**-7
    case.b.fill_(-1)
    case.check_every_implementation()
    y = linear_act(*case.arguments)
    assert torch.equal(y, (signs * 2**-14).relu()[:, None].expand_as(y))
