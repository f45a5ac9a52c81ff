"""The exception for wrong use of the command line."""


class UsageError(Exception):
    """The request cannot be carried out. The message is one line and says what to do instead."""
