"""Two network namespaces joined by a veth pair of variable rate, in place of two machines."""

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
    """A veth pair: `names` are the namespaces, `devices` the pair's end in each of them."""

    names: tuple[str, str]
    devices: tuple[str, str]

    def limit(self, bits_per_s: int) -> None:
        """Limit the rate in each direction; 0 removes the limit. Connections stay open."""
        for name, device in zip(self.names, self.devices, strict=True):
            # TCP hands down up to 64 KiB at once. A larger bucket would send that much more for
            # free after every pause.
            what = ["root", "tbf", "rate", f"{bits_per_s}bit", "burst", "72kb", "latency", "50ms"]
            if bits_per_s:
                _ip("netns", "exec", name, "tc", "qdisc", "replace", "dev", device, *what)
            else:
                with contextlib.suppress(subprocess.CalledProcessError):  # no limit is set
                    _ip("netns", "exec", name, "tc", "qdisc", "del", "dev", device, "root")

    def bytes_sent(self) -> tuple[int, int]:
        """Return the bytes that each end has sent so far, headers included."""
        sent = []
        for name, device in zip(self.names, self.devices, strict=True):
            words = ["netns", "exec", name, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"]
            sent.append(int(_ip(*words)))
        return sent[0], sent[1]


@contextlib.contextmanager
def slow_link() -> Iterator[Link]:
    """Yield a link without a limit, and remove it at the end.

    Exits with the reason if namespaces cannot be made here.
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
            # Some default algorithms pace by the rate that they estimate for the link, which
            # changes here. Every kernel has reno.
            _ip("netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
        yield link
    finally:
        for name in link.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
