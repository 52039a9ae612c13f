"""Faults in the product's exchanges that the simulation has to find, each put into one rank's process."""

import torch
import torch.distributed as dist

from xdit_backend.distributed import collectives
from xdit_backend.distributed.collectives import Traffic, all_reduce, start_all_reduce
from xdit_backend.parallel import sequence_parallel

RingExchange = collectives.RingExchange


def swap(rank):
    """Two collectives of unequal sizes come in another order on rank 1."""
    gather_heads = sequence_parallel.gather_heads

    def swapped(out, scattered, mesh, traffic):
        for size in (3, 5) if rank != 1 else (5, 3):
            all_reduce([torch.ones(size)], mesh.ulysses_group, Traffic())
        return gather_heads(out, scattered, mesh, traffic)
    sequence_parallel.gather_heads = swapped


def skip(rank):
    """Rank 1 leaves one collective out."""
    all_to_all, counted = sequence_parallel.all_to_all, []

    def skipping(pieces, shapes, *others):
        counted.append(shapes)
        if rank == 1 and len(counted) == 3:
            return [pieces[0].new_zeros(shape) for shape in shapes]
        return all_to_all(pieces, shapes, *others)
    sequence_parallel.all_to_all = skipping


def cross(rank):
    """Collectives of two communicators come in another order on half of the ranks of either."""
    gather_heads = sequence_parallel.gather_heads

    def crossed(out, scattered, mesh, traffic):
        groups = [mesh.ulysses_group, mesh.ring_group]
        for group in groups:                                   # which connects them
            all_reduce([torch.ones(3)], group, Traffic())
        waits = [start_all_reduce([torch.ones(3)], group, Traffic())
                 for group in (groups if rank in (0, 3) else groups[::-1])]
        for wait in waits:
            wait()
        return gather_heads(out, scattered, mesh, traffic)
    sequence_parallel.gather_heads = crossed


def both_send(rank):
    """Both neighbours of a ring begin with their sends."""
    def begin(self, tensor, receive_shape, group, traffic):
        other, = set(dist.get_process_group_ranks(group)) - {rank}
        self._device, self._sent, self._traffic = tensor.device, tensor.contiguous(), traffic
        self._received = tensor.new_empty(receive_shape)
        self._work = [dist.isend(self._sent, other, group=group), dist.irecv(self._received, other, group=group)]
    RingExchange.__init__ = begin


def early(rank):
    """A ring's keys are read before they are waited for."""
    RingExchange.wait = lambda self: self._received.clone()


def overwrite(rank):
    """A ring's keys are changed while they are sent."""
    wait = RingExchange.wait

    def overwriting(self):
        self._sent.mul_(2)
        return wait(self)
    RingExchange.wait = overwriting


MUTANTS = {each.__name__: each for each in (swap, skip, cross, both_send, early, overwrite)}
