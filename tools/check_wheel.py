"""Fails if a wheel cannot serve every supported torch and Python with one build.

python tools/check_wheel.py WHEEL
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# torch ships these libraries; a copy in the wheel would be loaded a second time.
FOREIGN = re.compile(r"lib(torch|c10|cu(da|blas|dnn|fft|rand|sparse|solver)|nv|python)")
NEEDED = (
    "fusewise/_lib/libfusewise_naive_cpu.so",
    "fusewise/_lib/libfusewise_torch.so",
    "fusewise/bench/cases/autoencoder.json",
    "fusewise/bench/cases/squeeze_excite.json",
    "fusewise/report/page.html",
    "fusewise/py.typed",
)


def dynamic_section(data: bytes) -> str:
    with tempfile.NamedTemporaryFile() as library:
        library.write(data)
        library.flush()
        command = ["readelf", "--dynamic", "--wide", library.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def problems(path: Path) -> list[str]:
    found = []
    if not path.name.endswith("-py3-none-linux_x86_64.whl"):
        found.append(f"the tag is not py3-none-linux_x86_64: {path.name}")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        found += [f"{name} is missing" for name in NEEDED if name not in names]
        for name in names:
            if FOREIGN.match(Path(name).name):
                found.append(f"{name} is not ours to carry")
            elif ".so" in Path(name).suffixes:
                section = dynamic_section(wheel.read(name))
                if "libpython" in section:
                    found.append(f"{name} is linked to libpython, and so to one Python version")
                if re.search(r"\((RPATH|RUNPATH)\)", section):
                    found.append(f"{name} has an RPATH or RUNPATH of the build machine")
    return found


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]))
    print("\n".join(found) or f"{Path(sys.argv[1]).name}: no problems found")
    raise SystemExit(bool(found))
