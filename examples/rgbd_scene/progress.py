"""A progress bar on a terminal, plain lines elsewhere, nothing in all processes but the first."""

import sys


class Lines:
    def __init__(self, loud: bool):
        self._loud = loud

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def advance(self, steps: int) -> None:
        pass

    def say(self, text: str) -> None:
        if self._loud:
            print(text, flush=True)


class Bar(Lines):
    def __init__(self, steps: int):
        from rich import progress

        super().__init__(loud=True)
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=None),
            progress.TaskProgressColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._task = self._bar.add_task("", total=steps)

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def advance(self, steps: int) -> None:
        self._bar.advance(self._task, steps)

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


def for_output(steps: int, loud: bool) -> Lines:
    if loud and sys.stdout.isatty():
        try:
            return Bar(steps)
        except ImportError:
            pass  # plain lines work without rich
    return Lines(loud)
