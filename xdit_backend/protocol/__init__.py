"""Protocol between host and workers: messages, shared memory segments, channels and errors."""
