"""A compose file: the machines are containers of one computer."""

from typing import Any

from moeserve.cluster.launch.files.deployment import KEY, USER_ID, Deployment, as_yaml

HEAD = f"""compose.yaml for Docker or Podman: each machine is a container; docker compose up
The image is built by docs/observability/Containerfile. The machines' secret, once:
  head -c 32 /dev/urandom | base64 > cluster.key; chmod 400 cluster.key; sudo chown {USER_ID} cluster.key"""


def compose(it: Deployment) -> str:
    """Returns the file."""
    return as_yaml(HEAD, {"name": "moeserve", "services": {f"machine-{n}": _service(it, n) for n in range(it.nodes)}})


def _service(it: Deployment, rank: int) -> dict[str, Any]:
    words = [*it.words_for_all]
    volumes = [f"{it.model_folder}:{it.model_folder}:ro"] if it.model_folder else []
    if it.nodes > 1:
        words += ["--nnodes", str(it.nodes), "--node-rank", str(rank), "--cluster-key-file", KEY]
        words += [] if it.rendezvous else ["--rendezvous", "machine-0:29500"]
        volumes.append(f"./cluster.key:{KEY}:ro")
    service: dict[str, Any] = {
        "image": it.image,
        "command": [word.replace("$", "$$") for word in words],
        "restart": "unless-stopped",
        "stop_grace_period": f"{it.stop_s}s",
        "shm_size": "2gb",
        "volumes": volumes,
    }
    if not volumes:
        del service["volumes"]
    if rank:
        return service | {"healthcheck": {"disable": True}, "stop_signal": "SIGWINCH"}  # no HTTP; ends with machine 0
    return service | {"ports": [f"{it.port}:{it.port}"], "healthcheck": _health(it)}


def _health(it: Deployment) -> dict[str, Any]:
    url = f"{'https' if it.https else 'http'}://127.0.0.1:{it.port}/livez"
    context = ", context=s._create_unverified_context()" if it.https else ""
    code = f"import ssl as s, urllib.request as u; u.urlopen('{url}', timeout=2{context})"
    test = ["CMD", "/opt/moeserve/bin/python", "-c", code]
    return {"test": test, "interval": "15s", "timeout": "3s", "start_period": "10m"}
