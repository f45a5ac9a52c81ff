"""Fails if a file, or a member of a wheel, reveals something about the machine that made it.

    python tools/check_leaks.py PATH...

It looks for home and temporary folders, this checkout, host and user names, and package indexes.
"""

import getpass
import os
import re
import socket
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON_NAMES = {"root", "user", "runner", "localhost", "debian", "ubuntu"}


def patterns() -> dict[str, re.Pattern]:
    found = {
        "home folder": rb"/(?:home/\w[\w.-]*|root)/[\w.][\w./+-]*",
        "temporary folder": rb"/(?:var/)?tmp/[\w.][\w./+-]*",
        "this checkout": re.escape(os.fsencode(ROOT)) + rb"(?![\w-])",
        "package index": rb"https?://[^\s\"'<>]*/simple\b|--(?:extra-)?index-url",
    }
    for what, name in (("host name", socket.gethostname()), ("user name", getpass.getuser())):
        # A short or common name would be found everywhere and prove nothing.
        if len(name) >= 4 and name not in COMMON_NAMES:
            found[what] = rb"(?<![\w-])" + re.escape(name.encode()) + rb"(?![\w-])"
    return {what: re.compile(pattern) for what, pattern in found.items()}


def contents(path: Path):
    """Yields (name, bytes) of every file under `path`, and of the members of wheels."""
    if path.is_dir():
        for child in sorted(path.rglob("*")):
            if child.is_file():
                yield from contents(child)
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                yield f"{path.name}:{name}", wheel.read(name)
    else:
        yield str(path), path.read_bytes()


def leaks(path: Path) -> list[str]:
    return [
        f"{name}: {what}: {match.group().decode(errors='replace')}"
        for name, data in contents(path)
        for what, pattern in patterns().items()
        for match in pattern.finditer(data)
    ]


if __name__ == "__main__":
    found = [leak for argument in sys.argv[1:] for leak in leaks(Path(argument))]
    print("\n".join(found) or "no leaks")
    raise SystemExit(bool(found))
