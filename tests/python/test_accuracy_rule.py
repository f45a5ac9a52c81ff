"""The comparator must pass what is right and fail what is wrong."""

import math

import pytest
import torch

from fusewise.bench import accuracy
from fusewise.bench.accuracy import Expected, Results
from reference import assert_close

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


@pytest.fixture(params=DTYPES, ids=str)
def results(request):
    """A reference, torch's rounding of it, and the scale."""
    reference = torch.randn(7, 11, dtype=torch.float64)
    return reference, reference.to(request.param), reference.abs().max()


def ulps(tensor, count):
    """`count` steps of the tensor's last bit away, each element at its own size."""
    eps = torch.finfo(tensor.dtype).eps
    exponent = tensor.double().abs().log2().floor()
    return (tensor.double() + count * eps * exponent.exp2()).to(tensor.dtype)


def test_equal_results_pass(results):
    reference, eager, scale = results
    assert_close("y", eager, eager, reference, scale)


def test_one_ulp_off_passes(results):
    reference, eager, scale = results
    off = ulps(eager, 1)
    assert not torch.equal(off, eager)
    assert_close("y", off, eager, reference, scale)


def test_a_single_number(results):
    reference, eager, scale = results
    reference, eager = reference[0, 0], eager[0, 0]
    assert_close("loss", ulps(eager, 1), eager, reference, scale)
    with pytest.raises(AssertionError, match="1 of 1 elements"):
        assert_close("loss", ulps(eager, 2000), eager, reference, scale)


def test_many_ulps_off_fails(results):
    reference, eager, scale = results
    with pytest.raises(AssertionError, match="y: off by"):
        assert_close("y", ulps(eager, 20), eager, reference, scale)


def test_as_far_as_torch_passes_and_much_farther_fails(results):
    reference, eager, scale = results
    coarse = ulps(eager, 50)
    assert_close("y", coarse, coarse, reference, scale)
    with pytest.raises(AssertionError, match="off by"):
        assert_close("y", ulps(eager, 200), coarse, reference, scale)


def test_what_was_cast_has_the_eps_of_what_it_was_computed_in():
    reference = torch.randn(7, 11, dtype=torch.float64)
    eager, scale = reference.float(), reference.abs().max()
    coarse = ulps(reference.bfloat16(), 1).float()
    with pytest.raises(AssertionError, match="y: off by"):
        assert_close("y", coarse, eager, reference, scale)
    assert_close("y", coarse, eager, reference, scale, computed_in=torch.bfloat16)
    with pytest.raises(AssertionError, match="y: off by"):
        assert_close("y", eager * 1.1, eager, reference, scale, computed_in=torch.bfloat16)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros_like,
        torch.ones_like,
        torch.neg,
        lambda t: t * 1.1,
        lambda t: t.flip(0),
        lambda t: t.roll(1, 1),
    ],
    ids=["zeros", "ones", "negated", "scaled", "swapped", "shifted"],
)
def test_wrong_results_fail(results, wrong):
    reference, eager, scale = results
    with pytest.raises(AssertionError, match="off by"):
        assert_close("y", wrong(eager), eager, reference, scale)


def test_one_wrong_element_fails(results):
    reference, eager, scale = results
    ours = eager.clone()
    ours[3, 4] += 1
    with pytest.raises(AssertionError, match="1 of 77 elements"):
        assert_close("y", ours, eager, reference, scale)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_should_be_finite_fails(results, value):
    reference, eager, scale = results
    ours = eager.clone()
    ours[2, 5] = value
    with pytest.raises(AssertionError, match=r"1 elements, the first at \[2, 5\]"):
        assert_close("y", ours, eager, reference, scale)


def test_nan_must_be_exactly_where_torch_has_it(results):
    reference, eager, scale = results
    reference[1, 1] = eager[1, 1] = math.nan
    assert_close("y", eager, eager, reference, scale)
    ours = eager.clone()
    ours[1, 1] = 0
    with pytest.raises(AssertionError, match="NaN"):
        assert_close("y", ours, eager, reference, scale)
    everywhere = torch.full_like(eager, math.nan)
    with pytest.raises(AssertionError, match="NaN"):
        assert_close("y", everywhere, eager, reference, scale)


def test_infinity_must_be_where_both_have_it(results):
    reference, eager, scale = results
    reference[1, 1] = eager[1, 1] = math.inf
    assert_close("y", eager, eager, reference, scale)
    for value in (0, -math.inf, math.nan):
        ours = eager.clone()
        ours[1, 1] = value
        with pytest.raises(AssertionError):
            assert_close("y", ours, eager, reference, scale)


def test_where_only_torch_overflows_we_may_too_or_not(results):
    reference, eager, scale = results
    eager[1, 1] = math.inf
    assert_close("y", eager, eager, reference, scale)
    assert_close("y", reference.to(eager.dtype), eager, reference, scale)


def test_an_error_beside_a_nan_is_seen(results):
    reference, eager, scale = results
    reference[1, 1] = eager[1, 1] = math.nan
    ours = eager.clone()
    ours[0, 0] += 1
    with pytest.raises(AssertionError, match="off by"):
        assert_close("y", ours, eager, reference, scale)


def test_shape_and_dtype_count(results):
    reference, eager, scale = results
    with pytest.raises(AssertionError, match="shape"):
        assert_close("y", eager[:1], eager, reference, scale)
    other = torch.float32 if eager.dtype != torch.float32 else torch.float64
    with pytest.raises(AssertionError, match=str(other)):
        assert_close("y", eager.to(other), eager, reference, scale)


def test_empty_results_pass():
    empty = torch.empty(0, 3)
    assert_close("y", empty, empty, empty.double(), 0)


@pytest.mark.parametrize("shape", [(7, 11), (1, 3, 50, 4), (2, 3, 1, 1)], ids=str)
def test_large_tensors_are_compared_in_pieces(monkeypatch, shape):
    """The same verdicts and places, whatever the pieces and the layout."""
    monkeypatch.setattr(accuracy, "_PIECE", 10)
    reference = torch.randn(shape, dtype=torch.float64)
    eager, scale = reference.half().mT.contiguous().mT, reference.abs().max()
    assert len(list(accuracy.pieces(eager, reference))) > 1 or reference.numel() <= 10
    assert_close("y", eager, eager, reference, scale)
    last = tuple(size - 1 for size in shape)
    for value, message in ((math.nan, "NaN is not where torch has it"), (9.0, "off by")):
        ours = eager.clone()
        ours[last] = value
        with pytest.raises(AssertionError, match=message) as raised:
            assert_close("y", ours, eager, reference, scale)
        counted = f"1 of {ours.numel()} elements"
        place = f"1 elements, the first at {list(last)}"
        assert (place if math.isnan(value) else counted) in str(raised.value)


def test_a_reference_in_fp32_serves_half_data():
    reference = torch.randn(7, 11)
    eager, scale = reference.half(), reference.abs().max()
    assert_close("y", ulps(eager, 1), eager, reference, scale)
    with pytest.raises(AssertionError, match="off by"):
        assert_close("y", ulps(eager, 20), eager, reference, scale)


def test_the_result_of_many_outputs_is_the_wrong_or_the_nearest():
    right = torch.randn(7, 11, dtype=torch.float64)
    eager, near = right.float(), ulps(right.float(), 1)
    expected = {name: Expected(right, 4.0) for name in ("y", "dx", "dw")}

    def check(*outputs):
        named = dict(zip(expected, outputs, strict=False))
        torch_outputs = dict.fromkeys(expected, eager)
        return accuracy.check(Results(named, expected), Results(torch_outputs, expected))

    found = check(eager, near, eager)
    assert found.passed and found.tensor == "dx" and 0 < found.error <= found.allowed
    assert str(found).startswith("dx: off by ")
    found = check(eager, near, eager + 1)
    assert not found.passed and found.tensor == "dw" and found.error > found.allowed
    assert check(near).tensor == "y"
