"""Build DeepSpeed's CPU kernels once, ahead of the tests: cpu_adam and, with libaio's header, async_io.

Minutes on a fresh machine, a moment afterwards: torch keeps them in its extensions cache.
"""

import os
import time

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))

from offload_trainer.engine.op_builder import load_kernels
from offload_trainer.plan.zero import Placement

for what, placement in (("cpu_adam", Placement("cpu", "cpu")), ("async_io", Placement("nvme", "gpu"))):
    start = time.perf_counter()
    load_kernels(placement)
    print(f"{what}: ready after {time.perf_counter() - start:.0f} s", flush=True)
