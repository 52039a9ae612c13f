"""Earlier values of a model's changed weights, cached for a run that alternates between versions, as LoRA hooks do at
every step."""

MAX_CACHED = 4                             # versions; a strength that changes at every step is never reused


class Versions:
    """Versions of the weights of one model, with numbers assigned by the host.

    Every cached version has values for the same weights: all that have changed since the first one was left; all other
    weights are as the model's now. The values stay on the device; nothing is copied.
    """

    def __init__(self):
        # version -> {id of a weight: (the weight, its values, their source in Residency's files)}
        self._cached = {}

    @property
    def num_bytes(self):
        """Bytes of values that are neither the model's current ones nor a region of a mapped file."""
        values = {values.data_ptr(): values for cached in self._cached.values() for weight, values,
                  host_copy in cached.values()
                  if values.data_ptr() != weight.data_ptr() and not _is(values, host_copy)}
        return sum(each.nbytes for each in values.values())

    def leave(self, version, begins, weights, files, spare_bytes):
        """Cache the values of these weights as those of a version, before they get others; called for all weights in
        which the next version differs.

        begins: whether it is the first such call of several. spare_bytes: memory available in addition to the cache. If
        they do not fit, or those of an earlier call did not, nothing is cached.
        """
        cached = self._cached.get(version)
        needed = sum(weight.nbytes for weight in weights if not _is(weight.data, files.get(id(weight)))
                     and id(weight) not in (cached or ()))
        if needed > spare_bytes or (cached is None and not begins):
            self.drop()
            return
        if cached is None:
            self._add(version, files)
        for weight in weights:
            for cached in self._cached.values():
                cached.setdefault(id(weight), (weight, weight.data, files.get(id(weight))))

    def go_back(self, version, left, files):
        """Set the weights to a cached version, and cache the version that is left. Returns whether the version was
        cached."""
        if version not in self._cached:
            return False
        self._cached[version] = cached = self._cached.pop(version)   # the last entry is the most recently used
        if left not in self._cached:
            self._add(left, files)
        for weight, values, host_copy in cached.values():
            weight.data = values
            files.pop(id(weight), None)
            if host_copy is not None:
                files[id(weight)] = host_copy
        return True

    def drop(self):
        """Empty the cache."""
        self._cached.clear()

    def _add(self, version, files):
        """Add the model's current values as a version."""
        known = next(iter(self._cached.values()), {})
        now = {key: (weight, weight.data, files.get(key)) for key, (weight, *_) in known.items()}
        while len(self._cached) >= MAX_CACHED:
            del self._cached[next(iter(self._cached))]
        self._cached[version] = now


def _is(values, host_copy):
    return host_copy is not None and values.data_ptr() == host_copy.data_ptr()
