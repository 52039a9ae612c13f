"""What the host and the workers say to each other: messages, segments of shared memory, channels, errors."""
