"""`moeserve launch --kubernetes`, which calls kubectl.

It creates a LeaderWorkerSet (like `--print lws`) and the machines' secret, reports the states of
the pods, shows their logs, and deletes everything when the leader has ended.
"""

import asyncio
import json
import secrets
import shutil
import signal
from contextlib import suppress
from typing import Any

import yaml

from moeserve.actor.process import one_line, to_stderr
from moeserve.actor.tasks import log_error, spawn
from moeserve.cluster.launch.connection import ProcessConnection
from moeserve.cluster.launch.files import LABEL, NAME, SECRET, Deployment, lws
from moeserve.errors import ConfigError

RETRY_PAUSE_S = 1.0  # before a kubectl that has ended is started again
LAST_LOGS_S = 2.0  # time to show the last log lines
KUBECTL_TIMEOUT_S = 60.0  # of a kubectl that does not wait for pods
MARGIN_S = 30.0  # for pods to end after they have drained


async def run_on_kubernetes(deployment: Deployment, namespace: str | None) -> int:
    """Serve until the leader ends, and return its exit code, 1 if it was lost.

    Raises ConfigError if kubectl cannot create a resource.
    """
    return await KubernetesLaunch(deployment, namespace).run()


class KubernetesLaunch:
    """A LeaderWorkerSet, from its creation to the leader's exit code."""

    def __init__(self, deployment: Deployment, namespace: str | None) -> None:
        self._deployment = deployment
        self._kubectl = ("kubectl", *(("--namespace", namespace) if namespace else ()))
        self._states: dict[str, str] = {}  # by the pod's uid
        # Tasks that show logs, by the pod's uid and the container's number of restarts.
        self._log_tasks: dict[str, asyncio.Task[None]] = {}
        loop = asyncio.get_running_loop()
        self._leader_ended: asyncio.Future[Any] = loop.create_future()  # the leader's exit code
        # The first signal drains, the second one kills.
        self._signals: list[asyncio.Future[Any]] = [
            loop.create_future(),
            loop.create_future(),
        ]

    async def run(self) -> int:
        """Serve; see `run_on_kubernetes`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        drain, kill = self._signals
        created = await self._create()
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait(
                (self._leader_ended, drain, watching), return_when=asyncio.FIRST_COMPLETED
            )
            deleting = asyncio.create_task(self._delete(created))
            await asyncio.wait((deleting, kill), return_when=asyncio.FIRST_COMPLETED)
            if kill.done():
                deleting.cancel()
                await self._run(
                    "delete", "pods", "-l", f"{LABEL}name={NAME}", "--grace-period=0", "--force"
                )
                await self._delete(created)
                return 128 + int(kill.result())
            if watching.done():
                await watching  # raises, because `_watch` never returns
            await asyncio.wait((self._leader_ended,), timeout=RETRY_PAUSE_S)
            if self._leader_ended.done() and deleting.result():
                return int(self._leader_ended.result())
            return 1
        finally:
            if self._log_tasks:
                await asyncio.wait(self._log_tasks.values(), timeout=LAST_LOGS_S)
            tasks = (watching, *self._log_tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _on_signal(self, number: signal.Signals) -> None:
        """Drain on the first signal, stop at once on the second."""
        pending = [received for received in self._signals if not received.done()]
        if len(pending) == 2:
            to_stderr(f"moeserve launch: {number.name}: draining; once more stops now")
        if pending:
            pending[0].set_result(number)

    async def _create(self) -> list[str]:
        """Create the resources, and return their names in kubectl's form."""
        # `create` fails if they exist already. `apply` would change the server of somebody else.
        documents = lws(self._deployment)
        if self._deployment.nodes > 1:
            key = {"cluster.key": secrets.token_urlsafe(32)}
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": SECRET},
                "stringData": key,
            }
            documents = f"{yaml.safe_dump(secret)}---\n{documents}"
        code, out, error = await self._run("create", "-f", "-", "-o", "name", stdin=documents)
        created = out.split()
        if code:
            if created:
                await self._delete(created)
            command = (
                f"{' '.join(self._kubectl)} delete leaderworkerset/{NAME} service/{NAME}"
                f" secret/{SECRET}"
            )
            remedy = (
                f"; `{command}` deletes another launch, or what is left of one"
                if "AlreadyExists" in error
                else ""
            )
            raise ConfigError(f"kubectl create: {error}{remedy}")
        to_stderr(f"moeserve launch: created {', '.join(created)}")
        return created

    async def _delete(self, created: list[str]) -> bool:
        """Delete these resources, and wait for the end of their pods. Return whether they ended."""
        timeout_s = self._deployment.stop_s + MARGIN_S
        words = (
            "delete",
            *created,
            "--ignore-not-found",
            "--cascade=foreground",
            f"--timeout={timeout_s:g}s",
        )
        code, _, error = await self._run(*words, timeout_s=timeout_s + KUBECTL_TIMEOUT_S)
        if code:
            to_stderr(
                f"moeserve launch: kubectl delete: {error}; delete {' '.join(created)} by hand"
            )
        return code == 0

    async def _watch(self) -> None:
        """Follow the pods' states. Start the watch again whenever it ends, which is normal."""
        words = ("get", "pods", "-l", f"{LABEL}name={NAME}", "--watch", "-o", "json")
        while True:
            pod = ""
            async for line in self._lines(*words):
                if line == "{" or pod:
                    pod += line
                else:
                    to_stderr(f"kubectl | {line}")
                if line == "}":  # the end of the outermost object, because others are indented
                    with suppress(json.JSONDecodeError):
                        self._on_pod(json.loads(pod))
                    pod = ""
            await asyncio.sleep(RETRY_PAUSE_S)

    def _on_pod(self, pod: dict[str, Any]) -> None:
        """Print a new state of a pod, show its log, and note the end of the leader."""
        metadata = pod["metadata"]
        status = pod.get("status", {})
        uid = metadata["uid"]
        rank = int(metadata["labels"][f"{LABEL}worker-index"])
        if uid not in self._states and "deletionTimestamp" in metadata:
            return  # a pod of an earlier launch
        container: dict[str, Any] = next(iter(status.get("containerStatuses", ())), {})
        state = _state(status, container, leads=rank == 0)
        if state != self._states.get(uid):
            self._states[uid] = state
            name = metadata["name"]
            to_stderr(
                f"moeserve launch: {name} (machine {rank} of {self._deployment.nodes}): {state}"
            )
        if {"running", "terminated"} & container.get("state", {}).keys():
            container_run = f"{uid} {container.get('restartCount', 0)}"
            if container_run not in self._log_tasks:
                self._log_tasks[container_run] = spawn(
                    self._follow(metadata["name"], uid),
                    name=f"log of {metadata['name']}",
                    on_error=log_error,
                )
        if rank == 0 and not self._leader_ended.done():
            end = container.get("state", {}).get("terminated")
            # A restarted container has the end of the previous one.
            end = end or container.get("lastState", {}).get("terminated")
            if end:
                self._leader_ended.set_result(int(end["exitCode"]))
            elif status.get("phase") == "Failed":
                self._leader_ended.set_result(1)

    async def _follow(self, pod: str, uid: str) -> None:
        """Show a container's log. Connect again if the connection ends before the container."""
        since_flag: tuple[str, ...] = ()  # from the second connection on: only recent lines
        while not since_flag or self._states[uid] in ("running", "ready"):
            async for line in self._lines("logs", "--follow", pod, *since_flag):
                to_stderr(f"{pod} | {line}")
            await asyncio.sleep(RETRY_PAUSE_S)
            since_flag = (f"--since={2 * RETRY_PAUSE_S:g}s",)

    async def _lines(self, *words: str) -> Any:
        """Run kubectl, and yield the lines of its output."""
        connection = await ProcessConnection.open((*self._kubectl, *words))
        try:
            while line := await connection.readline():
                yield one_line(line.decode(errors="replace"))
        finally:
            await connection.close()

    async def _run(
        self, *words: str, stdin: str = "", timeout_s: float = KUBECTL_TIMEOUT_S
    ) -> tuple[int, str, str]:
        """Run kubectl. Return its exit code, its output and the last line of its stderr.

        All lines of stderr are shown.
        """
        if shutil.which("kubectl") is None:
            raise ConfigError("--kubernetes: kubectl is not on PATH; install it on this machine")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._kubectl, *words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate(stdin.encode())
        except TimeoutError:
            return 1, "", f"no answer within {timeout_s:g} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        errors = [one_line(line) for line in err.decode(errors="replace").splitlines()]
        for line in errors:
            to_stderr(f"kubectl | {line}")
        return process.returncode or 0, out.decode(), errors[-1] if errors else "no output"


def _state(status: dict[str, Any], container: dict[str, Any], *, leads: bool) -> str:
    """Return the state of a pod as text, in Kubernetes' own words if it does not run."""
    state = container.get("state", {})
    if "terminated" in state:
        return f"ended with code {state['terminated']['exitCode']}"
    if "running" in state:
        return "ready" if leads and container.get("ready") else "running"
    problems = [state["waiting"]] if "waiting" in state else []
    problems += [
        condition for condition in status.get("conditions", ()) if condition["status"] == "False"
    ]
    words = [status.get("phase", "Pending")]
    if problems:
        words += [problems[0].get("reason", ""), problems[0].get("message", "")]
    return one_line(": ".join(word for word in words if word))
