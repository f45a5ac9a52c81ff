"""`fusewise profile`: where the time of any model goes, and what is worth trying.

model.py makes the model and its step, record.py runs it under torch's profiler, kinds.py says what
kind of work an operator or kernel is, analysis.py draws the sums, advice.py the conclusions.
"""

from . import report
from .analysis import Profile
from .runner import Options, run

__all__ = ["Options", "Profile", "report", "run"]
