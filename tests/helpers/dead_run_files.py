"""Create what dead runs leave on a drive."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from offload_trainer.offloading.pages.manifest import files_of, read_description, read_newest
from offload_trainer.offloading.pages.store import PageTable
from offload_trainer.optim.kernel_api import zlib_sum
from offload_trainer.storage.owned_dirs import ScratchDirectory

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
NOBODY = 65534
WHAT = "page files of"


def died(place: ScratchDirectory) -> Path:
    """Turn a scratch directory into one whose process was killed; return its path."""
    (place.path / "state").write_text("page files")
    place.leave()
    return place.path


def dead_lease(root: Path) -> Path:
    return died(ScratchDirectory(root / "run-0000dead", what=WHAT))


def stored_masters(lease: Path) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Return step and masters of page files, which have the record's checksums, or None before the first update."""
    manifest, found = read_description(lease), dict[str, torch.Tensor]()
    if (newest := read_newest(manifest)) is None:
        return None
    table, (copies, written) = PageTable(manifest.pages, manifest.format), newest.pages
    sums = memoryview(written).cast("I")[:: len(table.format.fields)]  # checksums of masters, the first field
    files = [torch.from_numpy(np.fromfile(file, np.uint8)) for file in files_of(manifest)]
    for weight in manifest.weights:
        found[weight.name] = values = torch.empty(weight.shape)
        for number, held, given in table.touched(weight.unit, weight.start, values.numel()):
            page = files[table.homes[number]][table.offset(number, copy=copies[number]) :][: table.sizes[number]]
            assert zlib_sum(page[: table.format.fields["master"].padded(table.pages[number])]) == sums[number]
            values.view(-1)[given] = table.fields(number, page)["master"][held].float()
    return newest.step, found
