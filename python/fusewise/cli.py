"""The command `fusewise`."""

import argparse
import os
import sys
from pathlib import Path

from . import __version__


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """One line, not the whole usage."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _Parser(prog="fusewise", description="Fused neural-network operators for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fusewise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    bench = commands.add_parser("bench", help="check and measure against PyTorch")
    bench.add_argument("family", nargs="*", metavar="FAMILY", help="operators; without: all")
    bench.add_argument("--device", choices=("cpu", "cuda"), help="without: the GPU if there is one")
    size = bench.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="size", action="store_const", const="quick", default="quick",
        help="a few cases (the default)",
    )  # fmt: skip
    size.add_argument("--full", dest="size", action="store_const", const="full", help="all cases")
    bench.add_argument(
        "--baseline", action="append", metavar="NAME",
        help="eager, compile or naive; may be given several times; without: all",
    )  # fmt: skip
    bench.add_argument("--filter", metavar="TEXT", help="only cases whose name has or matches TEXT")
    bench.add_argument(
        "--out", type=Path, default=Path("bench-results"), metavar="DIR",
        help="where results.json, summary.md and speedup.png go (bench-results)",
    )  # fmt: skip
    commands.add_parser("info", help="versions, hardware and implementations, for bug reports")

    chosen = parser.parse_args(arguments)
    if chosen.command == "info":
        from .info import lines

        print("\n".join(lines()))
        return 0
    return _bench(chosen, arguments, bench)


def _bench(chosen: argparse.Namespace, arguments: list[str], parser: _Parser) -> int:
    from . import bench
    from .bench import progress, report
    from .bench.baselines import BASELINES
    from .bench.families import FAMILIES

    for what, names, known in (
        ("family", chosen.family, FAMILIES),
        ("--baseline", chosen.baseline or (), BASELINES),
    ):
        for name in names:
            if name not in known:
                parser.error(f"{what} {name}: unknown; there are: {', '.join(known)}")
    try:
        chosen.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {chosen.out}: {error.strerror}")
    if not os.access(chosen.out, os.W_OK):
        parser.error(f"--out {chosen.out}: not writable")

    options = bench.Options(
        families=tuple(chosen.family) or tuple(FAMILIES),
        device=chosen.device or "",
        size=chosen.size,
        baselines=tuple(dict.fromkeys(chosen.baseline or ())),
        filter=chosen.filter,
        arguments=tuple(arguments),
    )
    shown = progress.for_output()
    try:
        results = bench.run(options, shown)
    except bench.UsageError as error:
        shown.stop()
        parser.error(str(error))
    finally:
        shown.stop()
    report.show(results)
    print("written:", ", ".join(str(path) for path in report.write(results, chosen.out)))
    if results["interrupted"]:
        return 130
    return int(any("failed" in row for row in results["rows"]))
