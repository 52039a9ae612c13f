"""Every method on two devices, as exact as one: devices and degrees of xDiT Parallel Config."""

LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "data2": ("cpu,cpu", {"data": 2}),
           "ulysses2": ("cpu,cpu", {"ulysses": 2}), "ring2": ("cpu,cpu", {"ring": 2}),
           "tensor2": ("cpu,cpu", {"tensor": 2}), "stages2": ("cpu,cpu", {"pipefusion": 2, "num_patches": 1}),
           "displaced2": ("cpu,cpu", {"displaced": 2, "displaced_mode": "full_sync"})}
