"""Runs a real ComfyUI with this pack, in a base folder of its own. Used by the demo and by the browser tests."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACK = "xdit-comfyui"  # the folder's name in custom_nodes, by which ComfyUI lists the templates
PACK_FILES = ("__init__.py", "pyproject.toml", "nodes", "xdit_backend", "workflows", "web", "locales")


def run_async(coroutine):
    """Run a coroutine to its end in a thread of its own: the browser tests keep a loop in this one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


class HostError(Exception):
    """ComfyUI did not start, ended, refused a workflow, or reported an error. The message has its words."""


def comfyui_folder():
    """The ComfyUI to test with: XDIT_COMFYUI, else the one that start.py fetched. None if there is none."""
    folder = Path(os.environ.get("XDIT_COMFYUI") or ROOT / ".host" / "ComfyUI").absolute()
    return folder if (folder / "main.py").is_file() else None


def make_base(base, extra_packs=()):
    """Lay out ComfyUI's base folder: a copy of this pack, and of the extra ones, in custom_nodes."""
    custom_nodes = Path(base) / "custom_nodes"
    shutil.rmtree(custom_nodes, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    (custom_nodes / PACK).mkdir(parents=True)
    for source in (ROOT / name for name in PACK_FILES):
        if source.is_dir():
            shutil.copytree(source, custom_nodes / PACK / source.name, ignore=ignore)
        else:
            shutil.copy2(source, custom_nodes / PACK / source.name)
    for source in map(Path, extra_packs):
        shutil.copytree(source, custom_nodes / source.name, ignore=ignore)
    settings = Path(base) / "user" / "default" / "comfy.settings.json"
    if not settings.exists():  # else the first page that opens covers the graph with the template browser
        settings.parent.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps({"Comfy.TutorialCompleted": True}))


class Host(contextlib.AbstractContextManager):
    """A running ComfyUI; leaving the `with` block ends it.

    comfyui: folder of main.py. base: as made by make_base. cpu: ComfyUI itself uses no GPU. port: 0 takes a free one.
    environment: variables to set. Started with the Python that runs this, which needs ComfyUI's requirements.
    """

    def __init__(self, comfyui, base, cpu=True, port=0, environment=None):
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(base) / "comfyui.log"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        command = [
            # its log, a file here, has names of folders in any language
            sys.executable, "-X", "utf8", str(Path(comfyui) / "main.py"),
            "--listen", "127.0.0.1", "--port", str(self.port),
            "--base-directory", str(base), "--database-url", "sqlite:///:memory:", "--disable-auto-launch",
            *(["--cpu"] if cpu else []),
        ]
        with open(self.log, "wb") as log:
            with _interrupts_heeded():
                self.process = subprocess.Popen(command, cwd=base, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                env=os.environ | (environment or {}))
        try:
            self._wait_until_it_answers(timeout_s=900)
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exception):
        self.stop()

    def stop(self):
        """End ComfyUI, as Ctrl-C would; by force if that takes more than 15 s. Returns its exit code."""
        if self.process.poll() is None:
            if os.name == "nt":
                self.process.terminate()
            else:
                self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(15)

    def get(self, path):
        """GET a path of ComfyUI's API. Returns the body's JSON, or its bytes when it is something else."""
        return self._request(path)

    def run(self, workflow, timeout_s=600):
        """Run a workflow in API format. Returns (outputs by node id, seconds from its start to its end)."""
        prompt_id = self._request("/prompt", {"prompt": workflow})["prompt_id"]
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            entry = self._request(f"/history/{prompt_id}").get(prompt_id)
            if entry is None:
                time.sleep(0.1)
                continue
            messages = dict(entry["status"]["messages"])
            if entry["status"]["status_str"] != "success":
                raise HostError(self._describe(messages.get("execution_error", messages)))
            elapsed_ms = messages["execution_success"]["timestamp"] - messages["execution_start"]["timestamp"]
            return entry["outputs"], elapsed_ms / 1000
        raise HostError(f"The workflow was not done after {timeout_s} s.\n{self.log_tail()}")

    def log_tail(self, num_lines=25):
        """ComfyUI's last lines of output, for a message."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(encoding="utf-8", errors="replace"))
        lines = [line for line in text.splitlines() if line.strip()][-num_lines:]
        return "\n".join([f"ComfyUI's last lines of output ({self.log}):", *(f"    {line[:300]}" for line in lines)])

    def _wait_until_it_answers(self, timeout_s):
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with contextlib.suppress(ConnectionError, urllib.error.URLError):
                self._opener.open(f"{self.url}/system_stats", timeout=10).close()
                return
            self._check_alive()
            time.sleep(0.2)
        raise HostError(f"ComfyUI did not answer within {timeout_s} s.\n{self.log_tail()}")

    def _request(self, path, body=None):
        request = urllib.request.Request(self.url + path, headers={"Content-Type": "application/json"},
                                         data=None if body is None else json.dumps(body).encode())
        try:
            with self._opener.open(request, timeout=300) as answer:
                content = answer.read()
                return json.loads(content) if "json" in answer.headers.get("Content-Type", "") else content
        except urllib.error.HTTPError as error:
            raise HostError(self._describe(_json_or_text(error.read()))) from None
        except OSError as error:  # URLError and the timeouts are OSErrors too
            self._check_alive(wait_s=2)
            raise HostError(f"ComfyUI did not answer {path}: {error}\n{self.log_tail()}") from None

    def _check_alive(self, wait_s=0):
        with contextlib.suppress(subprocess.TimeoutExpired):
            exit_code = self.process.wait(wait_s)
            raise HostError(f"ComfyUI ended with exit code {exit_code}.\n{self.log_tail()}")

    def _describe(self, error):
        """ComfyUI's reports of a failed run or a refused workflow, as text."""
        if not isinstance(error, dict):
            return f"ComfyUI answered: {error}"
        if "exception_message" in error:
            message = "\n".join(f"    {line[:300]}" for line in error["exception_message"].strip().splitlines()[:15])
            return (f"{error['node_type']} (node {error['node_id']}) failed with "
                    f"{error['exception_type']}:\n{message}\n{self.log_tail()}")
        lines = []
        for node_id, report in (error.get("node_errors") or {}).items():
            lines += [f"    {report['class_type']} (node {node_id}): {one['message']}: {one['details']}"
                      for one in report["errors"]]
        if not lines:
            lines = [f"    {json.dumps(error)}"]
        return "\n".join(["ComfyUI refused the workflow:", *lines])


@contextlib.contextmanager
def _interrupts_heeded():
    """What starts in here heeds Ctrl-C, as Host.stop needs: a shell has its background jobs ignore it, and what they
    start too."""
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _json_or_text(content):
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")[:500]
