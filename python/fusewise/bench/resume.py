"""Goes on with a run that was stopped.

Its rows are kept if they were measured with the same sources on the same machine.
"""

from collections import Counter
from pathlib import Path

from .._usage import UsageError
from . import schema
from .families import FAMILIES
from .tasks import Task

# Facts of the environment that say nothing about the times. `sources` tells more than the commit.
_PASSING = ("date", "load", "commit")


def kept_rows(path: Path, results: dict, tasks: list[Task]) -> list[dict]:
    """The rows of an earlier results.json that the new results may take over."""
    try:
        earlier = schema.read(path)
    except UsageError:  # missing or damaged: everything is measured
        return []
    if _facts(earlier) != _facts(results):
        return []
    rows = [row for row in earlier["rows"] if "failed" not in row]
    partial = {task.case.name for task in left(tasks, rows)}
    return [row for row in rows if row["case"] not in partial]


def left(tasks: list[Task], rows: list[dict]) -> list[Task]:
    """The tasks that do not have a row for each of their modes."""
    measured = Counter(row["case"] for row in rows)
    return [task for task in tasks if measured[task.case.name] < len(modes(task))]


def modes(task: Task) -> tuple[str, ...]:
    return FAMILIES[task.case.family].modes(task.case)


def _facts(results: dict) -> tuple:
    here = results["environment"].items()
    lasting = {key: value for key, value in here if key not in _PASSING}
    return results["device"], results["set"], lasting
