"""Print one JSON line: the update kernels of this machine's CPU and GPU, and whether their bits agree."""

from __future__ import annotations

import json
import time

import torch

from offload_trainer.optim.cuda_adam import choose_cuda_kernel
from offload_trainer.optim.kernels import choose_kernel


def main() -> None:
    start = time.perf_counter()
    kernel, on_cpu = choose_kernel("auto")
    taken = {"CPU seconds": time.perf_counter() - start}
    found = {"CPU": on_cpu, "same": None, "GPU": "no GPU here"}
    if torch.cuda.is_available():
        start = time.perf_counter()
        chosen, found["GPU"] = choose_cuda_kernel(torch.device("cuda"), kernel)
        taken["GPU seconds"] = time.perf_counter() - start
        found["same"] = chosen is not None
    print(json.dumps(found | taken))


if __name__ == "__main__":
    main()
