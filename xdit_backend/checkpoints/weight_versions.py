"""Values that a model's weights had before they were changed, kept for a run that goes back and forth between some of
them (LoRA hooks do so in every step). Used by worker/models.py.
"""

MAX_KEPT = 4                               # versions; a strength that changes with every step is never gone back to


class Versions:
    """Versions of the weights of one model, by numbers that the host gives.

    Every kept version has values for the same weights: all that have changed since the first one was left, so that
    beside them a version is as the model is now. The values stay where they are, on the device; nothing is copied.
    """

    def __init__(self):
        # version -> {id of a weight: (the weight, its values, their home: Residency's files)}
        self._kept = {}

    @property
    def num_bytes(self):
        """Bytes of values that are neither the model's now nor a map of the file."""
        values = {values.data_ptr(): values for kept in self._kept.values() for weight, values,
                  host_copy in kept.values()
                  if values.data_ptr() != weight.data_ptr() and not _is(values, host_copy)}
        return sum(each.nbytes for each in values.values())

    def leave(self, version, begins, weights, files, spare_bytes):
        """Keep these weights' values as those of a version, before they get others; called for all that it differs in
        from the next.

        begins: is it the first such call of several? spare_bytes: what may be kept beside what is. Where they have no
        room, or a call before had none, nothing is kept at all.
        """
        kept = self._kept.get(version)
        needed = sum(weight.nbytes for weight in weights if not _is(weight.data, files.get(id(weight)))
                     and id(weight) not in (kept or ()))
        if needed > spare_bytes or (kept is None and not begins):
            self.drop()
            return
        if kept is None:
            self._add(version, files)
        for weight in weights:
            for kept in self._kept.values():
                kept.setdefault(id(weight), (weight, weight.data, files.get(id(weight))))

    def go_back(self, version, left, files):
        """Give the weights the values of a kept version, and keep those of the one that is left.
        Returns whether it was kept."""
        if version not in self._kept:
            return False
        self._kept[version] = kept = self._kept.pop(version)   # the last one is the last one used
        if left not in self._kept:
            self._add(left, files)
        for weight, values, host_copy in kept.values():
            weight.data = values
            files.pop(id(weight), None)
            if host_copy is not None:
                files[id(weight)] = host_copy
        return True

    def drop(self):
        """Keep none any more."""
        self._kept.clear()

    def _add(self, version, files):
        """The model as it is now, as a version."""
        known = next(iter(self._kept.values()), {})
        now = {key: (weight, weight.data, files.get(key)) for key, (weight, *_) in known.items()}
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[version] = now


def _is(values, host_copy):
    return host_copy is not None and values.data_ptr() == host_copy.data_ptr()
