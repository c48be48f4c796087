"""Read a consistent snapshot of the optimizer state page by page while training continues.

    reader   page 0, 1, 2, ... in order; pages on drives and on the device are prefetched
    update   waits before it overwrites a page that has not been read yet (`wait_for`)

Only the update changes pages. So the forward, the backward, and updates of pages that have been read continue. Pages
with two copies on their drive do not block the next update either, because it writes the other copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from offload_trainer.errors import TrainerError
from offload_trainer.offloading.pages.store import PageStore
from offload_trainer.plan.tiered.spec import SAVE_BUFFERS
from offload_trainer.storage.transfer import Future


class PageSnapshot:
    """The pages `numbers` of `store` in order, with their current contents."""

    def __init__(self, store: PageStore, numbers: Sequence[int]) -> None:
        self._store, self._numbers = store, numbers
        self._copies = {number: store.copies.valid(number) for number in numbers}
        self._read = 0  # pages before this number have been read and may change
        self._closed = False
        self._changed = threading.Condition()

    def wait_for(self, number: int) -> None:
        """Wait until page `number` may change."""
        if self._store.copies.free(number) != self._copies[number]:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._read > number)

    def pages(self) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Yield each page's number and fields, which are views that the next page reuses.

        Raises:
            TrainerError: the snapshot was closed.
        """
        pending = deque(number for number in self._numbers if self._store.in_memory(number) is None)
        free = self._store.buffers(SAVE_BUFFERS)
        arriving: deque[tuple[torch.Tensor, Future]] = deque()
        for number in self._numbers:
            while free and pending:
                following, buffer = pending.popleft(), free.pop()
                data = buffer[: self._store.bytes_of(following)]
                future = self._store.read(following, data, copy=self._copies[following])
                arriving.append((buffer, future))
            if self._closed:
                raise TrainerError("the state was let go of before it was written")
            inside = self._store.in_memory(number)
            if inside is not None:
                yield number, self._store.fields(number, inside)
                self._may_change(number)
            else:
                buffer, future = arriving.popleft()
                future.wait()
                fields = self._store.fields(number, buffer)
                self._may_change(number)  # the caller reads the copy in the buffer
                yield number, fields
                free.append(buffer)

    def _may_change(self, number: int) -> None:
        with self._changed:
            self._read = number + 1
            self._changed.notify_all()

    def close(self) -> None:
        """Release the snapshot, so that no update waits for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
