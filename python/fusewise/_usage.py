"""The error of the command line."""


class UsageError(Exception):
    """What was asked for cannot be done; the message is one line that says what to do."""
