"""Large results ask for large pages; what the caller brings is left as it is."""

from pathlib import Path

import pytest
import torch

from fusewise.functional import squeeze_excite

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(tensor):
    """The flags of the mapping in whose middle a tensor's middle lies."""
    wanted = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin <= wanted < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("the tensor lies in no mapping")


@pytest.mark.skipif(not _ENABLED.exists(), reason="this kernel has no transparent huge pages")
def test_results_of_32_mb_ask_for_large_pages():
    w, b = torch.ones(1, 1), torch.ones(1)
    x = torch.zeros(1, 1, 1, 1).expand(1, 1, 2**12, 2**11 + 1)
    before = torch.zeros(2**23)
    y = squeeze_excite(x, w, b, w, b, activation="silu")
    assert y.nbytes > 2**25
    assert "hg" in flags_of(y)
    assert "hg" not in flags_of(before)
