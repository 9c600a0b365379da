"""Two network namespaces joined by a veth pair whose rate can be changed any time: two machines on
a slow network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

ADDRESSES = "10.213.7.1", "10.213.7.2"


@dataclass(frozen=True, slots=True)
class Link:
    """Its ends, one in each namespace."""

    names: tuple[str, str]
    devices: tuple[str, str]

    def limit(self, bits_per_s: int) -> None:
        """In each direction; 0 lifts the limit. Connections stay."""
        for name, device in zip(self.names, self.devices, strict=True):
            # A burst is what TCP hands down at once (64 KiB); more would be sent for nothing after
            # every pause.
            what = ["root", "tbf", "rate", f"{bits_per_s}bit", "burst", "72kb", "latency", "50ms"]
            if bits_per_s:
                _ip("netns", "exec", name, "tc", "qdisc", "replace", "dev", device, *what)
            else:
                with contextlib.suppress(subprocess.CalledProcessError):  # there is none yet
                    _ip("netns", "exec", name, "tc", "qdisc", "del", "dev", device, "root")

    def bytes_sent(self) -> tuple[int, int]:
        """By either end since the beginning, with all headers."""
        sent = []
        for name, device in zip(self.names, self.devices, strict=True):
            words = ["netns", "exec", name, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"]
            sent.append(int(_ip(*words)))
        return sent[0], sent[1]


@contextlib.contextmanager
def slow_link() -> Iterator[Link]:
    """An unlimited link to begin with, gone at the end. Exits with the reason where none can be
    made.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        sys.exit("this needs root and the commands ip and tc: two namespaces play two machines")
    tag = f"ms{os.getpid()}"
    link = Link((f"{tag}x", f"{tag}y"), (f"{tag}a", f"{tag}b"))
    try:
        try:
            for name in link.names:
                _ip("netns", "add", name)
            _ip("link", "add", link.devices[0], "type", "veth", "peer", "name", link.devices[1])
        except subprocess.CalledProcessError as error:
            sys.exit(f"no right to make network namespaces here: {error.stderr.strip()}")
        for name, device, address in zip(link.names, link.devices, ADDRESSES, strict=True):
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            # Known everywhere. Some defaults send at the rate that they believe the link has, and
            # that changes here.
            _ip("netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
        yield link
    finally:
        for name in link.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
