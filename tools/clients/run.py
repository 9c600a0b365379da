"""Check public client libraries, at their newest versions, against a server.

    python tools/clients/run.py                        # all, against a server of the demo model
    python tools/clients/run.py openai ai.mjs          # only these
    python tools/clients/run.py --base-url http://127.0.0.1:8000 --model NAME

Prints a table in Markdown, that of docs/clients.md, and the errors; exits with 1 if a check failed.
`uv` installs the libraries of each `with_*.py`, and `npm` those of package.json, from the package
indexes, into build/clients/. Libraries of which the command is not found are left out, with a word
about it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "clients"
CONTEXT_LENGTH = 65_536  # agents' prompts are long
COLUMNS = {
    "first_chat": "chat",
    "stream": "stream",
    "tool_round_trip": "tools",
    "second_turn": "second turn",
    "structured_output": "structured",
    "overflow": "overflow",
}
Result = dict[str, Any]  # client, version, api, check, error


def scripts(names: Sequence[str]) -> list[Path]:
    """Return the scripts of these names, such as "openai" and "openai.mjs"; none for all."""
    found = sorted([*HERE.glob("with_*.py"), *HERE.glob("with_*.mjs")])
    by_name = {path.name.removeprefix("with_").removesuffix(".py"): path for path in found}
    if unknown := set(names) - by_name.keys():
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(by_name)}")
    return [by_name[name] for name in names] if names else found


@contextmanager
def demo_server() -> Iterator[str]:
    """Run a server of the demo model with a long context; yield its URL."""
    model = WORK / "demo"
    shutil.copytree(ROOT / "moeserve" / "assets" / "demo", model, dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT_LENGTH
    (model / "config.json").write_text(json.dumps(config))
    port = "8765"
    log = WORK / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "moeserve.cli.main", "serve", str(model)),
                *("--served-model-name", "demo", "--port", port),
                *("--max-model-len", str(CONTEXT_LENGTH)),
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(process, url, log)
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    sys.exit(f"the server ended:\n{log.read_text()}")


def install_npm() -> None:
    """Install the packages of package.json beside a copy of the scripts."""
    for path in [HERE / "package.json", *HERE.glob("*.mjs")]:
        shutil.copy(path, WORK)
    command = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--no-package-lock"]
    subprocess.run(command, cwd=WORK, check=True)


def command_of(script: Path) -> list[str]:
    if script.suffix == ".mjs":
        return ["node", str(WORK / script.name)]
    return ["uv", "run", "--quiet", "--no-project", "--script", str(script)]


def run_script(script: Path, base_url: str, model: str) -> list[Result]:
    """Return the results of one script; an error of its own is a result, too."""
    env = {
        "UV_CACHE_DIR": str(WORK / "uv"),
        **os.environ,
        "BASE_URL": base_url,
        "MODEL": model,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(command_of(script), env=env, capture_output=True, text=True)
    # A library may print to the same line.
    results = [
        json.JSONDecoder().raw_decode(line)[0]
        for line in done.stdout.splitlines()
        if line.startswith('{"client"')
    ]
    if script.suffix == ".mjs":
        for result in results:
            result["client"] += " (npm)"
    if done.returncode and not any(result["error"] for result in results):
        about = {"client": script.name, "version": "", "api": "", "check": "first_chat"}
        results.append(about | {"error": done.stderr[-2000:]})
    return results


def table(results: Sequence[Result]) -> str:
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for result in results:
        row = rows.setdefault((result["client"], result["version"], result["api"]), {})
        row[result["check"]] = "fails" if result["error"] else "yes"
    lines = [
        f"| client | API | {' | '.join(COLUMNS.values())} |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for (client, version, api), row in rows.items():
        cells = [row.get(name, "") for name in COLUMNS]
        lines.append(f"| {client} {version} | {api} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    about.add_argument("names", nargs="*")
    about.add_argument("--base-url", help="of a server that runs")
    about.add_argument("--model", default="demo")
    options = about.parse_args()
    chosen = scripts(options.names)
    for command, suffix in (("uv", ".py"), ("npm", ".mjs")):
        if shutil.which(command) is None:
            print(f"{command} is not installed: with_*{suffix} are left out", file=sys.stderr)
            chosen = [path for path in chosen if path.suffix != suffix]
    WORK.mkdir(parents=True, exist_ok=True)
    if any(path.suffix == ".mjs" for path in chosen):
        install_npm()
    results: list[Result] = []
    with demo_server() if options.base_url is None else nullcontext(options.base_url) as base_url:
        for path in chosen:
            print(path.name, file=sys.stderr, flush=True)
            results += run_script(path, base_url, options.model)
    print(table(results))
    failed = [result for result in results if result["error"]]
    for result in failed:
        print(f"\n{result['client']} {result['api']} {result['check']}: {result['error']}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
