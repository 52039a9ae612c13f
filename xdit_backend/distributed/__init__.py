"""Communication between ranks: the device mesh, process groups, collectives, ring hops, fp8 communication, token
shards, and spatial operators on rows."""
