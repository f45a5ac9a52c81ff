"""What `optimize` tells while it works. The command line shows it; a call shows nothing."""


class Silent:
    def start(self, what: str, total: int) -> None:
        """A phase begins."""

    def now(self, what: str) -> None:
        """A step of the phase begins."""

    def advance(self) -> None:
        """A step of the phase has ended."""
