"""Run sequences of commands in forks of one process that has imported torch:
python tests/helpers/command_sequences.py FOLDER NAME...

Each story is a function that asserts; test_ends.py runs them as tests.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from signal_matrix import load_libraries, wait

SMALL = [
    *("model.overrides.n_layer=1", "model.overrides.n_embd=32", "model.overrides.n_head=2", "--seq-len", "16"),
    *("--micro-batch", "1", "--steps", "5", "train.eval_every=0", "placement.threads=1"),
]


class Story:
    """A folder in which a sequence of commands runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        os.environ["OFFLOAD_TRAINER_CACHE"] = str(folder / "machine-cache")

    def train(self, output: Path, *words: object, code: int = 0, before: Callable[[], None] = lambda: None) -> str:
        names = ["--output", str(output), f"data.cache={self.folder / 'cache'}"]
        return self.command(*SMALL, *names, *words, code=code, before=before)

    def command(self, *words: object, code: int = 0, before: Callable[[], None] = lambda: None) -> str:
        """Run `offload-train WORDS` after `before`, and return its output. Assert that its exit code is `code`."""
        told = self.folder / "told"
        pid = os.fork()
        if not pid:
            self._child(told, [str(word) for word in words], before)
        status = wait(pid)
        text = told.read_text()
        assert status is not None, text
        assert os.waitstatus_to_exitcode(status) == code, (words, os.waitstatus_to_exitcode(status), text)
        assert "Traceback" not in text, text
        return text

    def _child(self, told: Path, words: list[str], before: Callable[[], None]) -> None:
        code = 99
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            descriptor = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            before()
            from offload_trainer.cli import main

            code = main(words)
        finally:
            os._exit(code)


def send_at_step(number: int, step: int) -> Callable[[], None]:
    """Return a `before` function that makes the process send itself signal `number` when step `step` begins."""

    def patch() -> None:
        from offload_trainer.engine.tiered import TieredEngine

        train_step, calls = TieredEngine.train_step, iter(range(1, 100))

        def then(self: Any, *arguments: Any, **named: Any) -> Any:
            if next(calls) == step:
                os.kill(os.getpid(), number)
            return train_step(self, *arguments, **named)

        TieredEngine.train_step = then  # type: ignore[method-assign]

    return patch


def no_room_for_checkpoints() -> None:
    from offload_trainer import checkpoint
    from offload_trainer.errors import TrainerError

    def refuse(_: Any) -> None:
        raise TrainerError("no room")

    checkpoint.Checkpoints._make_room = refuse  # type: ignore[method-assign]


def state(output: Path) -> dict[str, bytes | None]:
    """Return the contents of files that a refused command must not change."""
    names = ("metrics.jsonl", "config.yaml", "export.json", "export/model.safetensors", "export/README.md", "log.txt")
    return {name: (output / name).read_bytes() if (output / name).exists() else None for name in names}


def losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


# -- stories ---------------------------------------------------------------------------------------------------------


def a_run_without_checkpoints_is_done_once(story: Story) -> None:
    """Repeating the command trains and overwrites nothing; a command with other settings is refused."""
    output = story.folder / "out"
    story.train(output, "--save-every", 0)
    before = state(output)
    assert "done before: 5 steps; the weights are in" in story.train(output, "--save-every", 0)
    for words, told in (
        (["--save-every", 0, "--steps", 7], "differs in train.steps"),
        (["--save-every", 2, "--lr", "0.1"], "differs in optim.lr"),
        (["--save-every", 0, "--resume", "never"], "ended after step 5"),
        (["--save-every", 0, "--seed", 3], "differs in train.seed"),
    ):
        assert told in story.train(output, *words, code=2)
    assert state(output) == before
    (output / "export").rename(story.folder / "mine")
    assert "step 1" in story.train(output, "--save-every", 0)
    (output / "export.json").unlink()  # The export is no longer known to be this run's.
    before = state(output)
    assert "is where this run would leave its weights" in story.train(output, "--save-every", 0, code=2)
    assert state(output) == before
    for path in (story.folder / "mine").iterdir():
        if path.suffix == ".safetensors":
            assert path.read_bytes() == (output / "export" / path.name).read_bytes()


def exports_of_a_run_without_checkpoints(story: Story) -> None:
    """`export RUN` uses the final weights, not an older checkpoint that a user had requested."""
    from safetensors.torch import load_file

    output = story.folder / "out"
    story.train(output, "--save-every", 0, before=send_at_step(signal.SIGUSR1, 2))
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    told = story.command("export", output, story.folder / "hf", "--dtype", "fp32", "--check")
    assert "export, after step 5" in told
    held, given = (load_file(place / "model.safetensors") for place in (story.folder / "hf", output / "export"))
    assert held.keys() == given.keys()
    assert all(held[name].equal(given[name]) for name in given)
    card = (story.folder / "hf/README.md").read_text()
    assert "| Steps | 5 of 5 |" in card
    assert "n_embd=32" in card
    story.command("export", output, story.folder / "half", "--dtype", "bf16")
    assert f"done before: 5 steps; the weights are in {output / 'export'}" in story.train(output, "--save-every", 0)


def a_signal_without_checkpoints_saves_one(story: Story) -> None:
    """The same command resumes from that checkpoint, and its results match those of an uninterrupted run."""
    whole, output = story.folder / "whole", story.folder / "out"
    story.train(whole, "--save-every", 0)
    told = story.train(output, "--save-every", 0, code=143, before=send_at_step(signal.SIGTERM, 3))
    assert "SIGTERM: finishing this step, then saving" in told
    assert "stopped after step 3, everything saved" in told
    assert not (output / "export").exists()
    assert "resumed from" in story.train(output, "--save-every", 0)
    assert losses(output) == losses(whole)
    assert state(output)["export/model.safetensors"] == state(whole)["export/model.safetensors"]


def no_room_for_a_checkpoint_at_a_signal(story: Story) -> None:
    """Only the weights are kept then. The run says so, and the next start does not overwrite them."""
    output = story.folder / "out"

    def before() -> None:
        send_at_step(signal.SIGINT, 3)()
        no_room_for_checkpoints()

    told = story.train(output, "--save-every", 0, code=130, before=before)
    assert "no checkpoint was made: no room" in told
    assert f"stopped after step 3; the weights are in {output / 'export'}, but no checkpoint could be made" in told
    kept = state(output)
    assert "ended after step 3 and left no checkpoint" in story.train(output, "--save-every", 0, code=2)
    assert state(output) == kept
    told = story.train(story.folder / "on", "--save-every", 0, "--model", output / "export", code=2)
    assert "needs random weights" in told  # model.overrides apply only to a preset.
    words = [word for word in SMALL if "overrides" not in word]
    names = ["--output", story.folder / "on", f"data.cache={story.folder / 'cache'}"]
    assert "done: 5 steps" in story.command(*words, *names, "--save-every", 0, "--model", output / "export")


STORIES = {
    story.__name__: story
    for story in (
        a_run_without_checkpoints_is_done_once,
        exports_of_a_run_without_checkpoints,
        a_signal_without_checkpoints_saves_one,
        no_room_for_a_checkpoint_at_a_signal,
    )
}


def main() -> None:
    load_libraries()
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        STORIES[name](Story(folder))
        print(name, flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
