"""Made-up benchmark results in the form that a GPU run gives, without measuring anything."""

from fusewise.bench import runner, schema
from fusewise.bench.cases import select
from fusewise.bench.families.family import FORWARD
from fusewise.bench.statistics import summary


def contender(gpu):
    """Times in µs without noise: `gpu` as GPU time and ten times that as wall time."""
    times = {clock: summary([gpu * factor] * 5) for clock, factor in (("gpu", 1), ("wall", 10))}
    return {**times, "peak_bytes": 1_000_000, "kernels": 2}


def gpu_results(ours=2.0, eager=1.0, compiled=4.0):
    """The blocks of EfficientNet-B4, with two clocks, a group and an unavailable baseline."""
    blocks = select("squeeze_excite", "cuda", "quick", "b4-*")
    rows = [
        {
            "family": "squeeze_excite",
            "case": case.name,
            "mode": FORWARD,
            "shape": list(case.shape),
            "dtype": case.dtype_name,
            "layout": case.layout,
            "parameters": case.extra,
            "group": case.group,
            "count": case.count,
            "floor": {"bytes": 1000, "operations": 10, "us": 1.0, "bound": "bytes"},
            "check": {"tensor": "y", "error": 1e-7, "allowed": 1e-6},
            "implementation": {
                "forward": {"chosen": "general", "declined": {"cluster": "the planes are small"}}
            },
            "contenders": {
                runner.OURS: contender(ours),
                "eager": contender(eager),
                "compile": contender(compiled),
                "naive": {"unavailable": "not built"},
            },
        }
        for case in blocks
    ]
    for row in rows:
        row["against"] = {name: runner.ratios(row, name) for name in ("eager", "compile")}
    return {
        "schema": schema.VERSION,
        "command": "fusewise bench",
        "environment": {"date": "2026-01-01", "load": 0.0, "cores": 2, "cpu": "a CPU"},
        "device": "cuda",
        "set": "quick",
        "baselines": ["eager", "compile", "naive"],
        "ceilings": {
            "copy_bytes_per_second": 1e9,
            "matrix_operations_per_second": {"float16": 1e12},
        },
        "interrupted": False,
        "rows": rows,
        "sums": list(runner.sums(rows, blocks)),
    }
