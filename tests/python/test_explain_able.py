"""What `explain` says can be forced: every instruction set that this CPU has, not the chosen alone.
The tests of every implementation run what it names."""

from pathlib import Path

import pytest

import autoencoder_reference
import batch_norm_excite_reference
import fusewise
import linear_reference
import reference
from fusewise.functional import linear_act, squeeze_excite
from fusewise.models._autoencoder import autoencoder

CPUINFO = Path("/proc/cpuinfo")


@pytest.mark.skipif(not CPUINFO.is_file(), reason="there is no /proc/cpuinfo")
def test_every_instruction_set_can_be_forced():
    flags = set(CPUINFO.read_text().partition("flags")[2].splitlines()[0].split())
    needed = {
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "f16c"},
        "avx2": {"avx2", "fma", "f16c"},
        "portable": set(),
    }
    expected = [name for name, needs in needed.items() if needs <= flags]
    x = linear_reference.make_case((3,), 4, 5)
    images = reference.make_case((2, 4, 3, 3), 2)
    rows = autoencoder_reference.make_case(3, autoencoder_reference.SMALL)
    x.x.requires_grad_()
    images.x.requires_grad_()
    rows.x.requires_grad_()
    records = [
        *fusewise.explain(linear_act, *x.arguments),
        *fusewise.explain(squeeze_excite, *images.arguments),
        *fusewise.explain(autoencoder, *rows.inputs),
        *batch_norm_excite_reference.make_case((2, 4, 3, 3), 2).explained(),
    ]
    assert len(records) == 8
    for record in records:
        assert record.able == expected, record
        assert record.chosen == expected[0], record
