"""The asyncio client: `AsyncClient`, its streams and its typed answers.

Reading order: client.py (what users call), transport.py and faults.py (HTTP, retries, errors),
stream.py.
"""

from moeserve.client.client import AsyncClient
from moeserve.client.stream import Stream

__all__ = ["AsyncClient", "Stream"]
