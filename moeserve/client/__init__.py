"""The asyncio client: `AsyncClient`, its streams and its typed answers.

Reading order: client.py (what users call), transport.py (HTTP and retries), stream.py and sse.py (streamed answers).
"""

from moeserve.client.client import AsyncClient
from moeserve.client.stream import Stream

__all__ = ["AsyncClient", "Stream"]
