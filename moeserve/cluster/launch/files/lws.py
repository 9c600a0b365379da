"""Kubernetes: a LeaderWorkerSet, whose pods are the machines, and a Service in front of its leader."""

from typing import Any

from moeserve.cluster.launch.files.deployment import KEY, USER_ID, Deployment, as_yaml

NAME = "moeserve"
SECRET = "moeserve-cluster-key"
LABEL = "leaderworkerset.sigs.k8s.io/"
HEAD = f"""For LeaderWorkerSet 0.6 or newer. The machines' secret, once:
  kubectl create secret generic {SECRET} --from-literal=cluster.key="$(head -c 32 /dev/urandom | base64)"
Add what the pods request: CPUs, memory, GPUs, nodes. The image is built by docs/observability/Containerfile.
"""
HEAD_OF_MODELS = "The claim `models` holds the model; another volume does as well.\n"


def lws(it: Deployment) -> str:
    """Returns both documents."""
    template = {
        "size": it.nodes,
        # The other policies end the whole group with one pod, which would join again while requests wait.
        "restartPolicy": "None",
        "leaderTemplate": {"spec": _pod(it, leads=True)},
        "workerTemplate": {"spec": _pod(it, leads=False)},
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
        "spec": {"selector": leader, "ports": [{"name": "http", "port": it.port, "targetPort": "http"}]},
    }
    return as_yaml(HEAD + (HEAD_OF_MODELS if it.model_folder else ""), group, service)


def _pod(it: Deployment, *, leads: bool) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}]
    words = [word.replace("$(", "$$(") for word in it.words_for_all]  # the kubelet replaces $(NAME)
    container: dict[str, Any] = {"name": NAME, "image": it.image, "args": words}
    if it.nodes > 1:
        folder = KEY.rpartition("/")[0]
        container["env"] = [{"name": "MOESERVE_CLUSTER_KEY_FILE", "value": KEY}]
        mounts.append({"name": "cluster-key", "mountPath": folder, "readOnly": True})
        secret = {"secretName": SECRET, "defaultMode": 0o400}
        volumes.append({"name": "cluster-key", "secret": secret})
    if it.model_folder:
        mounts.append({"name": "models", "mountPath": it.model_folder, "readOnly": True})
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}})
    if leads:
        container["ports"] = [{"name": "http", "containerPort": it.port}]
        container |= {"startupProbe": _probe(it, "/livez", 5, 24), "readinessProbe": _probe(it, "/readyz", 2, 1)}
        container["livenessProbe"] = _probe(it, "/livez", 10, 6)
    else:  # It ends with the leader. Kubernetes would end all pods at once, in the middle of the requests.
        container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(it.drain_s)]}}}
    return {
        "terminationGracePeriodSeconds": it.stop_s,
        "enableServiceLinks": False,  # its variables look like settings of ours
        # The kubelet lets the group read the secret, which root owns.
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER_ID, "fsGroup": USER_ID},
        "containers": [container | {"volumeMounts": mounts}],
        "volumes": volumes,
    }


def _probe(it: Deployment, path: str, period_s: int, failures: int) -> dict[str, Any]:
    get = {"path": path, "port": "http", "scheme": "HTTPS" if it.https else "HTTP"}
    return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 3, "failureThreshold": failures}
