"""Devices and links: the peak rates of the data sheets, and the shares of them that kernels reach.

The shares are from measurements that others published:

- Fused MoE kernels (vLLM) read 3.4 to 4.1 of the H200's 4.8 TB/s with 128 experts of 704 x 2,816.
  They reach 0.53 of the H100's bf16 peak and 0.61 of the H200's: the median of the shapes that
  benchmarks/published.py does not compare with.
- MLA attention (FlashMLA on H800) reads at 0.9 of the bandwidth and computes 0.58 PFLOP/s.
- FP8 GEMMs (DeepGEMM on H800) reach 0.93 to 1.35 of 1.98 PFLOP/s.
- All-to-all rates are from DeepEP's table for 8 to 128 ranks (128 tokens, width 7,168, 8 experts).

A gather is assumed to reach 0.7 of a link's rate in one direction. One number, `in_situ`, was
fitted to a server's throughput: decode and 4k prefill of SGLang on 96 H100.
benchmarks/published.py compares predictions with other published results.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from moeserve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between devices. Rates are per device, as reached by all-to-all messages."""

    name: str
    bytes_per_s: float
    latency_s: float  # of one message
    gather_bytes_per_s: float = 0.0  # of tensor-parallel gathers; 0 if no gather uses this link


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU model."""

    name: str
    memory: int  # bytes
    bytes_per_s: float  # memory bandwidth
    flops: float  # operations per second with 16-bit operands
    flops_8bit: float
    peer: Link  # to the other devices of a machine
    # Shares of the peak that kernels reach
    read_share: float = 0.82  # of `bytes_per_s`
    dense_share: float = 0.70  # of `flops` or `flops_8bit`, in GEMMs
    expert_share: float = 0.57  # of `flops`
    expert_8bit_share: float = 0.50  # of `flops_8bit`
    attention_share: float = 0.55  # of `flops`
    # Share of the shorter one of reading and computing that the longer one hides.
    overlap: float = 0.6
    in_situ: float = 0.70  # speed of kernels in a server, relative to a benchmark of the kernel
    launch_s: float = 20e-6  # for the kernels of a layer, in a CUDA graph
    host_s: float = 300e-6  # host time per step
    host_row_s: float = 1.5e-6  # host time per request of a step


NVLINK4 = Link(name="NVLink 4", bytes_per_s=150e9, latency_s=25e-6, gather_bytes_per_s=315e9)
NVLINK5 = Link(name="NVLink 5", bytes_per_s=300e9, latency_s=20e-6, gather_bytes_per_s=630e9)
NVLINK3 = Link(name="NVLink 3", bytes_per_s=100e9, latency_s=25e-6, gather_bytes_per_s=210e9)
PCIE4 = Link(name="PCIe 4", bytes_per_s=20e9, latency_s=40e-6, gather_bytes_per_s=20e9)
LINKS = {
    "ib400": Link(name="InfiniBand 400G", bytes_per_s=45e9, latency_s=25e-6),
    "ib200": Link(name="InfiniBand 200G", bytes_per_s=22e9, latency_s=25e-6),
    "eth100": Link(name="Ethernet 100G", bytes_per_s=11e9, latency_s=60e-6),
    "eth25": Link(name="Ethernet 25G", bytes_per_s=2.8e9, latency_s=60e-6),
    "eth10": Link(name="Ethernet 10G", bytes_per_s=1.1e9, latency_s=60e-6),
}
_GB = 10**9
DEVICES = {
    device.name.lower(): device
    for device in (
        Device(
            name="H100",
            memory=80 * _GB,
            bytes_per_s=3.35e12,
            flops=989e12,
            flops_8bit=1979e12,
            peer=NVLINK4,
        ),
        Device(
            name="H200",
            memory=141 * _GB,
            bytes_per_s=4.8e12,
            flops=989e12,
            flops_8bit=1979e12,
            peer=NVLINK4,
        ),
        Device(
            name="B200",
            memory=180 * _GB,
            bytes_per_s=8.0e12,
            flops=2250e12,
            flops_8bit=4500e12,
            peer=NVLINK5,
        ),
        Device(
            name="A100",
            memory=80 * _GB,
            bytes_per_s=2.04e12,
            flops=312e12,
            flops_8bit=312e12,
            peer=NVLINK3,
        ),
        Device(
            name="L40S",
            memory=48 * _GB,
            bytes_per_s=0.864e12,
            flops=362e12,
            flops_8bit=733e12,
            peer=PCIE4,
        ),
    )
}
_CLUSTER = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z]\w*)")


def find_device(name: str) -> Device:
    """Return a device by its name, in any case. Raises ConfigError with the known names."""
    if name.lower() not in DEVICES:
        similar = get_close_matches(name.lower(), DEVICES, 1)
        hint = f"did you mean {similar[0]}? " if similar else ""
        raise ConfigError(f"unknown device {name!r}; {hint}known devices: {', '.join(DEVICES)}")
    return DEVICES[name.lower()]


def find_link(name: str) -> Link:
    """Return a link between machines by its name. Raises ConfigError with the known names."""
    if name not in LINKS:
        raise ConfigError(f"--link {name!r} is unknown; known links: {', '.join(LINKS)}")
    return LINKS[name]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines with the same number of devices of one model."""

    nodes: int
    per_node: int
    device: Device
    link: Link  # between machines

    @property
    def num_devices(self) -> int:
        """The number of devices on all machines."""
        return self.nodes * self.per_node


def read_gpus(text: str, link: str = "ib400") -> Cluster:
    """Parse `MACHINESxDEVICESxMODEL`: 2x8xH100, 8xH200 (one machine), B200 (one device).

    Raises ConfigError.
    """
    match = _CLUSTER.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"--gpus {text!r} must be like 2x8xH100 (machines x devices x model), 8xH200 or B200"
        )
    first, second, model = match.groups()
    nodes = int(first) if second else 1
    per_node = int(second or first or 1)
    if not (0 < nodes <= 1024 and 0 < per_node <= 1024):  # the limit of --nnodes
        raise ConfigError(
            f"--gpus {text!r:.100}: must be 1 to 1024 machines with 1 to 1024 devices each"
        )
    return Cluster(nodes=nodes, per_node=per_node, device=find_device(model), link=find_link(link))
