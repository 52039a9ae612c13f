"""Found by Python in processes on whose PYTHONPATH this folder is: workers join the simulation of NCCL when they join
their group, where XDIT_STRICT_NCCL names the referee."""

import importlib.machinery
import importlib.util
import os
import sys

SERVE = "xdit_backend.worker.command_loop"        # which workers import


class Loader(importlib.machinery.SourceFileLoader):
    """Runs the module, and then has torch's init_process_group install the simulation."""

    def exec_module(self, module):
        super().exec_module(module)
        import torch.distributed as dist
        join = dist.init_process_group

        def join_strictly(*arguments, **options):
            join(*arguments, **options)
            if "XDIT_STRICT_NCCL" in os.environ and dist.get_world_size() > 1:
                from tests.support.strict_nccl.client import StrictRank
                StrictRank(*os.environ["XDIT_STRICT_NCCL"].rsplit(":", 1)).install()
        dist.init_process_group = join_strictly


class Finder:
    """Finds that module once, for the Loader."""

    def find_spec(self, name, path=None, target=None):
        if name != SERVE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader = Loader(spec.name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
