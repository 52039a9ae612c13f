"""The accelerator of this machine: torch's device type of its GPUs, and torch's module for this type.

torch's type of NVIDIA and AMD GPUs (ROCm) is "cuda", that of Intel GPUs is "xpu". Other packages ask this module
instead of naming a type, except attention backends and tools for particular GPUs. torch is imported when it is needed.
"""

TYPES = "cuda", "xpu"
# types of torch without what workers need: streams, and a process group that sends their tensors or copies of them
REJECTED = frozenset({"cpu", "mps"})


def device_type():
    """torch's device type of GPUs on this machine; the first of TYPES if this PyTorch supports no GPU."""
    import torch
    accelerator = getattr(torch, "accelerator", None)
    current = accelerator and accelerator.current_accelerator()
    return TYPES[0] if current is None or current.type in REJECTED else current.type


def known_types():
    """Device types in names of devices, of this machine and of others."""
    return tuple(dict.fromkeys((*TYPES, device_type())))


def module(device=None):
    """torch's module for a device, a device type, or None, this machine's type: torch.cuda, torch.xpu."""
    import torch
    return torch.get_device_module(device_type() if device is None else device)


def is_gpu(device):
    """Whether a torch.device is a GPU: neither the host nor "meta"."""
    return device.type not in ("cpu", "meta")


def num_devices():
    """Number of GPUs that torch finds."""
    own = module()
    return own.device_count() if own.is_available() else 0


def name_of(index):
    """Name of a GPU of this machine, such as "cuda:0"."""
    return f"{device_type()}:{index}"


def is_built_in():
    """Whether this PyTorch is built for GPUs."""
    import torch
    return device_type() != TYPES[0] or (torch.version.cuda or torch.version.hip) is not None


def has_nccl():
    """Whether torch has NCCL, or ROCm's RCCL, for GPUs of this machine's type."""
    import torch.distributed as dist
    return dist.is_nccl_available() and device_type() in dist.Backend.backend_capability["nccl"]


def is_tried():
    """Whether the pack has run on GPUs of this type and vendor: NVIDIA's."""
    import torch
    return device_type() == TYPES[0] and torch.version.hip is None


def has_cuda_operators(device):
    """Whether torch's operators for CUDA and ROCm apply to tensors of this device."""
    return device.type == TYPES[0]


def capability(device):
    """Compute capability (major, minor) of an NVIDIA or AMD GPU; None for others. Creates no context."""
    properties = module(device).get_device_properties(device)
    return (properties.major, properties.minor) if hasattr(properties, "major") else None


def num_processors(device):
    """Number of multiprocessors or compute units of a GPU."""
    properties = module(device).get_device_properties(device)
    return getattr(properties, "multi_processor_count", None) or getattr(properties, "max_compute_units", 0)


def can_access_peer(device, other):
    """Whether a GPU can copy from another directly; False if torch cannot tell."""
    can_access = getattr(module(device), "can_device_access_peer", None)
    return can_access is not None and can_access(device, other)


def driver_version():
    """CUDA's version of the driver; 0 for other types."""
    import torch
    return torch._C._cuda_getDriverVersion() if hasattr(torch._C, "_cuda_getDriverVersion") else 0


def sleeping_event(device):
    """Event whose synchronize() blocks without polling, if the device's module has such events."""
    own = module(device)
    return own.Event(blocking=True) if hasattr(own, "cudart") else own.Event()


def description():
    """PyTorch's build for GPUs, with the versions of its libraries."""
    import torch
    import torch.distributed as dist
    if device_type() != TYPES[0]:
        return f"PyTorch's device type {device_type()}"
    versions = [f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}",
                f"cuDNN {torch.backends.cudnn.version()}",
                f"NCCL {'.'.join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else 'missing'}"]
    return ", ".join(versions)
