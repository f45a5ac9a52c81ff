"""How the processes that tests start come to their end."""

import os
import sys


def leave() -> None:
    """Ends the process successfully, without Python's clean-up.

    In it torch aborts now and then, also without fusewise: one of its threads asks for the
    interpreter when that is gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
