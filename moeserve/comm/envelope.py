"""The encoding of the messages that ranks send over a `Mesh`: plain, or encrypted (seal.py)."""

from collections.abc import Callable

from torch import Tensor


class Plain:
    """No encoding: messages are sent as they are."""

    def inbox(self, peer: int, into: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return the memory for the peer's next message, and a function that decodes it to `into`.

        The function raises PermissionError if the message is not the one that the peer sent.
        """
        return into, lambda: None

    def outbox(self, peer: int, text: Tensor) -> Tensor:
        """Encode the next message to the peer."""
        return text


PLAIN = Plain()
