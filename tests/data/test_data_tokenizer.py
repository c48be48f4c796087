"""Tests of tokenizers: the built-in one encodes any text, and bits per byte are of the bytes of the evaluated rows."""

import json
import math
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sample_chats import CHATS, chat_tokenizer, lines, prepared, turns
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from offload_trainer.data.rows import Batch, RowReader, split_rows
from offload_trainer.data.sources import BUILTIN_CORPUS
from offload_trainer.data.tokenfile import TokenFile
from offload_trainer.data.tokenizer import load_tokenizer, text_bytes, tokenizer_fingerprint, vocabulary_size
from offload_trainer.errors import UserError
from offload_trainer.run.loop import _evaluate
from offload_trainer.telemetry.metrics import EvalRecord

SHIPPED = BUILTIN_CORPUS.read_text("utf-8")


def small_tokenizer(words: dict[str, int]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(words, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_the_builtin_tokenizer_encodes_any_text(
    seed: int, recwarn: pytest.WarningsRecorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading it needs no network and warns of nothing."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("reached for the network"))
    draw = random.Random(seed)
    tokenizer = load_tokenizer("builtin")
    assert not recwarn.list
    assert capsys.readouterr() == ("", "")
    assert len(tokenizer) == vocabulary_size(tokenizer) == 2048
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0
    drawn = draw.randbytes(4000).decode("utf-8", errors="replace")
    drawn += "".join(chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in range(500))
    for text in (SHIPPED, drawn):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer(text)["input_ids"] == ids
        assert 0 < min(ids) <= max(ids) < 2048
        assert tokenizer.decode(ids) == text


def test_the_fingerprint_tells_tokenizers_apart_and_ignores_call_settings() -> None:
    one = small_tokenizer({"?": 0, "a": 1, "b": 2})
    fingerprint = tokenizer_fingerprint(one)
    assert fingerprint == tokenizer_fingerprint(small_tokenizer({"?": 0, "a": 1, "b": 2}))
    assert fingerprint != tokenizer_fingerprint(small_tokenizer({"?": 0, "b": 1, "a": 2}))
    one(["a b a"], truncation=True, max_length=2)
    assert one.backend_tokenizer.truncation is not None
    assert tokenizer_fingerprint(one) == fingerprint
    assert vocabulary_size(small_tokenizer({"?": 0, "a": 9})) == 10  # the ids between them count


def test_a_name_without_a_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the hub\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "gpt2", "vocab_size": 50257}')
    for name, told in (
        (tmp_path, r"holds no tokenizer.*data\.tokenizer=builtin"),
        (tmp_path / "model", "holds no tokenizer"),
        (tmp_path / "gone", "no such directory"),
        ("someone/model", r"someone/model is no directory here.*couldn't connect to the hub\).*network"),
    ):
        with pytest.raises(UserError, match=told):
            load_tokenizer(str(name))


# -- bits per byte -----------------------------------------------------------------------------------------------------


FOREIGN = "四月は最も残酷な月だ 🌒 и всё же — naïve café\n\t x  =  1;\n"
MIXED = SHIPPED[:60_000] + FOREIGN * 120  # the last rows differ in kind


def sentence_piece(kind: str) -> PreTrainedTokenizerFast:
    """Train a tokenizer like SentencePiece's: spaces are part of words, and rare characters are bytes."""
    if kind == "llama":
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    text = SHIPPED[:40_000].split("\n")
    backend.train_from_iterator(text, trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    content = json.loads(backend.to_str())
    content["added_tokens"] = content["added_tokens"][:2]  # bytes are ordinary tokens, as in Llama's
    backend = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {
    "builtin": lambda: load_tokenizer("builtin"),
    "llama": lambda: sentence_piece("llama"),
    "metaspace": lambda: sentence_piece("metaspace"),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", [SHIPPED[:30_000], MIXED[-12_000:]], ids=["shipped", "mixed"])
def test_all_tokens_of_a_text_are_all_its_bytes(kind: str, text: str) -> None:
    """The tokens of a text count its bytes, and end-of-text counts none."""
    tokenizer = TOKENIZERS[kind]()
    if kind == "metaspace":
        # Metaspace splits words at these characters, and its decoded text lacks them.
        text = text.replace("\n", " ").replace("\t", " ")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_bytes(tokenizer, torch.tensor([*ids, tokenizer.eos_token_id])) == len(text.encode())
    assert abs(text_bytes(tokenizer, torch.tensor(ids[:-1])) - len(text.encode())) < 12  # the end may cut a character


def test_special_tokens_are_no_text_and_unknown_text_is_not_guessed() -> None:
    """Marks of turns count no bytes. Other added tokens count those of their text, not those of their spelling."""
    tokenizer = chat_tokenizer()
    talk = turns("Why é?", "So.")
    ids = tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"]
    assert text_bytes(tokenizer, torch.tensor(ids)) == len("Why é?So.".encode())
    gemma = sentence_piece("llama")
    for ids, size in (([300, gemma.unk_token_id], None), ([300, 5000], None), ([gemma.eos_token_id], 0)):
        assert text_bytes(gemma, torch.tensor(ids)) == size
    gemma.add_tokens([AddedToken("▁▁▁", normalized=False), AddedToken("\n\n", normalized=False)])
    gemma.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    ids = gemma.convert_tokens_to_ids(["a", "▁▁▁", "\n\n", "<end_of_turn>"])
    assert text_bytes(gemma, torch.tensor(ids)) == len("a   \n\n")


def validated(rows: Any, *, micro_batch: int, eval_rows: int, loss: Any, tokenizer: Any = None) -> EvalRecord:
    """Return the record of a validation in which each batch has this loss."""
    records: list[EvalRecord] = []
    job = SimpleNamespace(
        train=SimpleNamespace(micro_batch_size=micro_batch, eval_rows=eval_rows),
        engine=SimpleNamespace(eval_loss=loss),
        validation_rows=rows,
        telemetry=SimpleNamespace(evaluation=records.append),
        text_bytes=partial(text_bytes, tokenizer) if tokenizer else lambda _: None,
    )
    _evaluate(job, 1)  # type: ignore[arg-type]
    return records[0]


def evaluated(tokens: TokenFile, tokenizer: Any, *, rows: int) -> tuple[EvalRecord, range]:
    """Return the record of a validation of `rows` rows of 64 with a loss of 3, and those rows."""
    held_out = split_rows(len(tokens), seq_len=64, validation=0.05).validation[:rows]
    reader = RowReader(tokens, seq_len=64, rows=held_out, vocabulary=2048)
    return validated(reader, micro_batch=3, eval_rows=rows, loss=lambda _: 3.0, tokenizer=tokenizer), held_out


def test_a_validation_loss_is_the_mean_over_all_counted_targets() -> None:
    """Batches of 5, 1 and 3 counted targets have the losses 5, 1 and 3."""
    targets = [torch.tensor([[7] * count + [-100] * (6 - count)]) for count in (5, 1, 3)]
    made = [Batch(torch.zeros(1, 6, dtype=torch.int64), one) for one in targets]
    rows = SimpleNamespace(validation_batches=lambda **_: iter(made))
    record = validated(rows, micro_batch=1, eval_rows=3, loss=lambda batch: float(batch.counted))
    assert record.validation_loss == (25 + 1 + 9) / 9
    assert (record.perplexity, record.bits_per_byte) == (math.exp(35 / 9), None)
    rows = SimpleNamespace(validation_batches=lambda **_: iter(made[:1]))
    assert validated(rows, micro_batch=1, eval_rows=1, loss=lambda _: 1e3).perplexity == math.inf


@pytest.mark.parametrize(("text", "rows"), [(SHIPPED, 26), (SHIPPED, 7), (MIXED, 10)], ids=["all", "some", "mixed"])
def test_bits_are_of_the_bytes_of_the_rows_evaluated(text: str, rows: int, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("builtin")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    np.array(ids, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    record, held_out = evaluated(TokenFile.open(tmp_path / "ids.bin"), tokenizer, rows=rows)
    first, last = held_out[0] * 64 + 1, (held_out[-1] + 1) * 64 + 1  # targets are one token later
    sizes = [len(token) for token in tokenizer.convert_ids_to_tokens(ids)]  # each letter stands for a byte
    assert sum(sizes) == len(text.encode())
    size = sum(sizes[first:last])
    assert record.bits_per_byte == pytest.approx(3.0 * (last - first) / math.log(2) / size, rel=1e-12)
    mean = len(text.encode()) / len(ids)
    if text is MIXED:  # the mean over the whole text would be far off
        assert abs(mean * (last - first) / size - 1) > 0.2


def test_bits_of_conversations_are_of_the_text_of_their_answers(tmp_path: Path) -> None:
    """The nats of all learned tokens, ends of turns among them, are shared by the bytes of the answers."""
    talks = [turns(*talk) for talk in CHATS * 4]
    (tmp_path / "a.jsonl").write_text(lines({"messages": talk} for talk in talks))
    record, held_out = evaluated(prepared(tmp_path / "a.jsonl"), chat_tokenizer(), rows=1)
    answer = talks[held_out[0]][-1]["content"]
    expected = 3.0 * (len(answer) + 1) / math.log(2) / len(answer)
    assert record.bits_per_byte == pytest.approx(expected, rel=1e-12)
