"""Deployment files: `moeserve launch --print KIND`.

They start a server with Slurm, Kubernetes (LeaderWorkerSet), Docker Compose or systemd.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moeserve.errors import ConfigError

KEY = "/run/secrets/moeserve/cluster.key"  # path in a container
USER_ID = 10001  # of the image's user
MARGIN_S = 15  # time for a server to end after it has drained
NAME = "moeserve"
SECRET = "moeserve-cluster-key"
LABEL = "leaderworkerset.sigs.k8s.io/"
LWS_HEAD = f"""For LeaderWorkerSet 0.6 or newer. The machines' secret, once:
  kubectl create secret generic {SECRET} \\
    --from-literal=cluster.key="$(head -c 32 /dev/urandom | base64)"
Add the resources that the pods request: CPUs, memory, GPUs, nodes.
The image is built by docs/observability/Containerfile.
"""
LWS_HEAD_OF_MODELS = "The claim `models` holds the model; another volume does as well.\n"
COMPOSE_HEAD = f"""compose.yaml for Docker or Podman: each machine is a container; docker compose up
The image is built by docs/observability/Containerfile. The machines' secret, once:
  head -c 32 /dev/urandom | base64 > cluster.key
  chmod 400 cluster.key; sudo chown {USER_ID} cluster.key"""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A server on several machines, as the user described it."""

    words: Sequence[str]  # arguments of `moeserve serve`
    nodes: int  # number of machines
    model: Path | None  # as given
    rendezvous: str | None
    host_given: bool  # --host is among the words
    https: bool
    port: int
    drain_s: int  # how long running requests may take at a stop
    image: str

    @property
    def public_words(self) -> list[str]:
        """The arguments of `moeserve serve`, so that clients on other machines can connect."""
        if self.host_given:
            return [*self.words]
        return [*self.words, "--host", "0.0.0.0"]

    @property
    def model_folder(self) -> str | None:
        """The folder of the model, which all machines need, if the model is an absolute path."""
        if self.model is None or not self.model.is_absolute():
            return None
        return str(self.model.parent)

    @property
    def stop_s(self) -> int:
        """The longest time that a stop takes."""
        return self.drain_s + MARGIN_S


def as_yaml(head: str, *documents: dict[str, Any]) -> str:
    """Return YAML documents after a comment."""
    texts = [
        yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True)
        for document in documents
    ]
    return "".join(f"# {line}\n" for line in head.splitlines()) + "---\n".join(texts)


def lws(deployment: Deployment) -> str:
    """Return a LeaderWorkerSet, whose pods are the machines, and a Service of its leader."""
    template = {
        "size": deployment.nodes,
        # The other policies end the whole group if one pod ends. Here a single pod can join again,
        # while requests wait.
        "restartPolicy": "None",
        "leaderTemplate": {"spec": _pod(deployment, leads=True)},
        "workerTemplate": {"spec": _pod(deployment, leads=False)},
    }
    group = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": NAME},
        "spec": {"replicas": 1, "leaderWorkerTemplate": template},
    }
    leader = {f"{LABEL}name": NAME, f"{LABEL}worker-index": "0"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {
            "selector": leader,
            "ports": [{"name": "http", "port": deployment.port, "targetPort": "http"}],
        },
    }
    return as_yaml(
        LWS_HEAD + (LWS_HEAD_OF_MODELS if deployment.model_folder else ""), group, service
    )


def _pod(deployment: Deployment, *, leads: bool) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    ]
    # Escaped, because the kubelet replaces $(NAME).
    words = [word.replace("$(", "$$(") for word in deployment.public_words]
    container: dict[str, Any] = {"name": NAME, "image": deployment.image, "args": words}
    if deployment.nodes > 1:
        folder = KEY.rpartition("/")[0]
        container["env"] = [{"name": "MOESERVE_CLUSTER_KEY_FILE", "value": KEY}]
        mounts.append({"name": "cluster-key", "mountPath": folder, "readOnly": True})
        secret = {"secretName": SECRET, "defaultMode": 0o400}
        volumes.append({"name": "cluster-key", "secret": secret})
    if deployment.model_folder:
        mounts.append({"name": "models", "mountPath": deployment.model_folder, "readOnly": True})
        volumes.append(
            {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
        )
    if leads:
        container["ports"] = [{"name": "http", "containerPort": deployment.port}]
        container["startupProbe"] = _probe(deployment, "/livez", period_s=5, failures=24)
        container["readinessProbe"] = _probe(deployment, "/readyz", period_s=2, failures=1)
        container["livenessProbe"] = _probe(deployment, "/livez", period_s=10, failures=6)
    else:
        # Kubernetes stops all pods at the same time. Keep the workers until the leader has drained.
        # Then they end with the leader.
        container["lifecycle"] = {
            "preStop": {"exec": {"command": ["sleep", str(deployment.drain_s)]}}
        }
    return {
        "terminationGracePeriodSeconds": deployment.stop_s,
        # Service links set variables MOESERVE_..., which would be read as settings.
        "enableServiceLinks": False,
        # fsGroup lets the user read the secret, which root owns.
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER_ID, "fsGroup": USER_ID},
        "containers": [container | {"volumeMounts": mounts}],
        "volumes": volumes,
    }


def _probe(deployment: Deployment, path: str, period_s: int, failures: int) -> dict[str, Any]:
    get = {"path": path, "port": "http", "scheme": "HTTPS" if deployment.https else "HTTP"}
    return {
        "httpGet": get,
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def compose(deployment: Deployment) -> str:
    """Return a compose file, whose containers are the machines."""
    return as_yaml(
        COMPOSE_HEAD,
        {
            "name": "moeserve",
            "services": {
                f"machine-{rank}": _service(deployment, rank) for rank in range(deployment.nodes)
            },
        },
    )


def _service(deployment: Deployment, rank: int) -> dict[str, Any]:
    words = deployment.public_words
    volumes = []
    if deployment.model_folder:
        volumes.append(f"{deployment.model_folder}:{deployment.model_folder}:ro")
    if deployment.nodes > 1:
        words += [
            "--nnodes",
            str(deployment.nodes),
            "--node-rank",
            str(rank),
            "--cluster-key-file",
            KEY,
        ]
        if not deployment.rendezvous:
            words += ["--rendezvous", "machine-0:29500"]
        volumes.append(f"./cluster.key:{KEY}:ro")
    service: dict[str, Any] = {
        "image": deployment.image,
        "command": [word.replace("$", "$$") for word in words],  # Compose replaces $NAME
        "restart": "unless-stopped",
        "stop_grace_period": f"{deployment.stop_s}s",
        "shm_size": "2gb",
        "volumes": volumes,
    }
    if not volumes:
        del service["volumes"]
    if rank:
        # A worker serves no HTTP. It ends with machine 0, so its stop signal must have no effect.
        return service | {"healthcheck": {"disable": True}, "stop_signal": "SIGWINCH"}
    return service | {
        "ports": [f"{deployment.port}:{deployment.port}"],
        "healthcheck": _health(deployment),
    }


def _health(deployment: Deployment) -> dict[str, Any]:
    url = f"{'https' if deployment.https else 'http'}://127.0.0.1:{deployment.port}/livez"
    context = ", context=s._create_unverified_context()" if deployment.https else ""
    code = f"import ssl as s, urllib.request as u; u.urlopen('{url}', timeout=2{context})"
    test = ["CMD", "/opt/moeserve/bin/python", "-c", code]
    return {"test": test, "interval": "15s", "timeout": "3s", "start_period": "10m"}


def slurm(deployment: Deployment) -> str:
    """Return a Slurm batch script that runs `moeserve launch --slurm`."""
    return f"""#!/bin/bash
# Save as moeserve.sbatch, add partition, GPUs and so on, and start it: sbatch moeserve.sbatch
# Let running requests finish and end it: scancel --batch --signal=TERM JOBID
#SBATCH --job-name=moeserve
#SBATCH --nodes={deployment.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=moeserve-%j.log
# The job lives on when a node fails; its part is started again once the node is back.
#SBATCH --no-kill
# Before the time limit, as at a stop.
#SBATCH --signal=B:TERM@{deployment.stop_s + 60}

# source /path/to/.venv/bin/activate
exec moeserve launch --slurm -- serve {shlex.join(deployment.public_words)}
"""


def systemd(deployment: Deployment) -> str:
    """Return a systemd unit for all machines; its instance is the machine's number.

    Raises ConfigError if there are several machines and no --rendezvous.
    """
    if deployment.rendezvous is None and deployment.nodes > 1:
        raise ConfigError(
            "--print systemd: give the address of machine 0, for example `-- serve MODEL"
            " --rendezvous 10.0.0.1:29500`"
        )
    words = " ".join(map(_quoted, deployment.public_words))
    cluster_flags = (
        f" --nnodes {deployment.nodes} --node-rank %i --cluster-key-file /etc/moeserve/cluster.key"
        if deployment.nodes > 1
        else ""
    )
    return f"""# /etc/systemd/system/moeserve@.service on each of {deployment.nodes} machines;
# then on machine 0, 1, ...:
#   systemctl enable --now moeserve@0      (its own number on each)
# All of them need one secret, made once and copied:
#   head -c 32 /dev/urandom | base64 > /etc/moeserve/cluster.key
#   chown moeserve /etc/moeserve/cluster.key; chmod 600 /etc/moeserve/cluster.key
[Unit]
Description=moeserve, machine %i of {deployment.nodes}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
User=moeserve
Group=moeserve
ExecStart=/opt/moeserve/bin/moeserve serve {words}{cluster_flags}
ExecReload=/bin/kill -HUP $MAINPID
# Machine 0 drains for {deployment.drain_s} s on SIGTERM.
# A machine that ends is there again at once, and requests continue.
KillMode=mixed
TimeoutStopSec={deployment.stop_s}
Restart=always
RestartSec=1
# Exit codes 3 to 5: checkpoint, port or memory. A restart would fail again.
# Exit code 2 may mean that machine 0 is not there yet.
RestartPreventExitStatus=3 4 5
LimitNOFILE=65536
LimitMEMLOCK=infinity
StateDirectory=moeserve
CacheDirectory=moeserve
Environment=HOME=/var/lib/moeserve XDG_CACHE_HOME=/var/cache/moeserve
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes

[Install]
WantedBy=multi-user.target
"""


def _quoted(word: str) -> str:
    """Quote a word for a command line of systemd."""
    word = word.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word):
        return word
    return '"' + word.replace('"', '\\"').replace("\n", "\\n") + '"'


KINDS = {"slurm": slurm, "lws": lws, "compose": compose, "systemd": systemd}
