"""Exits with 0 where this Python has the torch that requirements-dev.txt pins, with 1 elsewhere."""

import importlib.metadata
import re
from pathlib import Path

pins = (Path(__file__).parent.parent / "requirements-dev.txt").read_text()
wanted = re.search(r"^torch==(\S+)", pins, re.MULTILINE).group(1)
try:
    found = importlib.metadata.version("torch").split("+")[0]
except importlib.metadata.PackageNotFoundError:
    found = None
raise SystemExit(found != wanted)
