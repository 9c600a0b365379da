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

AGAIN_S = 1.0  # before a kubectl that has ended is run again
LAST_LOGS_S = 2.0  # time to show the last log lines
KUBECTL_S = 60.0  # timeout of a kubectl that does not wait for pods
MARGIN_S = 30.0  # for pods to end after they have drained


async def run_on_kubernetes(it: Deployment, namespace: str | None) -> int:
    """Serve until the leader ends, and return its exit code, 1 if it was lost.

    Raises ConfigError if kubectl cannot create a resource.
    """
    return await KubernetesLaunch(it, namespace).run()


class KubernetesLaunch:
    """A LeaderWorkerSet, from its creation to the leader's exit code."""

    def __init__(self, it: Deployment, namespace: str | None) -> None:
        self._it = it
        self._kubectl = ("kubectl", *(("--namespace", namespace) if namespace else ()))
        self._states: dict[str, str] = {}  # by the pod's uid
        self._logs: dict[str, asyncio.Task[None]] = {}  # by the pod's uid and number of restarts
        self._ended, *self._signals = (asyncio.get_running_loop().create_future() for _ in range(3))

    async def run(self) -> int:
        """Serve; see `run_on_kubernetes`."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        drain, kill = self._signals
        created = await self._create()
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((self._ended, drain, watching), return_when=asyncio.FIRST_COMPLETED)
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
                await watching  # raises, because it never returns
            await asyncio.wait((self._ended,), timeout=AGAIN_S)
            return int(self._ended.result()) if self._ended.done() and deleting.result() else 1
        finally:
            if self._logs:
                await asyncio.wait(self._logs.values(), timeout=LAST_LOGS_S)
            tasks = (watching, *self._logs.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _on_signal(self, number: signal.Signals) -> None:
        """Drain on the first signal, stop at once on the second."""
        waiting = [it for it in self._signals if not it.done()]
        if len(waiting) == 2:
            to_stderr(f"moeserve launch: {number.name}: draining; once more stops now")
        if waiting:
            waiting[0].set_result(number)

    async def _create(self) -> list[str]:
        """Create the resources, and return their names in kubectl's form."""
        # `create` fails if they exist already. `apply` would change the server of somebody else.
        documents = lws(self._it)
        if self._it.nodes > 1:
            key = {"cluster.key": secrets.token_urlsafe(32)}
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": SECRET},
                "stringData": key,
            }
            documents = f"{yaml.safe_dump(secret)}---\n{documents}"
        code, out, why = await self._run("create", "-f", "-", "-o", "name", stdin=documents)
        created = out.split()
        if code:
            if created:
                await self._delete(created)
            left = (
                f"{' '.join(self._kubectl)} delete leaderworkerset/{NAME} service/{NAME}"
                f" secret/{SECRET}"
            )
            remedy = (
                f"; `{left}` deletes another launch, or what is left of one"
                if "AlreadyExists" in why
                else ""
            )
            raise ConfigError(f"kubectl create: {why}{remedy}")
        to_stderr(f"moeserve launch: created {', '.join(created)}")
        return created

    async def _delete(self, created: list[str]) -> bool:
        """Delete these resources, and wait for the end of their pods. Return whether they ended."""
        limit_s = self._it.stop_s + MARGIN_S
        words = (
            "delete",
            *created,
            "--ignore-not-found",
            "--cascade=foreground",
            f"--timeout={limit_s:g}s",
        )
        code, _, why = await self._run(*words, limit_s=limit_s + KUBECTL_S)
        if code:
            to_stderr(f"moeserve launch: kubectl delete: {why}; delete {' '.join(created)} by hand")
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
            await asyncio.sleep(AGAIN_S)

    def _on_pod(self, pod: dict[str, Any]) -> None:
        meta = pod["metadata"]
        status = pod.get("status", {})
        uid = meta["uid"]
        rank = int(meta["labels"][f"{LABEL}worker-index"])
        if uid not in self._states and "deletionTimestamp" in meta:
            return  # a pod of an earlier launch
        container: dict[str, Any] = next(iter(status.get("containerStatuses", ())), {})
        state = _state(status, container, leads=rank == 0)
        if state != self._states.get(uid):
            self._states[uid] = state
            to_stderr(
                f"moeserve launch: {meta['name']} (machine {rank} of {self._it.nodes}): {state}"
            )
        if {"running", "terminated"} & container.get("state", {}).keys():
            name = f"{uid} {container.get('restartCount', 0)}"
            if name not in self._logs:
                follow = self._follow(meta["name"], uid)
                self._logs[name] = spawn(follow, name=f"log of {meta['name']}", on_error=log_error)
        end = container.get("state", {}).get("terminated") or container.get("lastState", {}).get(
            "terminated"
        )
        if rank == 0 and not self._ended.done() and (end or status.get("phase") == "Failed"):
            self._ended.set_result(int(end["exitCode"]) if end else 1)

    async def _follow(self, pod: str, uid: str) -> None:
        """Show a container's log. Connect again if the connection ends before the container."""
        since: tuple[str, ...] = ()
        while not since or self._states[uid] in ("running", "ready"):
            async for line in self._lines("logs", "--follow", pod, *since):
                to_stderr(f"{pod} | {line}")
            await asyncio.sleep(AGAIN_S)
            since = (f"--since={2 * AGAIN_S:g}s",)

    async def _lines(self, *words: str) -> Any:
        connection = await ProcessConnection.open((*self._kubectl, *words))
        try:
            while line := await connection.readline():
                yield one_line(line.decode(errors="replace"))
        finally:
            await connection.close()

    async def _run(
        self, *words: str, stdin: str = "", limit_s: float = KUBECTL_S
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
            async with asyncio.timeout(limit_s):
                out, err = await process.communicate(stdin.encode())
        except TimeoutError:
            return 1, "", f"no answer within {limit_s:g} s"
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
    bad = [state["waiting"]] if "waiting" in state else []
    bad += [it for it in status.get("conditions", ()) if it["status"] == "False"]
    told = [it.get("reason", ""), it.get("message", "")] if (it := next(iter(bad), None)) else []
    return one_line(": ".join(word for word in (status.get("phase", "Pending"), *told) if word))
