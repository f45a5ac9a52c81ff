"""`fusewise profile`: where the time of a model goes, and what is worth trying.

model.py makes the model and its step. record.py runs the step under torch's profiler. kinds.py
classifies operators and kernels. analysis.py sums up the times. advice.py draws the conclusions.
"""

from . import report
from .analysis import Profile
from .runner import Options, run

__all__ = ["Options", "Profile", "report", "run"]
