"""The floor against counts by hand: what must cross memory, and how long it takes at least."""

import pytest

from fusewise.bench.families.family import Traffic
from fusewise.bench.floor import Ceilings, _cpu_cache_bytes, memory_bytes


@pytest.mark.parametrize(
    "traffic, buffers, moved",
    [
        # The cache has 1000 bytes.
        (Traffic(data=600, weights=0), 2, 600),  # 1200 in turn: each byte once
        (Traffic(data=500, weights=0), 2, 0),  # all buffers stay
        (Traffic(data=1001, weights=0), 1, 1001),
        (Traffic(data=600, weights=1000), 2, 600),  # weights stay from call to call
        (Traffic(data=600, weights=1300), 2, 600 + 300),  # as far as there is room
        (Traffic(data=600, weights=0, again=1000), 2, 600),  # x stays until backward
        (Traffic(data=6000, weights=100, again=2500), 2, 6000 + 1500),
    ],
)
def test_what_fits_the_cache_does_not_cross_memory(traffic, buffers, moved):
    assert memory_bytes(traffic, buffers, cache=1000) == moved


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


def test_the_last_caches_of_all_cores_are_added(tmp_path):
    """Four cores with an L2 each, and two L3 of 8 and 16 KB, each shared by two of them."""
    for core in range(4):
        pair, size = ("0-1", "8K") if core < 2 else ("2-3", "16K")
        caches = {"index2": ("2", f"{core}", "1K"), "index3": ("3", pair, size)}
        for name, texts in caches.items():
            folder = tmp_path / f"cpu{core}" / "cache" / name
            folder.mkdir(parents=True)
            for file, text in zip(("level", "shared_cpu_list", "size"), texts, strict=True):
                (folder / file).write_text(f"{text}\n")
    assert _cpu_cache_bytes(tmp_path, {0, 1, 2, 3}) == (8 + 16) * 1024
    assert _cpu_cache_bytes(tmp_path, {0, 1}) == 8 * 1024  # those that this process may use
    assert _cpu_cache_bytes(tmp_path, {9}) == 32 << 20  # where the system does not tell
