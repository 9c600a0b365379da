# /// script
# dependencies = ["litellm[proxy]", "openai"]
# ///
"""LiteLLM's proxy in front of the server, asked by OpenAI's package."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from checks import MODEL, V1


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_ready(process, port):
    for _ in range(240):
        assert process.poll() is None, "the proxy ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError("the proxy is not ready")


def main():
    port = free_port()
    provider = {"model": f"hosted_vllm/{MODEL}", "api_base": V1, "api_key": "none"}
    key = f"sk-{secrets.token_hex(32)}"  # it does not start without one
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": provider}],
        "general_settings": {"master_key": key},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        command = Path(sys.executable).parent / "litellm"
        process = subprocess.Popen(
            [command, "--config", path, "--host", "127.0.0.1", "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_ready(process, port)
            env = os.environ | {"V1": f"http://127.0.0.1:{port}/v1", "KEY": key}
            script = Path(__file__).with_name("litellm_proxy_checks.py")
            return subprocess.run([sys.executable, script], env=env, check=False).returncode
        finally:
            process.terminate()
            process.wait()


sys.exit(main())
