"""The worker group that a client asks: started when it is first needed, and again after it died.
Used by client.py and its parts."""

import threading
from contextlib import suppress

from ..protocol import messages
from ..protocol.errors import WorkerDiedError
from .launcher import WorkerGroup


class Workers:
    """The group of these devices. machines, forkserver: WorkerGroup's.

    on_phase(Phase) and check() are WorkerGroup's too, of all that the workers are asked.
    """

    def __init__(self, devices, machines=None, supervisor=None, on_phase=lambda phase: None, check=lambda: None):
        self.devices, self._machines, self._supervisor = tuple(devices), machines, supervisor
        self.on_phase, self.check = on_phase, check
        self.speeds: tuple[float, ...] = ()                    # see divide_by
        self.current = None                                    # the last group that was started, and not closed since
        self._is_starting, self._starting = False, threading.RLock()           # by one thread at a time
        self._num_fallbacks = 0                                # ways to join these workers that did not work before

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
        """The group that holds what was just loaded. Where it has ended, none is started, which would hold nothing."""
        if not self.running:
            raise WorkerDiedError("The workers have ended. Queue the prompt again to start a new group.")
        return self.current

    @property
    def state(self):
        """"starting", "working", "idle", "ended" (by itself:
        a worker died), or "stopped" (none was started, or it was closed)."""
        group = self.current
        if self._is_starting or group is None:
            return "starting" if self._is_starting else "stopped"
        if not group.alive:
            return "ended"
        group.receive_pending()
        return "working" if group.is_working else "idle"

    @property
    def idle_s(self):
        """Seconds since the running workers had anything to do; 0 where they have, or where none run."""
        group = self.current
        if not self.running or group is None:
            return 0.0
        group.receive_pending()
        return group.idle_s

    def divide_by(self, speeds):
        """From now on, divide work by these speeds of the devices, relative, see mesh.with_speeds; (): all alike.
        All calls of a run need the same."""
        self.speeds = tuple(speeds)

    def request(self, make_command, segments=(), group=None):
        """{rank: Done} of a command, see WorkerGroup.request.
        group: None: the running one, which is started where there is none."""
        return (group or self.group).request(make_command, self.on_phase, self.check, segments)

    def post_drop(self, name):
        """Have the workers drop a model or VAE, where they run; waits for nothing. From any thread."""
        # whoever needs the workers next gets the error, or starts new ones
        with suppress(WorkerDiedError):
            if self.running:
                self.current.post(lambda request: messages.DropModel(request, name), answering=())

    def close(self):
        """End the worker group."""
        if self.current is not None:
            self.current.close()
        self.current = None


class Loaded:
    """What the running group holds, by name. Of a group that has ended nothing is."""

    def __init__(self, workers):
        self._workers, self._of, self._held = workers, None, {}

    @property
    def by_name(self):
        """{name: what is known of it}, to be changed."""
        if self._of is not self._workers.current:
            self._of, self._held = self._workers.current, {}
        return self._held

    @property
    def names(self):
        return sorted(self.by_name) if self._workers.running else []

    def __contains__(self, name):
        return self._workers.running and name in self.by_name

    def load(self, held, spec_of, message):
        """Make sure that every worker holds this, which has a name and gives its weights(). spec_of(segments): its
        spec; message(request, spec)."""
        if held.name in self:
            return
        group = self._workers.group
        segments = group.segments.share_all(held.weights())
        self.by_name[held.name] = spec = spec_of(segments)
        try:
            self._workers.request(lambda request: message(request, spec), segments.values(), group)
        except BaseException:                                  # some ranks may hold it
            self.forget(held.name)
            raise

    def drop(self, name):
        """Give its memory back on every worker."""
        if name in self:
            self.by_name.pop(name, None)
            self._workers.request(lambda request: messages.DropModel(request, name))

    def forget(self, name):
        """As drop, but waits for nothing. From any thread."""
        if name in self:
            self.by_name.pop(name, None)
            self._workers.post_drop(name)
