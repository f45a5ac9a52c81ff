"""Exits with 0 if this Python has the torch version pinned in requirements-dev.txt, else with 1."""

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
