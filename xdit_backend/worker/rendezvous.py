"""Rendezvous handler of torchrun for a group whose ranks are known before it starts: no peer, port or pickled state.

torchrun's own dynamic backends keep a pickled state in a store that other processes can write to, and unpickle it every
few seconds. This handler is registered through torch's extension point instead. Its store lives inside torchrun's
process; workers use the group's store (host_store.py).
"""

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "xdit"


def register():
    """Register `--rdzv-backend=xdit` with torchrun in this process."""
    rendezvous_handler_registry.register(BACKEND, OneAgentRendezvous)


class OneAgentRendezvous(RendezvousHandler):
    """The rendezvous of one torchrun with itself."""

    def __init__(self, parameters):
        self._run_id = parameters.run_id

    def get_backend(self):
        return BACKEND

    def get_run_id(self):
        return self._run_id

    def next_rendezvous(self):
        return RendezvousInfo(dist.HashStore(), rank=0, world_size=1,
                              bootstrap_store_info=RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def num_nodes_waiting(self):
        return 0

    def shutdown(self):
        return True
