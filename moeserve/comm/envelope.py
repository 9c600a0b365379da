"""The form in which the messages of an exchange travel between two ranks."""

from collections.abc import Callable

from torch import Tensor


class Plain:
    """Messages travel as they are. `SealedExchange` (comm/seal.py) encrypts them."""

    def inbox(self, peer: int, into: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return the memory for the peer's next message, and a function that opens it into `into`.

        The function raises PermissionError if the message is not the one that the peer sent.
        """
        return into, lambda: None

    def outbox(self, peer: int, text: Tensor) -> Tensor:
        """Return the next message to the peer in the form in which it travels."""
        return text


PLAIN = Plain()
