"""A rank as in `forked_ranks.py` that also counts the bytes it exchanges with other ranks.

    python rank_counting_bytes.py RANK COUNT FOLDER NODES

The rank writes FOLDER/counts-RANK.json, with the counts of each case in a list.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import forked_ranks
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload_trainer import ranks
from offload_trainer.engine import tiered
from offload_trainer.offloading.ranks.collective_fetch import Copy, PendingGather
from offload_trainer.offloading.ranks.node_comm import Exchange, FetchMatching, Node
from offload_trainer.offloading.ranks.sharded_gradients import ShardedGradients

counts: Counter[str] = Counter()


class Adding(TorchDispatchMode):
    """Count the operands of torch's operations: `added` bytes of gradients, `sums` bytes read and written for them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("add_", "copy_"):
            counts["added"] += args[1].nbytes
            counts["sums"] += args[0].nbytes * (2 if name == "add_" else 1)
        return func(*args, **(kwargs or {}))


def count() -> None:
    """Install the counters."""
    lay_out, all_reduce, send = ShardedGradients._lay_out, ShardedGradients._add_up, ShardedGradients._sent_and_received
    barrier, send_recv, across, exchange = Node.barrier, Node.send_recv, Node.broadcast_across, Node.exchange
    fill, all_gather_parts, rounds, all_to_all = (
        PendingGather.fill,
        ranks.all_gather_parts,
        Node.fetch_matching,
        tiered.all_to_all,
    )
    # not empty while an exchange is created for matching rounds, which do not count as gathers
    of_rounds: list[bool] = []
    summing, all_reduce_numbers = threading.local(), ranks.all_reduce  # it gathers numbers, which are no weights
    sending: list[bool] = []  # not empty while the exchanged bytes are gradients rather than parts of norms

    def laying_out(self: Any, name: str, flat: torch.Tensor) -> None:
        counts["laid_out"] += flat.nbytes
        lay_out(self, name, flat)

    def adding(self: Any, *args: Any, **words: Any) -> None:
        with Adding():
            all_reduce(self, *args, **words)

    def meeting(self: Node) -> None:
        counts["barriers"] += 1
        barrier(self)

    def exchanging(self: Node) -> Exchange:
        told = exchange(self)
        if of_rounds:
            return told

        def telling(number: int) -> list[int]:
            counts["gathers"] += 1
            return told(number)

        return telling

    def making_rounds(self: Node) -> FetchMatching:
        of_rounds.append(True)
        try:
            return rounds(self)
        finally:
            of_rounds.clear()

    def sent_and_received(self: Any, *args: Any) -> Any:
        sending.append(True)
        try:
            return send(self, *args)
        finally:
            sending.clear()

    def trading(self: Node, out: Any, into: Any) -> Any:
        if sending:
            counts["gradients_out"] += sum(values.nbytes for _, values in out)
            counts["gradients_in"] += sum(values.nbytes for _, values in into)
        return send_recv(self, out, into)

    def crossing(self: Node, values: torch.Tensor, *, source: int, **words: Any) -> None:
        if source == self.rank:
            counts["weights_out"] += values.nbytes * (len(self.nodes) - 1)
        else:
            counts["weights_in"] += values.nbytes
        across(self, values, source=source, **words)

    def filling(self: PendingGather, into: torch.Tensor, copy: Copy) -> None:
        def copying(values: torch.Tensor, target: torch.Tensor) -> None:
            counts["from_ram"] += values.nbytes
            copy(values, target)

        fill(self, into, copying)

    def make_all_gather(values: torch.Tensor, number: int, *, group: Any) -> None:
        each = len(group.members)
        if not getattr(summing, "on", False):
            counts["from_others"] += values.nbytes // each * (each - 1)
        all_gather_parts(values, number, group=group)

    def sum_up(values: torch.Tensor, *, group: Any) -> None:
        summing.on = True
        try:
            all_reduce_numbers(values, group=group)
        finally:
            summing.on = False

    def to_all(parts: torch.Tensor, *, group: Any) -> torch.Tensor:
        counts["pieces"] += parts.nbytes // len(parts) * (len(parts) - 1)  # all parts except its own
        counts["all_to_alls"] += 1
        return all_to_all(parts, group=group)

    for owner, name, counting in (
        (tiered, "all_to_all", to_all),
        (PendingGather, "fill", filling),
        (ranks, "all_gather_parts", make_all_gather),
        (ranks, "all_reduce", sum_up),
        (ShardedGradients, "_lay_out", laying_out),
        (ShardedGradients, "_add_up", adding),
        (ShardedGradients, "_sent_and_received", sent_and_received),
        (Node, "barrier", meeting),
        (Node, "exchange", exchanging),
        (Node, "fetch_matching", making_rounds),
        (Node, "send_recv", trading),
        (Node, "broadcast_across", crossing),
    ):
        setattr(owner, name, counting)


if __name__ == "__main__":
    count()
    train, found = forked_ranks.train, []

    def counted(*args: Any, **words: Any) -> Any:
        counts.clear()
        done = train(*args, **words)
        forked_ranks._quiet(args[0])  # Prefetches for the next step have arrived.
        found.append(dict(counts))
        return done

    forked_ranks.train = counted
    forked_ranks.main()
    (Path(sys.argv[3]) / f"counts-{sys.argv[1]}.json").write_text(json.dumps(found))
