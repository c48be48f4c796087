"""Create what dead runs leave on a drive, and read the masters in page files."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from offload_trainer.offloading.pages.manifest import files_of, read_description, read_newest, refuse_outside
from offload_trainer.optim.kernel_api import zlib_sum
from offload_trainer.storage.owned_dirs import ScratchDirectory
from offload_trainer.storage.tensorfile import DTYPES

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


@contextmanager
def dying_after(removals: int) -> Iterator[None]:
    """Interrupt the context, as a kill would, when it removes a file after so many."""
    unlink, numbers = os.unlink, count()

    def dying(*args: Any, **words: Any) -> None:
        if next(numbers) == removals:
            raise KeyboardInterrupt
        unlink(*args, **words)

    with patch.object(os, "unlink", dying), pytest.raises(KeyboardInterrupt):
        yield


def stored_masters(directory: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the step of the page files in a run's private directory, and the masters that their record names."""
    manifest = read_description(directory)
    refuse_outside(directory, manifest)
    newest = read_newest(manifest)
    assert newest
    table, files, (copies, sums) = manifest.table, files_of(manifest), newest.pages
    field, found = table.format.fields["master"], dict[str, torch.Tensor]()
    pages, of_masters = [], memoryview(sums).cast("I")[:: len(table.format.fields)]
    for number, page in enumerate(table.pages):
        with open(files[page.home], "rb") as file:
            file.seek(table.offset(number, copy=copies[number]))
            data = torch.frombuffer(bytearray(file.read(field.padded(page))), dtype=torch.uint8)
        assert zlib_sum(data) == of_masters[number]
        pages.append(data.view(DTYPES[field.dtype]))
    for weight in manifest.weights:
        found[weight.name] = torch.full(weight.shape, math.nan).view(-1)
        for number, held, given in table.touched(weight.unit, weight.start, found[weight.name].numel()):
            found[weight.name][given] = pages[number][held]
    return newest.step, {weight.name: found[weight.name].view(weight.shape) for weight in manifest.weights}
