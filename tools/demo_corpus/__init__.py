"""Text for the demo model: short stories, questions about moeserve, small talk, tool calls."""

from .build import Document, Turn, documents

__all__ = ["Document", "Turn", "documents"]
