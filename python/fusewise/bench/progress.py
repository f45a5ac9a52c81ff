"""Shows what is running and how long it will take: a bar on a terminal, plain lines elsewhere."""

import sys
import time

from . import report


class Progress:
    """Plain lines, for logs."""

    def start(self, what: str, total: int) -> None:
        self._total, self._done, self._begin = total, 0, time.monotonic()
        print(f"{what} ({total})" if total > 1 else what, flush=True)

    def advance(self) -> None:
        self._done += 1

    def now(self, what: str) -> None:
        pass

    def row(self, row: dict) -> None:
        self.advance()
        elapsed = time.monotonic() - self._begin
        left = elapsed / self._done * (self._total - self._done)
        print(f"[{self._done}/{self._total}, {left:.0f} s left] {report.one_line(row)}", flush=True)

    def stop(self) -> None:
        pass


class Bar(Progress):
    """A bar with the time left, and a line for every finished row."""

    def __init__(self):
        from rich import progress
        from rich.table import Column

        # The current step gets only the remaining width, so that a long name does not cut other
        # columns.
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        # Redrawn at each step, not by a thread: a thread would take time from what is being
        # measured.
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
            progress.TextColumn("{task.description}", markup=False, table_column=rest),
            auto_refresh=False,
            expand=True,
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task("")
        self._bar.start()

    def start(self, what: str, total: int) -> None:
        self._bar.reset(self._task, total=total, description=what)
        self._bar.refresh()

    def advance(self) -> None:
        self._bar.advance(self._task)
        self._bar.refresh()

    def now(self, what: str) -> None:
        self._bar.update(self._task, description=what, refresh=True)

    def row(self, row: dict) -> None:
        self.advance()
        self._bar.console.print(report.one_line(row), markup=False, highlight=False)

    def stop(self) -> None:
        self._bar.stop()


def for_output() -> Progress:
    if sys.stdout.isatty():
        try:
            return Bar()
        except ImportError:
            pass  # rich comes with fusewise[bench]; plain lines work without it
    return Progress()
