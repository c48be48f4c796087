"""Build DeepSpeed's CPU kernels once, ahead of the tests: cpu_adam and, with libaio's header, async_io.

Minutes on a fresh machine, a moment afterwards: torch keeps them in its extensions cache.
"""

import os
import sys
import time
from pathlib import Path

# The compiler and ninja of this environment, as when its `bin` is on the path.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))

from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

for builder in (CPUAdamBuilder(), AsyncIOBuilder()):
    start = time.perf_counter()
    builder.load(verbose=False)
    print(f"{builder.name}: ready after {time.perf_counter() - start:.0f} s", flush=True)
