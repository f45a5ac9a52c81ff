"""Records of the parts of `make gpu`: one file per part, and the summary of all of them."""

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

LINES = 60  # of a failed test's message that are kept
SLOWEST = 15


@dataclass
class Step:
    """The result of one command."""

    step: str
    passed: bool
    seconds: float
    detail: str


@dataclass
class Failure:
    name: str
    message: str


@dataclass
class Record:
    """One run of a part."""

    part: str
    passed: bool
    seconds: float
    """Of all its processes together."""
    finished: str
    commit: str
    digest: str
    """Hash of the files that the part tests, see gpu_parts.digest."""
    arguments: str = ""
    """The benchmark's arguments, if only some of its cases were run."""
    environment: dict = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    """The number of tests per reason."""
    slowest: list[tuple[str, float]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    text: str = ""
    """Text that goes into the summary unchanged."""

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(found: dict) -> "Record":
        steps = [Step(**step) for step in found.pop("steps")]
        failures = [Failure(**failure) for failure in found.pop("failures")]
        return Record(**found, steps=steps, failures=failures)


def read_records(folders: list[Path]) -> dict[str, Record]:
    """The latest run of each part, from all files in the folders. The files may come from several
    machines."""
    newest: dict[str, Record] = {}
    for path in (path for folder in folders for path in sorted(folder.rglob("*.json"))):
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or not {"part", "digest", "steps"} <= found.keys():
            continue  # a file of the benchmark
        record = Record.read(found)
        known = newest.get(record.part)
        if known is None or known.finished < record.finished:
            newest[record.part] = record
    return newest


# --- tests ----------------------------------------------------------------------------------------


@dataclass
class Tests:
    """The contents of a JUnit report."""

    counts: Counter = field(default_factory=Counter)
    skipped: Counter = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: "Tests") -> None:
        self.counts += other.counts
        self.skipped += other.skipped
        self.seconds |= other.seconds
        self.failures += other.failures


def read_tests(junit: Path) -> Tests | None:
    """None if there is no report or an incomplete one."""
    try:
        root = ET.parse(junit).getroot()
    except (OSError, ET.ParseError):
        return None
    tests = Tests()
    for case in root.iter("testcase"):
        name = _test_name(case)
        tests.seconds[name] = float(case.get("time") or 0)
        skipped = case.find("skipped")
        broken = [e for kind in ("failure", "error") for e in case.findall(kind)]
        if broken or case.get("status") == "fail":
            texts = [e.text or e.get("message") or "" for e in broken]
            texts.append(case.findtext("system-out") or "")
            tests.failures.append(Failure(name, last_lines("\n".join(filter(None, texts)))))
            tests.counts["failed"] += 1
        elif skipped is not None:
            tests.skipped[skipped.get("message") or "no reason given"] += 1
            tests.counts["skipped"] += 1
        else:
            tests.counts["passed"] += 1
    return tests


def _test_name(case: ET.Element) -> str:
    """The name for pytest's command line; for ctest the plain name."""
    name, module = case.get("name", ""), case.get("classname", "")
    if not module.startswith("tests."):
        return name
    return f"{module.replace('.', '/')}.py::{name}"


def counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{counts.get(key, 0)} {key}" for key in ("passed", "skipped", "failed"))


def last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-LINES:])


# --- output ---------------------------------------------------------------------------------------


def state(record: Record | None, digest: str, arguments: str = "") -> str:
    """passed, FAILED, missing, or why a pass does not count."""
    if record is None:
        return "missing"
    if not record.passed:
        return "FAILED"
    if record.digest != digest:
        return "older than the code"
    if record.arguments != arguments:
        return f"passed, but only for {record.arguments or 'all cases'}"
    return "passed"


def print_failures(records: list[Record], room: int = 5000) -> None:
    """Prints messages first, as far as there is room, then all names. The names come last because
    only the end of the output of a remote run is visible."""
    failures = [(record.part, failure) for record in records for failure in record.failures]
    most = max(600, room // max(1, len(failures)))
    for part, failure in failures[: room // most]:
        print(f"\n--- {part}: {failure.name}\n{failure.message[-most:]}")
    if failures:
        print(f"\n{len(failures)} failed:")
    for part, failure in failures[:40]:
        print(f"  {part}: {failure.name}")


def summary(records: dict[str, Record], digests: dict[str, str]) -> tuple[bool, str]:
    """Whether every part passed for the current code, and the page that says so."""
    states = {name: state(records.get(name), digest) for name, digest in digests.items()}
    other = Counter(word for word in states.values() if word != "passed")
    good = not other
    verdict = "all parts passed" if good else "FAILED" if other["FAILED"] else "incomplete"
    lines = [f"# `make gpu`: {verdict}", ""]
    for word in other:
        names = ", ".join(name for name, each in states.items() if each == word)
        lines.append(f"- {word}: {names}")
    lines += [*_machines(records), ""]
    lines += [
        "| part | | tests | seconds | commit | finished |",
        "| --- | --- | --- | ---: | --- | --- |",
    ]
    for name, word in states.items():
        if name not in records:
            lines.append(f"| {name} | {word} | | | | |")
            continue
        r = records[name]
        tests = counted(r.counts) if r.counts else _details(r)
        lines.append(f"| {name} | {word} | {tests} | {r.seconds:.0f} | {r.commit} | {r.finished} |")
    known = [records[name] for name in digests if name in records]
    for r in known:
        for failure in r.failures:
            lines += ["", f"## {r.part}: {failure.name}", "", "```", failure.message, "```"]
    slowest = sorted((entry for r in known for entry in r.slowest), key=lambda e: -e[1])
    if slowest:
        lines += ["", "Slowest tests:", ""]
        lines += [f"- {seconds:.1f} s: {name}" for name, seconds in slowest[:SLOWEST]]
    reasons = sum((Counter(r.skipped) for r in known), Counter())
    if reasons:
        lines += ["", "Skipped:", ""]
        lines += [f"- {count}: {reason}" for reason, count in reasons.most_common()]
    for r in known:
        if r.text:
            lines += ["", re.sub(r"^#", "##", r.text.rstrip(), flags=re.MULTILINE)]
    return good, "\n".join(lines) + "\n"


def _machines(records: dict[str, Record]) -> list[str]:
    """The machines that the parts ran on, each listed once."""
    names = ("gpu", "driver", "cuda", "torch", "python", "cpu", "cores", "os")
    machines = Counter(
        ", ".join(f"{key} {r.environment[key]}" for key in names if key in r.environment)
        for r in records.values()
    )
    return [f"- {machine}" for machine in machines if machine]


def _details(record: Record) -> str:
    return "; ".join(f"{step.step}: {step.detail}" for step in record.steps)
