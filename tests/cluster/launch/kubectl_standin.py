"""A stand-in for kubectl; a test plays the cluster with files in $STANDIN.

pods/*.json    the output of `get pods --watch`
logs/POD       the output of `logs`
exists         makes `create` fail after its first object
ends           ends a watch
gone           lets `delete` return
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import yaml

HERE = Path(os.environ["STANDIN"])


def main(words: list[str]) -> int:
    with (HERE / "calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    words = words[2:] if words[0] == "--namespace" else words
    if words[0] == "create":
        return create()
    if words[0] == "get":
        return watch()
    if words[0] == "logs":
        sys.stdout.write((HERE / "logs" / words[2]).read_text())
    elif words[1] != "pods":  # delete
        until("gone")
    return 0


def create() -> int:
    text = sys.stdin.read()
    (HERE / "created").write_text(text)
    for it in yaml.safe_load_all(text):
        say(f"{it['kind'].lower()}/{it['metadata']['name']}")
        if (HERE / "exists").exists():
            return fail('Error from server (AlreadyExists): "moeserve" already exists')
    return 0


def watch() -> int:
    shown: dict[str, str] = {}
    while not (HERE / "ends").exists():
        for path in sorted((HERE / "pods").glob("*.json")):
            if shown.get(path.name) != (text := path.read_text()):
                shown[path.name] = text
                say(json.dumps(json.loads(text), indent=4))
        time.sleep(0.01)
    (HERE / "ends").unlink()
    return fail("error: the server has closed the connection")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fail(why: str) -> int:
    sys.stderr.write(f"{why}\n")
    return 1


def until(name: str) -> None:
    while not (HERE / name).exists():
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
