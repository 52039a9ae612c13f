"""Finds a Chromium or Chrome for the browser tests. As a program it installs one where that is possible without asking:

    python -m tests.support.chromium
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)
# Headless comes from playwright. The rest: no sandbox as root, no GPU, and no traffic of the browser's own.
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]


def find_chromium():
    """Path of a browser, or None. XDIT_CHROMIUM names one by hand."""
    named = os.environ.get("XDIT_CHROMIUM")
    if named:
        return named
    found = [shutil.which(command) for command in COMMANDS]
    return next((path for path in [*found, *PLACES] if path and Path(path).is_file()), None)


def install_chromium():
    """Install Debian's chromium. Returns why that was not possible, or None."""
    if not sys.platform.startswith("linux") or shutil.which("apt-get") is None:
        return "there is no apt-get to install it with; install Chromium or Chrome yourself"
    if os.geteuid() != 0:
        return "installing it needs root: sudo apt-get install chromium"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update", "-qq"],
                    ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium", "fonts-dejavu-core"]):
        try:
            done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            return f"{' '.join(command)} was not done after 600 s"
        if done.returncode:
            return f"{' '.join(command)} failed: {(done.stdout.strip().splitlines() or ['no output'])[-1]}"
    return None


if __name__ == "__main__":
    if find_chromium() is None:
        print("Installing Chromium for the browser tests", flush=True)
        reason = install_chromium()
        if find_chromium() is None:
            print(f"No Chromium: the browser tests will be skipped ({reason}).", flush=True)
