"""The `eval` command: EleutherAI's lm-evaluation-harness with saved weights, on the CPU in fp32.

    SOURCE ── inference_model ── HFLM ── lm_eval.simple_evaluate ──> table, JSON

The harness calls the same transformers module as `sample` does. Weights that take more than half of the free RAM are
read from the disk each time the module is called: once a batch of log-likelihoods, once a generated token of a batch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload_trainer.errors import TrainerError, UserError
from offload_trainer.model.inference import NOT_NUMBERS
from offload_trainer.packages import is_installed, lacks
from offload_trainer.run.commands.generate import inference_model
from offload_trainer.run.commands.recipes import refuse_taken, write_new
from offload_trainer.safe_files import one_line
from offload_trainer.synonyms import nearest
from offload_trainer.units import shown

_RESULTS = "lm_eval.json"


@dataclass(frozen=True)
class Evaluation:
    """Arguments for the harness; None leaves a value to the task."""

    tasks: tuple[str, ...]  # names or patterns of tasks, groups and tags
    limit: int | None = None  # documents of each task
    num_fewshot: int | None = None
    batch_size: int = 8
    include_path: str | None = None  # directory of further tasks
    apply_chat_template: bool = False


@dataclass(frozen=True)
class Evaluated:
    """The harness's results: as its own table, and as JSON."""

    table: str
    json: str
    written: Path | None


def evaluate(
    source: Path,
    evaluation: Evaluation,
    *,
    write: Path | None = None,
    say: Callable[[str], None],
    most_bytes: int | None = None,
) -> Evaluated:
    """Evaluate the model of a run (its newest checkpoint), a checkpoint, or an exported directory.

    The results are written to `write`, by default to lm_eval.json in `source` if that is a run directory. `most_bytes`
    is that of `inference_model`.

    Raises:
        UserError: lm_eval is missing, a task is unknown or its data cannot be loaded, `source` holds no weights or no
            tokenizer, or the file exists.
        TrainerError: the model's logits are NaN.
    """
    if not is_installed("lm_eval"):
        raise UserError(lacks("eval", "lm_eval"))
    if evaluation.include_path is not None and not Path(evaluation.include_path).is_dir():
        raise UserError(f"--include-path {shown(evaluation.include_path)}: no such directory")
    if write is None and (source / "config.yaml").is_file():
        write = source / _RESULTS
    if write is not None:
        refuse_taken(write)
    # Of its warnings this one would appear each time: that a module was passed instead of a name.
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table

    tasks = TaskManager(include_path=evaluation.include_path)
    names = _known(evaluation, tasks)
    with inference_model(source, say=say, most_bytes=most_bytes) as found:
        if evaluation.apply_chat_template and not found.tokenizer.chat_template:
            raise UserError(f"{source}: its tokenizer has no chat template: leave --apply-chat-template out")
        found.model.register_forward_hook(_refuse_nan)
        try:
            results: dict[str, Any] = lm_eval.simple_evaluate(
                HFLM(found.model, backend="causal", tokenizer=found.tokenizer, batch_size=evaluation.batch_size),
                tasks=names,
                num_fewshot=evaluation.num_fewshot,
                limit=evaluation.limit,
                apply_chat_template=evaluation.apply_chat_template,
                task_manager=tasks,
                log_samples=False,
            )
        except OSError as error:  # `datasets` cannot reach a file or a data set
            raise UserError(
                f"the data of {', '.join(names)} cannot be loaded: {one_line(error)}. Check the network, or the files "
                "that the task names"
            ) from error
        results |= {"model_source": "offload-trainer", "model_name": found.source}
    table = "\n".join(make_table(results, kind) for kind in ("results", "groups") if results.get(kind))
    text = json.dumps(results, indent=1, default=handle_non_serializable)
    if write is not None:
        try:
            write_new(write, text + "\n")
        except UserError:
            say(table)  # computing the figures took long
            raise
    return Evaluated(table, text, write)


def _known(evaluation: Evaluation, tasks: Any) -> list[str]:
    """Return the names of the tasks that match. Raises UserError for those that match none."""
    found = {name: tasks.match_tasks([name]) for name in evaluation.tasks}
    if unknown := [name for name, names in found.items() if not names]:
        near = nearest(unknown[0], tasks.all_tasks)
        hint = f"; did you mean {near}?" if near in tasks.all_tasks else ""
        raise UserError(
            f"lm_eval has no task {', '.join(map(shown, unknown))} among its {len(tasks.all_tasks)}{hint}. `lm-eval ls "
            "tasks` lists them, and --include-path DIR adds a directory of tasks"
        )
    return list(dict.fromkeys(name for names in found.values() for name in names))


def _refuse_nan(module: Any, given: Any, output: Any) -> None:
    if torch.isnan(output.logits).any():
        raise TrainerError(NOT_NUMBERS)
