"""Baselines to compare with, in processes of their own."""

import json
import os
import subprocess
import sys
import tempfile

from ...host.torchrun import ROOT


class Peer:
    """A module of this package, run with a job, that does one step per input line and prints its seconds."""

    def __init__(self, module, job, threads):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads),
                       "GLOO_SOCKET_IFNAME": "lo"}
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen([sys.executable, "-m", f"xdit_backend.tools.bench.{module}", json.dumps(job)],
                                         env=environment,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True)

    def step(self, line="step"):
        """Seconds of one step. Raises RuntimeError with the process's last error if it has exited."""
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except OSError:
            pass
        answer = self._process.stdout.readline()
        if not answer:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(next((text for text in reversed(lines) if "Error" in text), "no output"))
        return float(answer)

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
