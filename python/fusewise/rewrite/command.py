"""`fusewise optimize`: the same as the function, for a model that a factory makes."""

import argparse
import sys
from pathlib import Path

from .._usage import UsageError
from ..bench.environment import command
from ..bench.tasks import usable_device
from ..profile.model import make_model
from .options import Options
from .report import Report
from .run import run as optimize


def run(chosen: argparse.Namespace, progress) -> Report:
    """The report on a model that is named on the command line."""
    device = usable_device(chosen.device or "")
    model, inputs = make_model(
        chosen.model, tuple(chosen.input or ()), device, chosen.train, chosen.channels_last
    )
    options = Options(
        amp=chosen.amp,
        min_gain=chosen.min_gain,
        compile=chosen.compile,
        graph=chosen.graph,
        inplace=True,
    )
    try:
        _, report = optimize(model, inputs, options, progress)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{chosen.model}: {error}") from error
    report.command = command(chosen.arguments)
    return report


def write(report: Report, folder: Path) -> list[Path]:
    """Writes the numbers and, if jinja2 is installed, the page."""
    written = [folder / "report.json"]
    report.to_json(written[0])
    try:
        written.append(report.to_html(folder / "report.html"))
    except ImportError as error:
        missing = f"{error.name} is not installed; it comes with fusewise[bench]"
        print(f"no page: {missing}", file=sys.stderr)
    return written
