"""A bounded file of records about runs, in ComfyUI's user folder."""

import logging
from pathlib import Path

import pydantic

from .machine_profiles import write_json

MAX_RUNS = 256                             # the oldest are dropped
MAX_BYTES = 2 ** 20

log = logging.getLogger(__name__)


class RunStore:
    """Records with a `key`, read at the first use; the last stored one last.

    folder(): the folder of the file. file_type: pydantic dataclass of a version and at most MAX_RUNS `runs`. what: the
    records, for the log.
    """

    def __init__(self, folder, file, file_type, what):
        self._folder, self._file, self._adapter = folder, file, pydantic.TypeAdapter(file_type)
        self._file_type, self._what, self._records = file_type, what, None

    def _known(self):
        """{key: record}"""
        if self._records is None:
            self._records = {record.key: record for record in self._read()}
        return self._records

    def _store(self, record):
        """Store a record in place of an earlier one with its key."""
        known = self._known()
        known.pop(record.key, None)
        known[record.key] = record
        for key in list(known)[:max(0, len(known) - MAX_RUNS)]:
            del known[key]
        write_json(self._path, self._adapter.dump_python(self._file_type(1, tuple(known.values())), mode="json"))

    @property
    def _path(self):
        return Path(self._folder()) / self._file

    def _read(self):
        try:
            with open(self._path, "rb") as file:
                raw = file.read(MAX_BYTES + 1)
            if len(raw) > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            return self._adapter.validate_json(raw).runs
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:                 # ValidationError is a ValueError
            log.warning("the stored %s are ignored: %s: %s", self._what, self._path, str(error).splitlines()[0])
            return ()
