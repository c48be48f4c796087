"""A run's private directories on drives, as homes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from offload_trainer.offloading.pages.store import size_of_home
from offload_trainer.storage.transfer import CheckedTransfers, DriveFile, Transfers


class Drives:
    """Private directories on drives, and what moves bytes to and from the files in them."""

    def __init__(self, directories: Sequence[Path], transfers: Transfers) -> None:
        self.directories, self.transfers = tuple(directories), transfers
        # Pages of state have sums of their own.
        self.unchecked = transfers.inner if isinstance(transfers, CheckedTransfers) else transfers
        self._files = ExitStack()

    def files(self, name: str, sizes: Sequence[int], homes: Sequence[int], *, shared: bool = True) -> list[DriveFile]:
        """Return a file on each drive for those of several things, of `sizes` bytes, that have their home there.

        `shared`: whether `transfers` compare what all ranks write there; they then call alike.
        """
        made = []
        for home, directory in enumerate(self.directories):
            made.append(DriveFile(directory / name, size_of_home(sizes, homes, home)))
            self._files.callback(made[-1].close)
            if shared and isinstance(self.transfers, CheckedTransfers):
                self.transfers.share(made[-1])
        return made

    def close(self) -> None:
        self.transfers.close()  # it may still move bytes in the files
        self._files.close()
