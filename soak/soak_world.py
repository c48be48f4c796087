"""The environment of a soak: kinds of runs, the user's own files among the program's, and checks after every command.

DIRECTORY/
    alone/KIND/            the undisturbed run, with a checkpoint after each step
    models/ cache/ tmp/    model directories, all caches, TMPDIR
    runs/ exports/         what the commands write
    drives/a, drives/b     --nvme
    disk/                  a separate small filesystem, if one can be mounted
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trials import (
    CHECKPOINT,
    Difference,
    checkpoints_in,
    compare_export,
    compare_state,
    finish,
    rows,
    verify_checkpoint,
)

STEPS = 10
EVALUATION = ("step", "validation_loss", "perplexity", "bits_per_byte")
DISK_BYTES = 72 << 20

_ROPE = {"vocab_size": 2048, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24}
_ROPE |= {"num_hidden_layers": 2, "intermediate_size": 160, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **_ROPE, "tie_word_embeddings": False},
    "experts": {
        **{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **_ROPE},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
        "tie_word_embeddings": False,
    },
}
GPT2 = ("model.overrides.n_layer=2", "model.overrides.n_embd=96")
DROPOUT = tuple(f"model.overrides.{name}_pdrop=0.1" for name in ("resid", "embd", "attn"))


@dataclass(frozen=True)
class Kind:
    """A model and its training settings; the results must always be those of the undisturbed run."""

    name: str
    words: tuple[str, ...]
    model: str = ""  # key of MODELS; empty: a small model of the default preset
    plain: bool = False  # plain torch has the same state


KINDS = (
    Kind("gpt2-bf16-dropout", (*GPT2, *DROPOUT, "--micro-batch", "2"), plain=True),
    Kind(
        "gpt2-fp16-accumulate",
        (*GPT2, *DROPOUT, "--dtype", "fp16", "--micro-batch", "2", "--accumulate", "2"),
        plain=True,
    ),
    Kind("gpt2-fp32-8bit", (*GPT2, "--dtype", "fp32", "--micro-batch", "2", "optim.moment_dtype=8bit")),
    Kind("qwen3-bf16-8bit", ("--micro-batch", "2", "optim.moment_dtype=8bit"), model="qwen3"),
    Kind("qwen3-bf16-moments", ("--micro-batch", "2", "optim.moment_dtype=bf16"), model="qwen3"),
    Kind("qwen3-fp32", ("--dtype", "fp32", "--micro-batch", "1", "--accumulate", "2"), model="qwen3", plain=True),
    Kind("experts-bf16-moments", ("--micro-batch", "2", "optim.moment_dtype=bf16"), model="experts"),
    Kind("experts-fp16", ("--dtype", "fp16", "--micro-batch", "2"), model="experts", plain=True),
)


@dataclass
class Trial:
    """A run directory and what is known about it."""

    kind: Kind
    output: Path
    every: int
    keep: int
    on_disk: bool
    final: bool = False  # no checkpoints unless requested; the weights are exported at the end
    # checkpoints at the last check, except those that the user has since renamed
    present: set[int] = field(default_factory=set)
    renamed: dict[Path, int] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    @property
    def newest(self) -> int:
        """The step of its newest checkpoint, or 0."""
        return max(checkpoints_in(self.checkpoints), default=0)

    @property
    def reached(self) -> int:
        """The step of its final weights, if exported, or of its newest checkpoint."""
        return STEPS if (self.output / "export").exists() else self.newest


class Sentinels:
    """The user's files, which only the user may change."""

    def __init__(self) -> None:
        self.known: dict[Path, tuple[str, int]] = {}

    def plant(self, folder: Path, *names: str) -> None:
        """Create a small tree for each name: files, one of them hidden, an empty directory and a link."""
        for name in names:
            tree = folder / name
            (tree / "nested/empty").mkdir(parents=True, exist_ok=True)
            for number, file in enumerate(
                ("MANIFEST.json", "weights.safetensors", "nested/.hidden", "nested/note.tmp")
            ):
                (tree / file).write_text(f"{tree.name} {number}\n" * (number + 1))
            (tree / "link").symlink_to("nested")
            self.adopt(tree)

    def plant_file(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"mine: {path.name}\n")
        self.adopt(path)

    def adopt(self, tree: Path) -> None:
        for path in _below(tree):
            self.known[path] = _look(path)

    def move(self, old: Path, new: Path) -> None:
        """Rename a directory, as a user would, and keep track of the files in it."""
        os.rename(old, new)
        for path in [path for path in self.known if path.is_relative_to(old)]:
            self.known[new / path.relative_to(old)] = self.known.pop(path)

    def forget(self, tree: Path) -> None:
        for path in [path for path in self.known if path.is_relative_to(tree)]:
            del self.known[path]

    def check(self) -> int:
        for path, expected in self.known.items():
            try:
                found = _look(path)
            except OSError as error:
                raise Difference(f"the user's {path} is gone: {error.strerror}") from None
            if found != expected:
                raise Difference(f"the user's {path} was {expected} and is {found}")
        return len(self.known)


def _below(tree: Path) -> Iterator[Path]:
    yield tree
    if tree.is_dir() and not tree.is_symlink():
        yield from sorted(tree.rglob("*"))


def _look(path: Path) -> tuple[str, int]:
    """Return type, mode and a checksum of the content."""
    held = path.lstat()
    if stat.S_ISLNK(held.st_mode):
        return f"a link to {os.readlink(path)}", 0
    if stat.S_ISDIR(held.st_mode):
        return f"a directory of mode {held.st_mode:o}", 0
    return f"a file of mode {held.st_mode:o}", zlib.crc32(path.read_bytes())


class World:
    """The directories of a soak, and the checks on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        self.drives = [folder / "drives/a", folder / "drives/b"]
        self.runs, self.exports, self.disk = folder / "runs", folder / "exports", folder / "disk"
        self.sentinels = Sentinels()
        self.checked: Counter[str] = Counter()
        self.mounted = False
        for path in (*self.drives, self.runs, self.exports, self.disk, folder / "alone", folder / "tmp"):
            path.mkdir(parents=True, exist_ok=True)
        for name, config in MODELS.items():
            (folder / "models" / name).mkdir(parents=True, exist_ok=True)
            (folder / "models" / name / "config.json").write_text(json.dumps(config))
        self._surround()

    def environment(self) -> dict[str, str]:
        """Return the variables that keep all caches inside, without earlier timings of this machine."""
        places = {"XDG_CACHE_HOME": self.folder / "cache", "TMPDIR": self.folder / "tmp"}
        return {name: str(path) for name, path in places.items()} | {
            "OFFLOAD_TRAINER_CACHE": str(self.folder / "cache/offload-trainer")
        }

    def _surround(self) -> None:
        """Create files of the user's under names that resemble the program's."""
        for drive in self.drives:
            self.sentinels.plant(drive, "photos", "run-0badcafe")
            self.sentinels.plant(drive / "offload-trainer", "run-xl", "run-xl-fp16", "run-1a2b3c4d", "notes")
            self.sentinels.plant_file(drive / "offload-trainer/run-5e6f7a8b/.lock")
        self.sentinels.plant(self.folder / "cache/offload-trainer", "thesis", "builtin")
        self.sentinels.plant_file(self.folder / "cache/offload-trainer/mine.bin.tmp")
        self.sentinels.plant(self.exports, "best", ".best.tmp")

    @contextmanager
    def small_disk(self) -> Iterator[bool]:
        """Mount a separate filesystem at `disk`; yield False if this user may not mount one."""
        image = self.folder / "disk.image"
        with open(image, "wb") as file:
            file.truncate(DISK_BYTES)
        with suppress(FileNotFoundError):
            made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], capture_output=True, check=False)
            done = (
                made.returncode
                or subprocess.run(["mount", "-o", "loop", image, self.disk], capture_output=True).returncode
            )
            self.mounted = done == 0
        try:
            if self.mounted:
                (self.disk / "drive").mkdir()
            yield self.mounted
        finally:
            if self.mounted:
                subprocess.run(["umount", "-l", self.disk], capture_output=True)
                self.mounted = False

    # -- runs ----------------------------------------------------------------------------------------------------------

    def new_trial(self, dice: random.Random, name: str, kinds: Iterable[Kind]) -> Trial:
        kind = dice.choice(list(kinds))
        places = [self.runs, self.runs, self.drives[0], self.drives[1] / "offload-trainer", self.disk]
        place = dice.choice(places if self.mounted else places[:-1])
        every, keep, final = dice.randrange(1, 5), dice.randrange(1, 4), dice.random() < 0.2
        trial = Trial(kind, place / name, every=every, keep=keep, on_disk=place == self.disk, final=final)
        self.sentinels.plant(trial.output, "plots", "export-old")
        self.sentinels.plant(trial.checkpoints, "step-00000002-best", "step-00000099.bak", ".step-ideas", "mine")
        self.sentinels.plant_file(trial.output / "save.txt")
        return trial

    def remove(self, trial: Trial) -> None:
        self.sentinels.forget(trial.output)
        shutil.rmtree(trial.output)

    def words(self, kind: Kind) -> list[str]:
        """Return the settings of a run of this kind, without paths."""
        model = ["--model", f"{self.folder}/models/{kind.model}", "--scratch", "--tokenizer", "builtin"]
        always = ["--seq-len", "32", "--steps", str(STEPS), "placement.threads=1", "--lr", "1e-3"]
        evaluated = ["train.eval_every=4", "train.eval_rows=4"]
        return [*(model if kind.model else []), *kind.words, *always, *evaluated]

    def alone(self, kind: Kind) -> Path:
        """Return the undisturbed run of this kind, which is trained on first use."""
        output = self.folder / "alone" / kind.name
        if not (output / f"checkpoints/step-{STEPS:08d}").exists():
            words = [*self.words(kind), "--ram-fraction", "1", "--save-every", "1", f"save.keep={STEPS}"]
            finish([*words, "--output", output], log=self.log)
            if sorted(checkpoints_in(output / "checkpoints")) != list(range(1, STEPS + 1)):
                raise Difference(f"{output}: a checkpoint each step was asked for")
        return output

    def export_alone(self, kind: Kind, step: int, dtype: str) -> Path:
        place = self.alone(kind) / f"exports/{step}-{dtype}"
        if not place.exists():
            source = self.alone(kind) / f"checkpoints/step-{step:08d}"
            finish(["export", source, place, "--dtype", dtype], log=self.log)
        return place

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, trials: Iterable[Trial]) -> None:
        """Check what must be true after every command, however it ended."""
        self.checked["user's files looked at"] += self.sentinels.check()
        for trial in trials:
            self._check_checkpoints(trial)
            self._check_metrics(trial)

    def _check_checkpoints(self, trial: Trial) -> None:
        found = checkpoints_in(trial.checkpoints)
        must = sorted(trial.present | found.keys())[-trial.keep :]
        if not found.keys() >= set(must):
            raise Difference(f"{trial.checkpoints}: {must} are the newest {trial.keep}, and {sorted(found)} are there")
        trial.present = set(found)  # missing ones were pruned by the rule
        alone = self.alone(trial.kind)
        for step, checkpoint in found.items():
            self.checked["checkpoints' files against their sums"] += verify_checkpoint(checkpoint)
            expected = alone / f"checkpoints/step-{step:08d}"
            self.checked["checkpoints' states against the run left alone"] += compare_state(checkpoint, expected) > 0

    def check_told(self, trial: Trial, told: set[int]) -> None:
        """Raise Difference unless each checkpoint reported as saved is there, or was pruned by the rule."""
        must = sorted(told | trial.present)[-trial.keep :]
        if not trial.present >= set(must):
            raise Difference(f"{trial.checkpoints}: {sorted(told)} were saved, and {sorted(trial.present)} are there")
        self.checked["checkpoints said to be saved"] += len(told)

    def _check_metrics(self, trial: Trial) -> None:
        for name, keys in (("metrics.jsonl", None), ("evaluations.jsonl", EVALUATION)):
            ours, theirs = (
                rows(folder / name, *([keys] if keys else [])) for folder in (trial.output, self.alone(trial.kind))
            )
            if ours != theirs[: len(ours)]:
                wrong = next(one for one in zip(ours, [*theirs, None], strict=False) if one[0] != one[1])
                raise Difference(f"{trial.output}/{name}: {wrong[0]}, and alone {wrong[1]}")
            self.checked[f"lines of {name}"] += len(ours)

    def check_finished(self, trial: Trial, *, saved: bool) -> None:
        """Check a run that finished normally; `saved` says that its last command made a checkpoint."""
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            if len(rows(trial.output / name, ("step",))) != len(rows(self.alone(trial.kind) / name, ("step",))):
                raise Difference(f"{trial.output}/{name} is not complete")
        if trial.reached != STEPS:
            raise Difference(f"{trial.checkpoints}: finished, and the newest is {trial.newest}")
        if trial.final:
            self.check_export(trial.output / "export", trial.kind, STEPS, "fp32")
            if (trial.output / ".export.tmp").exists():
                raise Difference(f"left over: {trial.output}/.export.tmp")
        if saved and len(trial.present) > trial.keep:
            raise Difference(f"{trial.checkpoints}: keep {trial.keep}, and there are {sorted(trial.present)}")
        mine = [name for name in os.listdir(trial.checkpoints) if trial.checkpoints / name not in self.sentinels.known]
        if left := [name for name in mine if not CHECKPOINT.fullmatch(name)]:
            raise Difference(f"{trial.checkpoints}: left over: {left}")
        self.checked["runs that got to their end"] += 1

    def check_drives(self, drives: Iterable[Path], trials: Iterable[Trial]) -> None:
        """Raise Difference if a run's directory is left on a drive although no run is alive and the last one ended
        normally.
        """
        ours = {trial.output for trial in trials}
        for drive in drives:
            root = drive / "offload-trainer"
            left = [
                path.name
                for path in (root.iterdir() if root.is_dir() else ())
                if path not in self.sentinels.known
                and path not in ours
                and path.is_dir()
                and not any(known.is_relative_to(path) for known in self.sentinels.known)
            ]
            if left:
                raise Difference(f"{root}: left over: {left}")
            self.checked["drives looked at for what the dead leave"] += 1

    def dead_stores(self, trials: Iterable[Trial]) -> Iterator[tuple[Path, Trial]]:
        """Yield directories of page files that these trials' runs left on the drives; no run may be alive."""
        for drive in self.drives:
            for told in sorted((drive / "offload-trainer").glob("run-*/store.json")):
                output = Path(json.loads(told.read_text())["model"]).parent
                yield from ((told.parent, trial) for trial in trials if trial.output == output)

    def check_export(self, place: Path, kind: Kind, step: int, dtype: str) -> None:
        self.checked["exported files compared"] += compare_export(place, self.export_alone(kind, step, dtype))
