"""How the messages of an exchange travel: as they are, unless they are encrypted (`comm/seal.py`)."""

from collections.abc import Callable

from torch import Tensor


class Plain:
    """Messages that travel as they are."""

    def inbox(self, peer: int, into: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Returns where the peer's next message has to arrive, and what then brings its text to `into`.

        That raises PermissionError if the message is not what the peer sent.
        """
        return into, lambda: None

    def outbox(self, peer: int, text: Tensor) -> Tensor:
        """Returns the next message to the peer as it has to travel."""
        return text


PLAIN = Plain()
