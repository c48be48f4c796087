"""Damage page files of killed runs at random: the next start must refuse them by name, or resume with the right bits.

    python soak/damaged_pages.py --damages 500 --commands 50 --seed 0

Runs of several kinds keep all state on drives, in pages with two copies, and save no checkpoints. Each is killed during
an update or between two updates. Then one thing at a time is damaged: bits, pages or blocks of zeros, pages of another
run, step or place, truncated, missing or exchanged files, or a slot of the record.

Most damages are checked with the functions that a start calls: the description and the record are read, and
`PageStore` reads each page. If nothing is refused, all pages and the loop's state must have the bytes of an
undisturbed run after that step. For `--commands` of the damages, the real command runs: it must exit with 2, say what
is wrong and change no byte, or finish with the losses and weights of the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trials import Command, Difference, compare_file, finish, load_libraries, rows

STEPS = 6
KINDS = (
    ["tiered.overlap=off"],
    ["tiered.overlap=backward", "optim.moment_dtype=bf16"],
    ["tiered.overlap=forward", "optim.moment_dtype=8bit", "TWO"],
)
Files = dict[Path, bytes]  # all files of a run's private directories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--commands", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=int, default=len(KINDS))
    parser.add_argument("--blind", action="store_true", help="compare no checksums of pages: the soak must fail")
    wishes = parser.parse_args()
    load_libraries()
    if wishes.blind:
        from offload_trainer.offloading.pages.page_copies import PageCopies

        PageCopies.differing = lambda *_, **__: None  # type: ignore[method-assign]
    from offload_trainer.storage.owned_dirs import scratch

    start, found = time.monotonic(), Counter[str]()
    with scratch("damages-") as folder:
        try:
            for kind in range(wishes.kinds):
                share = (wishes.damages + kind) // wishes.kinds, (wishes.commands + kind) // wishes.kinds
                trial = Trial(folder / str(kind), kind, random.Random(wishes.seed * 100 + kind))
                found += trial.carry_out(*share)
                print(f"kind {kind}: {' '.join(KINDS[kind])}: as it should be", flush=True)
        except Difference as error:
            raise SystemExit(str(error)) from None
    print(f"{wishes.damages} damages, {wishes.commands} of them by the command, {time.monotonic() - start:.0f} s")
    for what, count in sorted(found.items()):
        print(f"{count:5} {what}")


@dataclass(frozen=True)
class Step:
    """The content of page files after one step."""

    pages: list[bytes]
    rest: dict[str, Any]  # the engine's and the training loop's state in the record


@dataclass
class Killed:
    """A killed run and the files that it left."""

    output: Path
    leases: list[Path]
    files: Files
    step: int


class Trial:
    """Runs of one kind: one is left undisturbed, others are killed several times and damaged."""

    def __init__(self, folder: Path, kind: int, dice: random.Random) -> None:
        self.folder, self.kind, self.dice = folder, kind, dice
        self.log = folder / "log.txt"
        self.drives = [folder / "one", *([folder / "two"] if "TWO" in KINDS[kind] else [])]
        for drive in self.drives:
            drive.mkdir(parents=True)
        self.alone = folder / "alone"
        finish([*self.words(self.alone), "tiered.state_copies=1", "tiered.overlap=off"], log=self.log)
        self.steps = self.steps_of(folder / "told")
        self.other = self.killed(folder / "other", "--lr", "5e-3")

    def words(self, output: Path, *more: object) -> list[object]:
        small = ["model.overrides.n_layer=2", "model.overrides.n_embd=48", "--seq-len", "32", "--micro-batch", "2"]
        state = ["--optimizer", "nvme", "tiered.state_copies=2", "tiered.page_size=16384", "--save-every", 0]
        named = [word for drive in self.drives for word in ("--nvme", drive)]
        kind = [word for word in KINDS[self.kind] if word != "TWO"]
        where = ["--output", output, f"data.cache={self.folder.parent / 'cache'}", "placement.threads=1"]
        return [*small, *state, *named, *kind, *where, "--steps", STEPS, "train.eval_every=0", *more]

    # -- preparation ---------------------------------------------------------------------------------------------------

    def steps_of(self, output: Path) -> dict[int, Step]:
        """Train an undisturbed run; return the content of its page files after each step."""
        kept = self.folder / "kept"
        kept.mkdir()
        command = Command(self.words(output), log=self.log, first=partial(keep_each_record, kept))
        if command.wait() != 0:
            raise Difference(f"exit {command.code}: {command}")
        found = {}
        for folder in kept.iterdir():
            step = self.held([folder / str(number) for number in range(len(self.drives))])
            found[step.rest["train"]["step"]] = step
        return found

    def held(self, leases: list[Path]) -> Step:
        """Return the content of these page files, without verifying checksums."""
        from offload_trainer.offloading.pages.manifest import StoreManifest, read_newest
        from offload_trainer.plan.tiered.state_formats import state_format
        from offload_trainer.plan.tiers import offsets, size_of_home

        content = json.loads((leases[0] / "store.json").read_text())
        told = parsed_as(StoreManifest, content | {"drives": [str(lease) for lease in leases]})
        newest = read_newest(told)
        assert newest is not None
        form, homes = state_format(told.rule, told.states), [page.home for page in told.pages]
        sizes = [form.page_bytes(page) for page in told.pages]
        files = [(lease / "state").read_bytes() for lease in leases]
        places, starts = newest.copies(len(told.pages)), offsets(sizes, homes)
        pages = []
        for home, size, start, place in zip(homes, sizes, starts, places, strict=True):
            at = start + place * size_of_home(sizes, homes, home)
            pages.append(files[home][at : at + size])
        return Step(pages, {"step": newest.step, "engine": newest.engine, "train": newest.train})

    def killed(self, output: Path, *more: object) -> Killed:
        """Return a run that was killed at a random write into its page files, after it had recorded at least
        one step.
        """
        before = {path for drive in self.drives for path in drive.glob("offload-trainer/*")}
        while True:
            at = self.dice.randrange(20, 90)
            command = Command(self.words(output, *more), log=self.log, first=partial(kill_at_write, at))
            leases = []
            if command.wait() == -signal.SIGKILL:
                leases = [next(iter(set(drive.glob("offload-trainer/*")) - before)) for drive in self.drives]
                if (output / "pages").exists() and (step := self.recorded(leases)) >= 1:
                    break
            elif command.code:
                raise Difference(f"exit {command.code}, to be killed at write {at}: {command}")
            shutil.rmtree(output)
            for lease in leases:
                shutil.rmtree(lease)
        shutil.copytree(output, f"{output}-as-killed")
        return Killed(output, leases, read_all(leases), step)

    def recorded(self, leases: list[Path]) -> int:
        try:
            return int(self.held(leases).rest["train"]["step"])
        except AssertionError:
            return 0

    # -- trials --------------------------------------------------------------------------------------------------------

    def carry_out(self, damages: int, commands: int) -> Counter[str]:
        """Damage killed runs, about ten damages to each; count the outcomes by kind of damage."""
        found = Counter[str]()
        runs = max(1, min(8, damages // 10))
        for number in range(runs):
            killed = self.killed(self.folder / f"run-{number}")
            mine = len(range(number, damages, runs))
            by_command = set(self.dice.sample(range(mine), min(mine, len(range(number, commands, runs)))))
            for one in range(mine):
                what = self.damage(killed)
                came = self.by_command(killed) if one in by_command else self.by_library(killed)
                found[f"{what}: {came}"] += 1
                self.restore(killed)
            for lease in killed.leases:
                shutil.rmtree(lease)
            shutil.rmtree(killed.output)
        return found

    def restore(self, killed: Killed) -> None:
        for lease in killed.leases:
            lease.mkdir(parents=True, exist_ok=True)
            for path in lease.iterdir():
                if path not in killed.files:
                    path.unlink()
        for path, content in killed.files.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)

    def by_library(self, killed: Killed) -> str:
        """Return the outcome of the functions that a start calls; raise Difference if it is wrong."""
        from offload_trainer.errors import TrainerError

        try:
            found = read_as_a_start_does(killed)
        except (TrainerError, ValueError, OSError) as error:
            # A damaged path is named as it is in the file, so it may be none of the leases.
            named = any(str(lease) in str(error) for lease in killed.leases)
            if not named and "is not one of its run's directories" not in str(error):
                raise Difference(f"refused without a name: {error}") from error
            return "refused"
        return self.right(found, killed)

    def right(self, found: Step | None, killed: Killed) -> str:
        """Return the outcome in words; raise Difference unless `found` is the undisturbed run's last or last but one
        step.
        """
        if found is None:
            if killed.step > 1:
                raise Difference(f"all of {killed.step} steps would be forgotten")
            return "begun again"
        step = found.rest["train"]["step"]
        if step not in (killed.step, killed.step - 1) or found != self.steps[step]:
            raise Difference(f"files of step {killed.step} give other bytes, as those of step {step}")
        return "resumed" if step == killed.step else "resumed from the step before"

    def by_command(self, killed: Killed) -> str:
        damaged = read_all(killed.leases)
        command = Command(self.words(killed.output), log=self.log)
        if command.wait() == 2:
            if "the page files that this run has left" not in command.text:
                raise Difference(f"refused for another reason: {command}")
            if read_all(killed.leases) != damaged:
                raise Difference(f"refused, and changed: {command}")
            came = "refused by the command"
        elif command.code == 0:
            if rows(killed.output / "metrics.jsonl") != rows(self.alone / "metrics.jsonl"):
                raise Difference(f"other numbers than alone: {command}")
            compare_file(killed.output / "export/model.safetensors", self.alone / "export/model.safetensors")
            came = "resumed by the command" if "resuming from the page files" in command.text else "begun again by it"
            if came == "begun again by it" and killed.step > 1:
                raise Difference(f"all of {killed.step} steps were forgotten: {command}")
        else:
            raise Difference(f"exit {command.code}: {command}")
        shutil.rmtree(killed.output)
        shutil.copytree(f"{killed.output}-as-killed", killed.output)
        return came

    # -- damage ---------------------------------------------------------------------------------------------------

    def damage(self, killed: Killed) -> str:
        """Apply one random damage; return its description."""
        kinds: list[Callable[[Killed], str]] = [
            self.bits, self.bits, self.zeros, self.swapped, self.swapped, self.shorter, self.slot, self.slot, self.file,
        ]  # fmt: skip
        return self.dice.choice(kinds)(killed)

    def bits(self, killed: Killed) -> str:
        path = self.dice.choice(self.named(killed, "state", "state", "record", "store.json"))
        content = bytearray(path.read_bytes())
        used = len(content) if path.name != "record" else len(content.rstrip(b"\0"))
        for _ in range(self.dice.choice((1, 1, 3))):
            content[self.dice.randrange(used)] ^= 1 << self.dice.randrange(8)
        path.write_bytes(content)
        return f"bits in {path.name}"

    def zeros(self, killed: Killed) -> str:
        """Zero one copy of a page, or some blocks."""
        path = self.dice.choice(self.named(killed, "state"))
        content, size = bytearray(path.read_bytes()), self.dice.choice((4096, 16384, 49152, 196608))
        at = self.dice.randrange(max(1, len(content) - size)) // 4096 * 4096
        content[at : at + size] = bytes(len(content[at : at + size]))
        path.write_bytes(content)
        return "zeros in state"

    def swapped(self, killed: Killed) -> str:
        """Overwrite a range with bytes of another run, the other copy, another page, or another step of the
        same run.
        """
        path = self.dice.choice(self.named(killed, "state"))
        number = [lease / "state" for lease in killed.leases].index(path)
        content = bytearray(path.read_bytes())
        size = self.dice.choice((4096, 16384, 49152))
        at = self.dice.randrange(len(content) - size) // 4096 * 4096
        source = self.dice.choice(("another run", "the other place", "another page", "another step"))
        if source == "another run":
            given = self.other.files[self.other.leases[number] / "state"][at : at + size]
        elif source == "the other place":
            half = len(content) // 2
            given = bytes(content[(at + half) % len(content) :][:size])
        elif source == "another page":
            given = bytes(content[self.dice.randrange(len(content) - size) // 4096 * 4096 :][:size])
        else:
            of = self.dice.choice(sorted((self.folder / "kept").iterdir()))
            given = (of / str(number) / "state").read_bytes()[at : at + size]
        content[at : at + len(given)] = given
        path.write_bytes(content)
        return f"{source} swapped into state"

    def shorter(self, killed: Killed) -> str:
        path = self.dice.choice(self.named(killed, "state", "record", "store.json"))
        os.truncate(path, self.dice.randrange(path.stat().st_size))
        return f"{path.name} cut short"

    def slot(self, killed: Killed) -> str:
        """Damage one slot of the record, or both."""
        (path,) = self.named(killed, "record")
        content = bytearray(path.read_bytes())
        half = len(content) // 2
        newer = 0 if content[:8][::-1] > content[half : half + 8][::-1] else 1
        which = self.dice.choice((0, 1, 2))
        how = self.dice.choice(("of zeros", "with another byte", "of another run"))
        for slot in range(2) if which == 2 else [which]:
            start = slot * half
            if how == "of zeros":
                content[start : start + half] = bytes(half)
            elif how == "with another byte":
                content[start + self.dice.randrange(200)] ^= self.dice.randrange(1, 256)
            else:
                content[start : start + half] = self.other.files[self.other.leases[0] / "record"][start : start + half]
        path.write_bytes(content)
        return f"{'both slots' if which == 2 else 'the newer slot' if which == newer else 'the older slot'} {how}"

    def file(self, killed: Killed) -> str:
        """Remove a file, or replace it with another run's."""
        path = self.dice.choice(self.named(killed, "state", "record", "store.json"))
        if self.dice.random() < 0.5:
            path.unlink()
            return f"{path.name} gone"
        number = [lease.name for lease in killed.leases].index(path.parent.name)
        path.write_bytes(self.other.files[self.other.leases[number] / path.name])
        return f"{path.name} of another run"

    def named(self, killed: Killed, *names: str) -> list[Path]:
        return [lease / name for name in names for lease in killed.leases if (lease / name).exists()]


def read_as_a_start_does(killed: Killed) -> Step | None:
    """Read the page files as run/resume.py and the engine do, without the rest of a start."""
    from offload_trainer.offloading.device import CpuDevice
    from offload_trainer.offloading.pages.manifest import files_of, read_description, read_newest, refuse_outside
    from offload_trainer.offloading.pages.page_copies import PageCopies
    from offload_trainer.offloading.pages.store import PageStore
    from offload_trainer.offloading.ranks.node_comm import Node
    from offload_trainer.optim.native_adam import zlib_sum
    from offload_trainer.plan.tiered.layout import Page
    from offload_trainer.plan.tiered.state_formats import state_format
    from offload_trainer.storage.transfer import DriveFile, ThreadedTransfers

    told = read_description(killed.leases[0])
    for lease in killed.leases:
        refuse_outside(lease, told)
    newest = read_newest(told)
    if newest is None or newest.train is None or newest.engine is None:
        return None
    paths = files_of(told)
    was = json.loads(killed.files[killed.leases[0] / "store.json"])
    if json.loads((killed.leases[0] / "store.json").read_text()) != was:
        raise ValueError(f"{killed.leases[0]}: laid out otherwise than this run's")
    pages = [Page(page.unit, page.start, page.elements, page.home) for page in told.pages]
    form, node, device = state_format(told.rule, told.states), Node(), CpuDevice()
    transfers = ThreadedTransfers(threads=1)
    files = [DriveFile(path, path.stat().st_size) for path in paths]
    try:
        copies = PageCopies(pages, format=form, count=2, node=node, compute=zlib_sum)
        store = PageStore(pages, format=form, files=files, transfers=transfers, device=device, node=node, copies=copies)
        copies.begin(newest.copies(len(pages)), bytes.fromhex(newest.sums))
        (buffer,) = store.buffers(1)
        held = []
        for number in range(len(pages)):
            data = buffer[: store.bytes_of(number)]
            store.read(number, data).wait()
            held.append(data.numpy().tobytes())
    finally:
        transfers.close()
        device.close()
        for file in files:
            file.close()
    return Step(held, {"step": newest.step, "engine": newest.engine, "train": newest.train})


def parsed_as(kind: Any, content: dict[str, Any]) -> Any:
    from offload_trainer.safe_files import as_kind

    return as_kind(content, kind)


def read_all(leases: list[Path]) -> Files:
    return {path: path.read_bytes() for lease in leases for path in lease.iterdir() if path.name != ".ranks"}  # a lock


# -- in the fork of a command ------------------------------------------------------------------------------------------


def kill_at_write(number: int) -> None:
    """Kill the process before its Nth write into page files, N = `number`."""
    write, left = os.pwritev, [number]

    def dying(descriptor: int, *given: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/state"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, *given)

    os.pwritev = dying


def keep_each_record(folder: Path) -> None:
    """Copy the private directories to `folder` whenever a step's record is written."""
    from offload_trainer.offloading.pages.manifest import read_description
    from offload_trainer.storage.ab_record import Record

    write = Record.write

    def keeping(self: Record, content: bytes, *, lasting: bool) -> None:
        write(self, content, lasting=lasting)
        if b'"train"' in content:
            lease = Path(os.readlink(f"/proc/self/fd/{self._descriptor}")).parent
            for number, drive in enumerate(read_description(lease).drives):
                shutil.copytree(drive, folder / str(self._number) / str(number))

    Record.write = keeping  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
