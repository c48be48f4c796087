"""Resolution of a model name to its configuration, shape and weights, and construction of the module.

The code here is independent of the architecture; transformers provides all of them.
"""

import copy
import difflib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import one_line, read_back
from offload_trainer.config import ModelSection
from offload_trainer.model import pretrained
from offload_trainer.model.attention import repeat_keys_where_needed
from offload_trainer.model.images import Patches, auto_class, settle_class, text_alone_requires_grads
from offload_trainer.model.init_weights import initial_weights, meta_model, parameters_without_memory
from offload_trainer.model.loss import CausalLoss, adds_router_loss
from offload_trainer.model.presets import PRESETS, local_directory
from offload_trainer.model.shape import block_names, model_shape
from offload_trainer.model.tiny_model import refuse_crossing
from offload_trainer.plan.shape import ModelShape
from offload_trainer.storage.atomic_io import write_text
from offload_trainer.storage.manifest import CONFIG

BUFFERS = "buffers.safetensors"  # next to a run's config.json
# Files that exports carry along unchanged. A chat model's end-of-turn tokens and temperature are only in the first.
_BESIDE = (
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# Templates of an image-text model's processor. A run of another model writes its tokenizer's template.
_OF_PROCESSOR = ("chat_template.jinja", "chat_template.json")
_OF_WEIGHTS = {"quantization_config", "transformers_weights"}  # keys that describe a source's files, not an export's
# Names in transformers 4 for values of a rotary embedding, where they differ from other models' names ("": none), and
# all the models there whose layers have different embeddings
_OLD_NAMES: dict[str, dict[str, str]] = {
    "modernbert-decoder": {
        "rope_theta": "global_rope_theta", "rope_local_base_freq": "local_rope_theta", "rope_scaling": ""
    },
    **{kind: {} for kind in ("gemma3_text", "gemma3n_text", "olmo3")},
    **{kind: {"rope_type": "type"} for kind in ("chameleon", "olmo", "olmo2", "phi3", "phi4_multimodal")},
    **{
        kind: {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        for kind in ("gpt_neox", "gpt_neox_japanese")
    },
}  # fmt: skip
# Entries of a configuration that change nothing in a run that has begun
_NOT_COMPARED = {"_name_or_path", "architectures", "dtype", "initializer_range", "pad_token_id"}
_NOT_COMPARED |= {"transformers_version", "use_cache"}
_MOST_WEIGHTS = 10**13  # limit on parameters; a plan takes minutes to count the pages of this many


@dataclass(frozen=True)
class ModelSource:
    """A model that can be built, with its shape and the source of its weights."""

    config: Any  # transformers.PreTrainedConfig
    shape: ModelShape
    section: ModelSection
    seed: int
    directory: Path | None  # contains the tokenizer, and the weights unless they are random
    random: bool

    @property
    def identity(self) -> dict[str, Any]:
        """The part of a run's identity that the model determines. Resuming requires an equal one."""

        def compared(values: dict[str, Any]) -> dict[str, Any]:
            return {key: value for key, value in values.items() if key not in _NOT_COMPARED}

        values = json.loads(self.config.to_json_string(use_diff=False), object_hook=compared)
        weights = "random" if self.random else "the model's"
        return {"parameters": self.shape.parameters, "initial weights": weights, CONFIG: values}

    def build(
        self,
        *,
        dtype: torch.dtype,
        context: AbstractContextManager[Any] | None = None,
        reentrant: bool = False,
        offload: bool = False,
        checkpointed: int = 0,
    ) -> CausalLoss:
        """Build the module with unset parameters in `dtype` and with its buffers as transformers computes them.

        `context` surrounds the construction (DeepSpeed's zero.Init, `parameters_without_memory`). `reentrant`: torch's
        reentrant checkpointing; `offload`: transformers moves its inputs to host memory, on the compute stream;
        `checkpointed`: number of the first blocks that are checkpointed. Frozen parameters are set, and weights tied.
        """
        if torch.cuda.is_available():
            repeat_keys_where_needed()
        model = self._module(context or nullcontext(), dtype=dtype)
        model.tie_weights()
        if hasattr(model.config, "rescale_every"):
            # outside training RWKV would divide its weights in place, to avoid fp16 overflow
            model.config.rescale_every = 0
        if reentrant and checkpointed and adds_router_loss(model):
            raise UserError(
                "the routers' loss (output_router_logits) gets no gradient through the reentrant checkpointing that "
                "stock DeepSpeed needs for weights on NVMe: use --engine tiered"
            )
        for weight in self.shape.weights:
            model.get_parameter(weight.name).requires_grad_(weight.trainable)
        if self.shape.images:
            text_alone_requires_grads(model)
        if checkpointed:
            # Without a GPU the inputs are in host memory already.
            checkpoint_blocks(model, reentrant=reentrant, offload=offload and torch.cuda.is_available())
            if checkpointed < self.shape.layers:
                for name in block_names(model)[checkpointed:]:
                    model.get_submodule(name).gradient_checkpointing = False
            if reentrant:
                # The reentrant variant produces no gradients if its input needs none, as with frozen embeddings.
                model.enable_input_require_grads()
        return CausalLoss(model, chunk=self.section.loss_chunk, whole=self.shape.whole_logits)

    def _module(self, context: AbstractContextManager[Any], **words: Any) -> Any:
        config = copy.deepcopy(self.config)
        with context, no_init_weights():
            return auto_class(config).from_config(config, trust_remote_code=self.section.trust_remote_code, **words)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) for every parameter, tied ones once; random weights are fp32."""
        if self.random:
            yield from initial_weights(self.config, seed=self.seed, trust_remote_code=self.section.trust_remote_code)
            return
        with self.opened() as found:
            yield from found.weights()

    def opened(self) -> AbstractContextManager[pretrained.OpenedWeights]:
        """Open weights that are read from files, for access by name, any number of times."""
        assert self.directory is not None
        return pretrained.opened_weights(self.directory, self.meta())

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers as transformers computes them, or as they are saved with the weights."""
        model = self._module(parameters_without_memory())
        computed = dict(model.named_buffers())
        if not self.random and self.directory is not None and pretrained.persistent_buffers(model):
            with self.opened() as found:
                computed |= dict(found.each(found.buffers))
        return computed

    def meta(self) -> PreTrainedModel:
        """Return the model on the meta device."""
        return meta_model(self.config, trust_remote_code=self.section.trust_remote_code)


def checkpoint_blocks(model: PreTrainedModel, *, reentrant: bool, offload: bool = False) -> None:
    """Checkpoint each block, so that it keeps only its inputs; transformers supports `offload` from 5.17 on."""
    # The method was renamed after 5.17.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant}, **({"offload": True} if offload else {}))


def resolve_model(section: ModelSection, *, seed: int, packed: bool = False, image_patches: Patches = 0) -> ModelSource:
    """Find the model that `section.name` refers to.

    `packed` is for rows of several documents: their memory is counted, and a model in which documents would influence
    each other is refused. `image_patches`: patches of the images in each row, or "auto"; 0 if rows hold text alone.

    Raises UserError for an unknown model or configuration key, and for weights that do not fit.
    """
    directory = None if section.name in PRESETS else _directory(section)
    if directory is None:
        config = AutoConfig.for_model(**PRESETS[section.name])
    else:
        config = pretrained.config_in(directory, trust_remote_code=section.trust_remote_code)
    random = directory is None or section.random_init
    if section.overrides and not random:
        raise UserError("model.overrides changes the shape, so it needs random weights: add --scratch")
    known = set(config.to_dict())
    if unknown := [key for key in section.overrides if key not in known]:
        hints = [(key, difflib.get_close_matches(key, known, n=1)) for key in unknown]
        listing = ", ".join(f"{key}" + (f" (did you mean {near[0]}?)" if near else "") for key, near in hints)
        raise UserError(f"model.overrides: {type(config).__name__} has no {listing}")
    for key, value in section.overrides.items():
        setattr(config, key, value)
    pretrained.refuse_endless(config.to_dict(), section.name)
    images = settle_class(config, image_patches=image_patches)
    try:
        # None: transformers uses SDPA, or eager attention for a model that does not support SDPA.
        config._attn_implementation = None if section.attention == "auto" else section.attention
        model = meta_model(config, trust_remote_code=section.trust_remote_code)
    except Exception as error:  # transformers' constructors validate little, so anything may be raised
        if "Unrecognized configuration class" in str(error):
            raise UserError(
                f"--model {section.name}: transformers' auto classes build no {type(config).__name__} model that "
                "predicts tokens: build it with its own class, and give the module to offload_trainer.offload"
            ) from error
        hint = " (model.attention=auto?)" if section.attention == "sdpa" else ""
        raise UserError(f"--model {section.name}: {one_line(error)}{hint}") from error
    total = sum(parameter.numel() for parameter in model.parameters())
    if total > _MOST_WEIGHTS:
        raise UserError(
            f"--model {section.name}: its configuration makes {total:.2g} weights, and at most {_MOST_WEIGHTS:.0e} are "
            "planned: correct its vocab_size or the width of its layers"
        )
    if packed:
        refuse_crossing(model)
    notes: list[str] = []
    if directory is not None and not random:
        for name in _BESIDE:
            if (directory / name).exists():
                read_back(directory / name, dict[str, Any], links=True, fix="Correct it, or move it away")
        with pretrained.opened_weights(directory, model) as found:
            notes = found.notes
    shape = model_shape(model, section, packed=packed, image_patches=image_patches if images else 0)
    shape = replace(shape, notes=(*shape.notes, *notes))
    return ModelSource(config=config, shape=shape, section=section, seed=seed, directory=directory, random=random)


def _directory(section: ModelSection) -> Path:
    if path := local_directory(section.name):
        return path
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.txt", "*.model", "*.jinja", *([] if section.random_init else ["*.safetensors"])]
    try:
        return Path(snapshot_download(section.name, allow_patterns=wanted))
    except Exception as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise UserError(
            f"--model {section.name}: could not be downloaded{offline}: {one_line(error)}. A model here is named "
            "by its directory: --model DIRECTORY"
        ) from error


def write_config(config: Any, directory: Path, *, source: Path | None = None) -> None:
    """Write a config.json that transformers 4 and 5 and other readers understand alike.

    `source`: the model directory of `config`. Keys of its config.json whose values have not changed stay as there.
    """
    config.save_pretrained(directory)  # copies a model's own code, too
    values = _content(config)
    if source:
        before = _content(type(config).from_pretrained(source))
        given = pretrained.read_model_config(source).items()
        values |= {k: value for k, value in given if before.get(k) == values.get(k) and k not in _OF_WEIGHTS}
    write_text(directory / "config.json", json.dumps(values, indent=2, sort_keys=True) + "\n")


def _content(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(), object_hook=_with_old_keys)


def _with_old_keys(values: dict[str, Any]) -> Any:
    """Return an object of a config.json with the keys that transformers 4 and llama.cpp read, too."""
    if values.keys() == {"__float__"}:  # how transformers 5 writes infinity
        return float(values["__float__"])
    values = {key: value for key, value in values.items() if key not in _OF_WEIGHTS}
    kind, rope = values.get("model_type", ""), values.get("rope_parameters") or {}
    if "dtype" in values:
        values["torch_dtype"] = values["dtype"]
    if kind == "gpt2" and "n_positions" in values:
        values["n_ctx"] = values["n_positions"]
    full = rope.get("full_attention", rope) if kind in _OLD_NAMES else rope  # other layers have a base of their own
    if "rope_theta" not in full:
        return values
    old = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    names = _OLD_NAMES.get(kind, {})
    # Phi-3 accepts no further key in `rope_scaling`.
    elsewhere = {*old, *({"original_max_position_embeddings"} & values.keys())}
    scaling = {names.get(key, key): value for key, value in full.items() if key not in elsewhere}
    old["rope_scaling"] = scaling if list(scaling.values()) != ["default"] else None
    if "sliding_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    return values | {names.get(key, key): value for key, value in old.items() if names.get(key, key)}


def save_model_config(source: ModelSource, directory: Path, *, dtype: torch.dtype, end_of_text: int | None) -> None:
    """Write the config.json and generation_config.json that `from_pretrained` reads together with exported weights.

    For a pretrained model the latter is copied from its directory if present, as are the files of an image-text model's
    processor. Buffers that belong to the weights are saved in a separate file, from which exports read them.
    """
    config = copy.deepcopy(source.config)
    model = source.meta()
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    if source.random and end_of_text is not None:
        config.bos_token_id = config.eos_token_id = end_of_text
    write_config(config, directory, source=None if source.random else source.directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)
    if not source.random and source.directory is not None:
        reads_images = auto_class(config) is AutoModelForImageTextToText
        for name in (*_BESIDE, *(_OF_PROCESSOR if reads_images else ())):
            if (source.directory / name).is_file():
                shutil.copyfile(source.directory / name, directory / name)
    if kept := pretrained.persistent_buffers(model):
        held = source.buffers()
        save_file({name: held[name].contiguous() for name in kept}, directory / BUFFERS)
