"""Lifecycle of a client's worker group: started when it is first needed, and again after it died."""

import threading
from contextlib import suppress

from ..protocol import messages
from ..protocol.errors import WorkerDiedError
from .launcher import WorkerGroup


class Workers:
    """The worker group of these devices. machines, supervisor: see WorkerGroup; on_phase and check as well, for all
    requests."""

    def __init__(self, devices, machines=None, supervisor=None, on_phase=lambda phase: None, check=lambda: None):
        self.devices, self._machines, self._supervisor = tuple(devices), machines, supervisor
        self.on_phase, self.check = on_phase, check
        self.speeds: tuple[float, ...] = ()                    # see divide_by
        self.current = None                                    # the last started group, unless it was closed
        self._is_starting, self._starting = False, threading.RLock()           # by one thread at a time
        self._num_fallbacks = 0                                # transports that are known to fail

    @property
    def group(self):
        """The running worker group."""
        with self._starting:
            if not self.running:
                self.close()
                self._is_starting = True
                try:
                    self.current = WorkerGroup(self.devices, self.on_phase, self.check, self._num_fallbacks,
                                               self._machines, self._supervisor)
                    self._num_fallbacks = self.current.num_fallbacks
                finally:
                    self._is_starting = False
            return self.current

    @property
    def running(self):
        return self.current is not None and self.current.alive

    @property
    def holding(self):
        """The running group, with the models just loaded. Raises WorkerDiedError instead of starting an empty one."""
        if not self.running:
            raise WorkerDiedError("Queue the prompt again to start a new worker group: the workers have ended.")
        return self.current

    @property
    def state(self):
        """"starting", "working", "idle", "ended" (a worker died) or "stopped" (never started, or closed)."""
        group = self.current
        if self._is_starting or group is None:
            return "starting" if self._is_starting else "stopped"
        if not group.alive:
            return "ended"
        group.receive_pending()
        return "working" if group.is_working else "idle"

    @property
    def idle_s(self):
        """Seconds since the running workers last had work; 0 while they are working or if none run."""
        group = self.current
        if not self.running or group is None:
            return 0.0
        group.receive_pending()
        return group.idle_s

    def divide_by(self, speeds):
        """Divide further work by these relative speeds of the devices, see mesh.with_speeds; (): equally.

        All calls of a run must use the same speeds.
        """
        self.speeds = tuple(speeds)

    def request(self, make_command, segments=(), group=None):
        """Send a command with WorkerGroup.request; returns {rank: Done}.

        group: None: the running group, which is started if necessary.
        """
        return (group or self.group).request(make_command, self.on_phase, self.check, segments)

    def post_drop(self, name):
        """Unload a model or VAE on running workers without waiting. Thread-safe."""
        # the next request gets the error, or starts new workers
        with suppress(WorkerDiedError):
            if self.running:
                self.current.post(lambda request: messages.DropModel(request, name), answering=())

    def close(self):
        """End the worker group."""
        if self.current is not None:
            self.current.close()
        self.current = None


class Loaded:
    """The models that the running group has loaded, by name; empty after the group has ended."""

    def __init__(self, workers):
        self._workers, self._group, self._by_name = workers, None, {}

    @property
    def by_name(self):
        """Mutable {name: spec or ModelMemory}."""
        if self._group is not self._workers.current:
            self._group, self._by_name = self._workers.current, {}
        return self._by_name

    @property
    def names(self):
        return sorted(self.by_name) if self._workers.running else []

    def __contains__(self, name):
        return self._workers.running and name in self.by_name

    def load(self, module, spec_of, message):
        """Load a module, which has a name and weights(), on every worker unless it is loaded.

        spec_of(segments): its spec. message(request, spec): the command.
        """
        if module.name in self:
            return
        group = self._workers.group
        segments = group.segments.share_all(module.weights())
        self.by_name[module.name] = spec = spec_of(segments)
        try:
            self._workers.request(lambda request: message(request, spec), segments.values(), group)
        except BaseException:                                  # some ranks may have loaded it
            self.forget(module.name)
            raise

    def drop(self, name):
        """Unload it on every worker."""
        if name in self:
            self.by_name.pop(name, None)
            self._workers.request(lambda request: messages.DropModel(request, name))

    def forget(self, name):
        """Unload it without waiting. Thread-safe."""
        if name in self:
            self.by_name.pop(name, None)
            self._workers.post_drop(name)
