"""Reads the cases files: the shapes to measure, and the sets that they belong to."""

import json
import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from .._usage import UsageError
from .families import FAMILIES
from .families.family import DTYPES, LAYOUTS, TF32, Case

# An installed package has the cases next to this file; a source tree has them under benchmarks/.
_FOLDERS = (Path(__file__).parent / "cases", Path(__file__).parents[3] / "benchmarks" / "cases")


def select(family: str, device: str, size: str, pattern: str | None = None) -> list[Case]:
    """The cases of one set whose name contains or matches `pattern`."""
    return read(case_folder() / f"{family}.json", device, size, pattern)


def case_folder() -> Path:
    return next(folder for folder in _FOLDERS if folder.is_dir())


def matches(name: str, pattern: str) -> bool:
    """Whether the name contains or matches one of the alternatives `a|b`."""
    return any(part in name or fnmatch(name, part) for part in pattern.split("|"))


def read(path: Path, device: str, size: str, pattern: str | None = None) -> list[Case]:
    """The same from any cases file. A file without sets is one set."""
    try:
        text = path.read_text()
        data = json.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not text; expected JSON") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}:{error.lineno}: is not JSON: {error.msg}") from error
    wanted = _globs(path, text, data, device, size)
    found = [
        _case(path, text, start, data["family"], entry)
        for start, entry in zip(_starts(text), data["cases"], strict=True)
    ]
    names = [case.name for case in found]
    for start, name in zip(_starts(text), names, strict=True):
        if names.count(name) > 1:
            raise _wrong(path, text, start, "name", f"{name!r} appears twice")
    return [
        case
        for case in found
        if any(fnmatch(case.name, glob) for glob in wanted)
        and (pattern is None or matches(case.name, pattern))
    ]


def recast(cases: list[Case], dtype: str | None, layout: str | None) -> list[Case]:
    """The cases in another dtype or layout, which is added to their names.

    Cases that become equal are run once. In their group they count as often as before.
    """
    found: dict[tuple, Case] = {}
    for case in cases:
        changed = replace(case, dtype_name=dtype or case.dtype_name, layout=layout or case.layout)
        changes = [
            new
            for old, new in ((case.dtype_name, changed.dtype_name), (case.layout, changed.layout))
            if new != old
        ]
        changed = replace(changed, name="@".join([case.name, *changes]))
        key = (changed.family, changed.shape, changed.dtype_name, changed.layout, changed.group)
        key += tuple(changed.extra.items())
        if key in found and changed.group:
            found[key] = replace(found[key], count=found[key].count + changed.count)
        found.setdefault(key, changed)
    return list(found.values())


def _globs(path: Path, text: str, data: object, device: str, size: str) -> list[str]:
    """The name patterns of the set; raises if the file is not a cases file."""
    if not isinstance(data, dict):
        raise UsageError(f"{path}:1: expected an object with the fields family and cases")
    for field in data.keys() - {"family", "cases", "sets", "groups"}:
        raise _wrong(path, text, 0, field, "unknown; there are: family, cases, sets, groups")
    if data.get("family") not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise _wrong(path, text, 0, "family", f"expected one of {known}, got {data.get('family')}")
    entries = data.get("cases")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _wrong(path, text, 0, "cases", "expected a list of objects")
    if "sets" not in data:
        return ["*"]
    try:
        wanted = data["sets"][device][size]
    except (KeyError, TypeError):
        raise _wrong(path, text, 0, "sets", f"has no {size} set for {device}") from None
    if not isinstance(wanted, list) or not all(isinstance(glob, str) for glob in wanted):
        raise _wrong(path, text, 0, "sets", "expected lists of names")
    return wanted


def _case(path: Path, text: str, start: int, family: str, entry: dict) -> Case:
    rank, extra = FAMILIES[family].rank, FAMILIES[family].extra

    def positive(value) -> bool:
        return type(value) is int and value > 0

    def counts(value) -> bool:
        return isinstance(value, dict) and all(map(positive, value.values()))

    def one_of(known: tuple[str, ...]):
        return f"one of {', '.join(known)}", lambda value: value in known

    rules = {
        "name": ("a text", lambda value: isinstance(value, str) and value),
        "shape": (
            f"{rank or 'three or more'} positive numbers",
            lambda value: (
                isinstance(value, list)
                and (len(value) == rank if rank else len(value) >= 3)
                and all(map(positive, value))
            ),
        ),
        "dtype": one_of((*DTYPES, TF32)),
        "layout": one_of(tuple(LAYOUTS)),
        "group": ("a text", lambda value: isinstance(value, str)),
        "count": ("a positive number", positive),
        "models": ("an object of positive numbers", counts),
        "held_out": ("true or false", lambda value: isinstance(value, bool)),
        **{
            name: one_of(known) if known else ("a positive number", positive)
            for name, known in extra.items()
        },
    }
    for field, value in entry.items():
        if field not in rules:
            raise _wrong(path, text, start, field, f"unknown; there are: {', '.join(rules)}")
        expected, fits = rules[field]
        if not fits(value):
            raise _wrong(path, text, start, field, f"expected {expected}, got {json.dumps(value)}")
    for field in ("name", "shape", "dtype", *extra):
        if field not in entry and field not in FAMILIES[family].optional:
            raise _wrong(path, text, start, field, "missing")
    return Case(
        family=family,
        name=entry["name"],
        shape=tuple(entry["shape"]),
        dtype_name=entry["dtype"],
        layout=entry.get("layout", "contiguous"),
        group=entry.get("group"),
        count=entry.get("count", 1),
        extra={name: entry[name] for name in extra if name in entry},
        models=entry.get("models", {}),
        held_out=entry.get("held_out", False),
    )


def _wrong(path: Path, text: str, start: int, field: str, what: str) -> UsageError:
    """An error that names file, line and field. A missing field gets the line of its case."""
    place = text.find(f'"{field}"', start)
    line = text.count("\n", 0, place if place >= 0 and what != "missing" else start) + 1
    return UsageError(f"{path}:{line}: field {field}: {what}")


def _starts(text: str) -> list[int]:
    """Where each case starts in the file's text, because Python's json reports no positions."""
    decoder, found = json.JSONDecoder(), []
    place = re.search(r'"cases"\s*:\s*\[', text).end()
    while match := re.compile(r"[\s,]*(?=\{)").match(text, place):
        found.append(match.end())
        _, place = decoder.raw_decode(text, match.end())
    return found
