"""The command `fusewise`. Each subcommand lives in its own package, imported only when it runs."""

import argparse
import os
import sys
from pathlib import Path

from . import __version__
from ._amx import avoid_broken_amx
from ._usage import UsageError

_COMPUTING = ("bench", "check", "lesson", "optimize", "profile")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        """Prints one line instead of the whole usage text."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = _parser().parse_args(arguments)
    chosen.arguments = arguments
    if chosen.command in _COMPUTING and avoid_broken_amx():
        print(
            "this machine's AMX instructions do not work; bfloat16 on the CPU runs without them",
            file=sys.stderr,
        )
    try:
        return chosen.run(chosen)
    except UsageError as error:
        if chosen.debug:
            raise
        print(f"fusewise {chosen.command}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"fusewise {chosen.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> _Parser:
    parser = _Parser(prog="fusewise", description="Fused neural-network operators for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fusewise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run, help: str) -> _Parser:
        added = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        added.set_defaults(run=run)
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return added

    def device(added: _Parser) -> None:
        added.add_argument(
            "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one"
        )

    def out(added: _Parser, default: str, what: str) -> None:
        added.add_argument(
            "--out", type=Path, default=Path(default), metavar="DIR",
            help=f"folder for {what} (default: {default})",
        )  # fmt: skip

    def model(added: _Parser, verb: str) -> None:
        added.add_argument(
            "model", metavar="MODULE:FACTORY",
            help="function that creates the model, as in my.models:net or torchvision:resnet50",
        )  # fmt: skip
        added.add_argument(
            "--input", action="append", metavar="SIZES",
            help="sizes of an input (default: 1,3,224,224), with a dtype for token ids: "
            "8,128:int64; repeat it for several inputs",
        )  # fmt: skip
        device(added)
        added.add_argument(
            "--train", action="store_true", help=f"{verb} forward and backward, not forward alone"
        )
        added.add_argument(
            "--amp", action="store_true", help="autocast: fp16 on a GPU, bf16 on a CPU"
        )
        added.add_argument(
            "--channels-last", action="store_true", help="model and inputs in channels_last (NHWC)"
        )

    bench = command("bench", _bench, "check the operators, and measure them against PyTorch")
    bench.add_argument(
        "family", nargs="*", metavar="FAMILY",
        help="operators to measure (default: all); or overhead alone: the host time of "
        "each operator at a tiny size",
    )  # fmt: skip
    bench.add_argument("--cases", type=Path, metavar="FILE", help="measure the cases in this file")
    device(bench)
    bench.add_argument("--dtype", metavar="NAME", help="run every case in this dtype")
    bench.add_argument(
        "--layout",
        metavar="NAME",
        help="run every case in this layout: contiguous or channels_last",
    )
    size = bench.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="size", action="store_const", const="quick", default="quick",
        help="a few cases (the default)",
    )  # fmt: skip
    size.add_argument("--full", dest="size", action="store_const", const="full", help="all cases")
    size.add_argument(
        "--zoo", dest="size", action="store_const", const="zoo",
        help="of squeeze_excite: every block of EfficientNet, MobileNetV3, RegNetY and SE-ResNet "
        "(on a CPU a sample); goes on where a run with the same --out stopped",
    )  # fmt: skip
    bench.add_argument(
        "--minutes", type=float, metavar="M", help="with --zoo: stop after M minutes"
    )
    bench.add_argument(
        "--baseline", action="append", metavar="NAME",
        help="eager, compile, naive, or a baseline of a family; may be repeated (default: all)",
    )  # fmt: skip
    bench.add_argument(
        "--filter", metavar="TEXT",
        help="only cases whose name contains or matches TEXT; a|b takes either",
    )  # fmt: skip
    out(bench, "bench-results", "results.json, summary.md, report.html and the plots")

    compare = command("compare", _compare, "compare two results.json: what became better or worse")
    compare.add_argument("old", type=Path, metavar="OLD.json")
    compare.add_argument("new", type=Path, metavar="NEW.json")
    compare.add_argument("--fail", action="store_true", help="exit with code 1 if a case is worse")

    profile = command(
        "profile", _profile, "show where a model spends its time, and what to try first"
    )
    model(profile, "profile")
    out(profile, "profile-results", "report.html, its plots and trace.json.gz")

    optimize = command(
        "optimize",
        _optimize,
        "show which parts of a model are right and faster as fused operators",
    )
    model(optimize, "measure")
    optimize.add_argument(
        "--compile", action="store_true", help="also measure torch.compile, with and without swaps"
    )
    optimize.add_argument(
        "--graph", action="store_true",
        help="also measure the result as CUDA graphs; GPU time alone decides on the swaps",
    )  # fmt: skip
    optimize.add_argument(
        "--min-gain", type=float, default=1.02, metavar="RATIO",
        help="how many times as fast an operator must be to be swapped in (default: 1.02)",
    )  # fmt: skip
    out(optimize, "optimize-results", "report.html and report.json")

    check = command(
        "check", _check, "check all operators but LINet's against references on this machine"
    )
    device(check)

    command("info", _info, "print versions, hardware and implementations, for bug reports")

    lesson = command("lesson", _lesson, "demonstrate a common benchmarking mistake on this machine")
    lesson.add_argument("name", nargs="?", metavar="NAME", help="default: list the lessons")
    device(lesson)
    return parser


def _bench(chosen: argparse.Namespace) -> int:
    if "overhead" in chosen.family:
        return _overhead(chosen)
    from . import bench
    from .bench import progress, report
    from .bench.baselines import all_baselines
    from .bench.families import FAMILIES
    from .bench.families.family import DTYPES, LAYOUTS, TF32

    families = [name.replace("-", "_") for name in chosen.family]
    _known("family", families, FAMILIES)
    _known("--baseline", chosen.baseline or (), all_baselines())
    _known("--dtype", filter(None, [chosen.dtype]), (*DTYPES, TF32))
    _known("--layout", filter(None, [chosen.layout]), LAYOUTS)
    if chosen.layout:
        have = [name for name, family in FAMILIES.items() if chosen.layout in family.layouts]
        _known(f"--layout {chosen.layout} of", families, have)
        families = families or have
    options = bench.Options(
        families=tuple(families) or tuple(FAMILIES),
        device=chosen.device or "",
        size=chosen.size,
        baselines=tuple(dict.fromkeys(chosen.baseline or ())),
        filter=chosen.filter,
        cases=chosen.cases,
        dtype=chosen.dtype,
        layout=chosen.layout,
        minutes=chosen.minutes,
        arguments=tuple(chosen.arguments),
    )
    bench.plan(options)  # report wrong options before creating a folder
    _make_writable(chosen.out)
    shown = progress.for_output()
    try:
        results = bench.run(options, shown, chosen.out if chosen.size == "zoo" else None)
    except bench.Broken as broken:
        shown.stop()
        if broken.results["rows"]:
            _say_written(report.write(broken.results, chosen.out))
        raise broken.__cause__ from None
    finally:
        shown.stop()
    if not results["rows"]:
        print("fusewise bench: interrupted before the first row, nothing written", file=sys.stderr)
        return 130
    report.show(results)
    _say_written(report.write(results, chosen.out))
    if results["interrupted"]:
        return 130
    return int(any("failed" in row for row in results["rows"]))


def _overhead(chosen: argparse.Namespace) -> int:
    others = (chosen.cases, chosen.dtype, chosen.layout, chosen.baseline, chosen.filter)
    others += (chosen.minutes,)
    if chosen.family != ["overhead"] or any(others) or chosen.size != "quick":
        raise UsageError("overhead: takes no other family and no option but --device and --out")
    from .bench import overhead
    from .report import show

    _make_writable(chosen.out)
    results = overhead.run(chosen.device or "", chosen.arguments)
    show(overhead.table(results), *overhead.remarks(results))
    _say_written(overhead.write(results, chosen.out))
    return 0


def _compare(chosen: argparse.Namespace) -> int:
    from .bench import compare, schema
    from .report import show

    found = compare.compare(schema.read(chosen.old), schema.read(chosen.new))
    if not found["rows"]:
        raise UsageError(f"{chosen.old} and {chosen.new} have no case in common")
    show(*compare.lines(found), *compare.tables(found))
    return int(chosen.fail and bool(compare.worse(found)))


def _profile(chosen: argparse.Namespace) -> int:
    from . import profile
    from .bench import progress

    _make_writable(chosen.out)
    options = profile.Options(
        model=chosen.model,
        inputs=tuple(chosen.input or ()),
        device=chosen.device or "",
        train=chosen.train,
        amp=chosen.amp,
        channels_last=chosen.channels_last,
        arguments=tuple(chosen.arguments),
    )
    shown = progress.for_output()
    try:
        found = profile.run(options, shown)
    finally:
        shown.stop()
    profile.report.show(found)
    _say_written(profile.report.write(found, chosen.out))
    return 0


def _optimize(chosen: argparse.Namespace) -> int:
    from .bench import progress
    from .report import show
    from .rewrite import command

    _make_writable(chosen.out)
    shown = progress.for_output()
    try:
        report = command.run(chosen, shown)
    finally:
        shown.stop()
    show(*report.lines(), *report.tables())
    _say_written(command.write(report, chosen.out))
    return 0


def _check(chosen: argparse.Namespace) -> int:
    from .bench import check, progress
    from .report import show

    shown = progress.for_output()
    try:
        table, lines, passed = check.run(chosen.device or "", shown)
    finally:
        shown.stop()
    show(table, *lines)
    return int(not passed)


def _info(_: argparse.Namespace) -> int:
    from .info import lines

    print("\n".join(lines()))
    return 0


def _lesson(chosen: argparse.Namespace) -> int:
    from . import lessons
    from .report import show

    if chosen.name is None:
        print("\n".join(f"{name:14} {lesson.title}" for name, lesson in lessons.LESSONS.items()))
        return 0
    _known("lesson", [chosen.name], lessons.LESSONS)
    found = lessons.run(chosen.name, chosen.device or "")
    show(found.table, *found.lines)
    return 0


def _known(what: str, names, known) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{what} {name}: unknown; there are: {', '.join(known)}")


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}; name another folder") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--out {folder}: not writable; name another folder")


def _say_written(paths: list[Path]) -> None:
    from .report import show

    show(f"written to {paths[0].parent}: {', '.join(path.name for path in paths)}")
