"""How many drafts pay."""

from __future__ import annotations

from moeserve.engine.plan import I32, Slots


class DraftPolicy:
    """Takes all drafts."""

    propose = True

    def __init__(self, num_slots: int, num_drafts: int, *, auto: bool) -> None:
        self.num_drafts = num_drafts

    def limit(self, slots: Slots, available: I32) -> I32:
        """Returns how many of the available drafts each row is to verify."""
        return available

    def update(self, slots: Slots, num_drafts: I32, num_accepted: I32) -> None:
        """Notes a verification."""

    def note(self, num_tokens: int, num_rows: int, has_drafts: bool, device_us: int) -> None:
        """Notes a step's cost."""
