"""The schema of results.json, and its reader. docs/benchmarking.md describes it in words.

VERSION goes up with every change that an older reader could not handle.
"""

import json
import math
from pathlib import Path

from .._usage import UsageError

VERSION = 2

_NUMBER = (int, float)


class _Optional:
    """A field that may be missing."""

    def __init__(self, form):
        self.form = form


class _Nullable:
    """A field that may be null."""

    def __init__(self, form):
        self.form = form


# A form is a type, a tuple of types, [form] for a list, {"field": form} for an object with these
# fields, or {str: form} for an object with any fields.
_TIMES = {"median": _NUMBER, "quartiles": [_NUMBER], "samples": [_NUMBER]}
_RATIO = {"ratio": _NUMBER, "interval": [_NUMBER], "verdict": str}
_FLOOR = {
    "bytes": int,
    "touched_bytes": _Optional(int),
    "operations": int,
    "us": _NUMBER,
    "bound": _Optional(str),
}
_CONTENDER = {
    "unavailable": _Optional(str),
    "wall": _Optional(_TIMES),
    "gpu": _Optional(_TIMES),
    "peak_bytes": _Optional(int),
    "kernels": _Optional(int),
}
_ROW = {
    "family": str,
    "case": str,
    "mode": str,
    "shape": [int],
    "dtype": str,
    "layout": str,
    "parameters": {str: (int, str)},
    "group": (str, type(None)),
    "count": int,
    "models": _Optional({str: int}),
    "held_out": _Optional(bool),
    "floor": _Optional(_FLOOR),
    "failed": _Optional(str),
    "check": _Optional({"tensor": str, "error": _NUMBER, "allowed": _NUMBER}),
    "implementation": _Optional({str: {"chosen": str, "declined": {str: str}}}),
    "contenders": _Optional({str: _CONTENDER}),
    "against": _Optional({str: {str: _RATIO}}),
    "host": _Optional(_Nullable({"overhead_us": _NUMBER, "empty_us": _NUMBER})),
}
_SUM = {
    "group": str,
    "mode": str,
    "cases": int,
    "count": int,
    "floor": _FLOOR,
    "contenders": {str: {str: {"median": _NUMBER}}},
    "against": {str: {str: _RATIO}},
}
_MODEL = {
    "model": str,
    "mode": str,
    "batch": int,
    "against": str,
    "clock": str,
    "mean": _NUMBER,
    "blocks": int,
    "slower": int,
}
_CEILINGS = {
    "copy_bytes_per_second": _NUMBER,
    "matrix_operations_per_second": {str: _NUMBER},
    "raised": _Optional({str: str}),
}
_RESULTS = {
    "schema": int,
    "command": str,
    "environment": {str: (str, int, float, type(None))},
    "device": str,
    "set": str,
    "baselines": [str],
    "ceilings": _Optional(_CEILINGS),
    "interrupted": bool,
    "rows": [_ROW],
    "sums": [_SUM],
    "models": _Optional([_MODEL]),
    "left": _Optional(int),
}


def write(results: dict, path: Path) -> None:
    """Writes a results.json. If the process is killed meanwhile, the earlier file stays."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results, indent=1) + "\n")
    new.replace(path)


def read(path: Path) -> dict:
    """Reads a results.json; raises a UsageError that says what is wrong with it."""
    try:
        results = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not text; expected JSON") from error
    except ValueError as error:
        raise UsageError(f"{path}: damaged, not JSON: {error}") from error
    if not isinstance(results, dict) or "schema" not in results:
        raise UsageError(f"{path}: is not a results.json of `fusewise bench`")
    if results["schema"] != VERSION:
        raise UsageError(
            f"{path}: has schema {results['schema']}, this fusewise reads {VERSION}; "
            "run the benchmark again"
        )
    if wrong := problem(results):
        raise UsageError(f"{path}: damaged: {wrong}")
    return results


def problem(results: dict) -> str:
    """The path of the first field that does not fit the schema, and why; empty if all fit."""
    return _problem(results, _RESULTS, "") or _untimed(results["rows"])


def _untimed(rows: list[dict]) -> str:
    """Each row has failed or has our times. Times must be positive, for the ratios, and there must
    be at least two, for the intervals."""
    for i, row in enumerate(rows):
        ours = row.get("contenders", {}).get("fusewise", {})
        if "failed" not in row and not ours.keys() & {"wall", "gpu"}:
            return f"rows[{i}] has neither failed nor times in contenders.fusewise"
        for name, contender in row.get("contenders", {}).items():
            for clock in contender.keys() & {"wall", "gpu"}:
                samples = contender[clock]["samples"]
                if len(samples) < 2 or not all(0 < t < math.inf for t in samples):
                    return f"rows[{i}].contenders.{name}.{clock}.samples are not times"
    return ""


def _problem(value, form, path: str) -> str:
    if isinstance(form, _Nullable):
        return "" if value is None else _problem(value, form.form, path)
    if isinstance(form, (type, tuple)):
        # In Python, True is an int.
        fits = isinstance(value, form) and (form is bool or not isinstance(value, bool))
        return "" if fits else f"{path} is {value!r}"
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{path} is not a list"
        found = (_problem(part, form[0], f"{path}[{i}]") for i, part in enumerate(value))
        return next(filter(None, found), "")
    if not isinstance(value, dict):
        return f"{path or 'the file'} is not an object"
    inner = f"{path}." if path else ""
    if str in form:
        found = (_problem(part, form[str], f"{inner}{key}") for key, part in value.items())
        return next(filter(None, found), "")
    for key in value.keys() - form.keys():
        return f"{inner}{key} is unknown"
    for key, part in form.items():
        optional = isinstance(part, _Optional)
        if key not in value:
            if optional:
                continue
            return f"{inner}{key} is missing"
        if wrong := _problem(value[key], part.form if optional else part, f"{inner}{key}"):
            return wrong
    return ""
