"""Text for the demo model: short stories, questions about moeserve, and small talk."""

from .build import Document, Turn, documents

__all__ = ["Document", "Turn", "documents"]
