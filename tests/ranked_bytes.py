"""A rank as in `ranked.py` that counts what it moves for the others in its steps, and leaves that beside its steps.

python ranked_bytes.py RANK COUNT FOLDER NODES      FOLDER/counts-RANK.json, a list of one for each case
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import ranked
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import offload_trainer.plan.layout as layout
from offload_trainer import ranks
from offload_trainer.offloading.exchange import SharedGradients
from offload_trainer.offloading.node import Node
from offload_trainer.offloading.rounds import Exchange

counts: Counter[str] = Counter()


class Adding(TorchDispatchMode):
    """Counts operands by torch's own operations: `added` bytes of gradients, `sums` bytes written and read for them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("add_", "copy_"):
            counts["added"] += args[1].nbytes
            counts["sums"] += args[0].nbytes * (2 if name == "add_" else 1)
        return func(*args, **(kwargs or {}))


def count() -> None:
    """From now on."""
    lay_out, add_up, send = SharedGradients._lay_out, SharedGradients._add_up, SharedGradients._sent_and_received
    meet, trade, across, exchange = Node.meet, Node.trade, Node.across, Node.exchange
    sending: list[bool] = []  # whether what is traded are gradients; parts of norms are not counted

    def laying_out(self: Any, name: str, flat: torch.Tensor) -> None:
        counts["laid_out"] += flat.nbytes
        lay_out(self, name, flat)

    def adding(self: Any, *args: Any, **words: Any) -> None:
        with Adding():
            add_up(self, *args, **words)

    def meeting(self: Node) -> None:
        counts["meets"] += 1
        meet(self)

    def exchanging(self: Node) -> Exchange:
        told = exchange(self)

        def telling(number: int) -> list[int]:
            counts["agreements"] += 1
            return told(number)

        return telling

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
        return trade(self, out, into)

    def crossing(self: Node, values: torch.Tensor, *, source: int, **words: Any) -> None:
        if source == self.rank:
            counts["weights_out"] += values.nbytes * (len(self.nodes) - 1)
        else:
            counts["weights_in"] += values.nbytes
        across(self, values, source=source, **words)

    for owner, name, counting in (
        (SharedGradients, "_lay_out", laying_out),
        (SharedGradients, "_add_up", adding),
        (SharedGradients, "_sent_and_received", sent_and_received),
        (Node, "meet", meeting),
        (Node, "exchange", exchanging),
        (Node, "trade", trading),
        (Node, "across", crossing),
    ):
        setattr(owner, name, counting)


def main(rank: int, world: int, folder: Path, *, nodes: int) -> None:
    layout.SMALL = 0
    torch.set_num_threads(1)
    ranked._count_what_is_moved()
    count()
    train, found = ranked.train, []

    def counted(*args: Any, **words: Any) -> Any:
        counts.clear()
        done = train(*args, **words)
        found.append(dict(counts))
        return done

    ranked.train = counted
    ranked.join(rank, world, folder, nodes=nodes)
    for told in json.loads((folder / "cases.json").read_text()):
        ranked.Case(**told).run()
    (folder / f"counts-{rank}.json").write_text(json.dumps(found))
    ranks.wait_for_all()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), nodes=int(sys.argv[4]))
