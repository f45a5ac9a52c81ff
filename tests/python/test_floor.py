"""The floor against counts by hand."""

import pytest

from fusewise.bench.families import FAMILIES
from fusewise.bench.families.family import BOTH, FORWARD, Case
from fusewise.bench.floor import Ceilings

# Two samples of 3 channels with 4 x 5 pixels, 2 hidden units: 120 elements.
CASE = Case("squeeze_excite", "", (2, 3, 4, 5), "float16", extra={"reduced": 2})
FAMILY = FAMILIES["squeeze_excite"]
WEIGHTS = 2 * 3 + 2 + 3 * 2 + 3  # w1, b1, w2, b2


def test_bytes_are_counted_once_each():
    # x read, y written; two bytes each.
    assert FAMILY.bytes_moved(CASE, FORWARD) == 2 * (120 + 120 + WEIGHTS) == 514
    # Backward reads x and dy, writes dx; it reads the weights and writes their gradients.
    assert FAMILY.bytes_moved(CASE, BOTH) == 514 + 2 * (3 * 120 + 2 * WEIGHTS) == 1302


def test_operations_are_counted_once_each():
    products = 2 * (2 * 3 * 2)  # of 2 samples, 3 channels and 2 units: multiplied and added
    # Forward: the sum over pixels, both layers, one product for each element of y.
    assert FAMILY.operations(CASE, FORWARD) == 120 + 2 * products + 120 == 288
    # Backward: sum of dy * x; dW1, dW2, dh and dp; dy * g + dp.
    assert FAMILY.operations(CASE, BOTH) == 288 + 240 + 4 * products + 240 == 864


def test_the_floor_is_the_longer_of_the_two_times():
    ceilings = Ceilings(1e9, {"float16": 1e9, "float32": 1e12})
    assert ceilings.floor(1000, 3000, "float16") == {
        "bytes": 1000,
        "operations": 3000,
        "us": pytest.approx(3.0),
        "bound": "operations",
    }
    floor = ceilings.floor(1000, 3000, "float32")
    assert floor["us"] == pytest.approx(1.0) and floor["bound"] == "bytes"
