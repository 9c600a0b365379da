"""Files for what starts machines without `moeserve launch`, or around it: `moeserve launch --print KIND`."""

from moeserve.cluster.launch.files.compose import compose
from moeserve.cluster.launch.files.deployment import Deployment
from moeserve.cluster.launch.files.lws import lws
from moeserve.cluster.launch.files.slurm import slurm
from moeserve.cluster.launch.files.systemd import systemd

KINDS = {"slurm": slurm, "lws": lws, "compose": compose, "systemd": systemd}

__all__ = ["KINDS", "Deployment"]
