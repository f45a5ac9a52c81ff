"""Several draws that are held to the accuracy rule together: a wrong one among them fails."""

import pytest
import torch

import autoencoder_reference
import linear_reference
from fusewise.functional import mlp
from fusewise.models._autoencoder import autoencoder
from reference import DTYPES


def zeros(y):
    return y * 0


def a_tenth_too_much(y):
    return y * 1.1


def one_wrong_element(y):
    error = torch.zeros_like(y)
    error.flatten()[7] = 0.2 * y.detach().abs().max()
    return y + error


@pytest.mark.parametrize("dtypes", sorted(DTYPES))
@pytest.mark.parametrize("spoil", [zeros, a_tenth_too_much, one_wrong_element])
@pytest.mark.parametrize("family", ["autoencoder", "mlp"])
def test_one_bad_draw_among_good_ones_fails(device, family, spoil, dtypes):
    """Each draw has the room of the one that needs most; a wrong result does not fit into that."""
    if family == "autoencoder":
        check_together, right = autoencoder_reference.check_together, autoencoder
        cases = [
            autoencoder_reference.make_case(5, autoencoder_reference.SMALL, device, DTYPES[dtypes])
            for _ in range(4)
        ]
    else:
        check_together, right = linear_reference.check_together, mlp
        cases = [
            linear_reference.make_mlp_case((5,), (16, 16, 16), device, DTYPES[dtypes])
            for _ in range(4)
        ]
    check_together(*cases)
    calls = []

    def wrong_once(*arguments, **options):
        calls.append(None)
        y = right(*arguments, **options)
        return spoil(y) if len(calls) == 3 else y

    with pytest.raises(AssertionError, match="where .* is allowed|wrong side"):
        check_together(*cases, fn=wrong_once)
