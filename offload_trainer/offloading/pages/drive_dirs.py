"""Create the files of a run in its private directories on drives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from offload_trainer.offloading.pages.store import size_of_home
from offload_trainer.storage.transfer import CheckedTransfers, DriveFile, Transfers


class Drives:
    """A run's private directories on drives, the files in them, and the transfers to and from these files."""

    def __init__(self, directories: Sequence[Path], transfers: Transfers) -> None:
        self.directories, self.transfers = tuple(directories), transfers
        # Pages of optimizer state do not need checked transfers, because they have checksums in `PageChecksums`.
        self.unchecked = transfers.inner if isinstance(transfers, CheckedTransfers) else transfers
        self._files = ExitStack()

    def files(self, name: str, sizes: Sequence[int], homes: Sequence[int], *, shared: bool = True) -> list[DriveFile]:
        """Create one file `name` on each drive, large enough for the items that `homes` places there; return them.

        `sizes` are the items' bytes. `shared`: checked transfers verify what any rank writes there, so all ranks call
        this in the same order.
        """
        made = []
        for home, directory in enumerate(self.directories):
            made.append(DriveFile(directory / name, size_of_home(sizes, homes, home)))
            self._files.callback(made[-1].close)
            if shared and isinstance(self.transfers, CheckedTransfers):
                self.transfers.share(made[-1])
        return made

    def close(self) -> None:
        self.transfers.close()  # before the files, because transfers may still be in flight
        self._files.close()
