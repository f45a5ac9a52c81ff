"""The benchmark: checks correctness first, then times the operators against what users run today.

An operator family (`families/`) supplies a cases file, the functions to call and its floor, the
least time possible. Everything else here is shared by all families.
"""

from .runner import Broken, run
from .tasks import Options, plan

__all__ = ["Broken", "Options", "plan", "run"]
