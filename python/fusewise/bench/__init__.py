"""The benchmark: correctness first, then time, against what a user would otherwise run.

A family of operators plugs in with a cases file, a builder of callables and its floor
(`families/`); everything else here is common to all of them.
"""

from .runner import Broken, Options, plan, run

__all__ = ["Broken", "Options", "plan", "run"]
