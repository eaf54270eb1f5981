"""Checkpoints: Hugging Face model folders with the optimizer's state beside the weights, for every layout.

    config.json, generation_config.json, tokenizer files    so AutoModelForCausalLM.from_pretrained(folder) works
    model-00001-of-00018.safetensors …                      a file for the embedding, for each layer, for the head
    optimizer-exp_avg-00001-of-00018.safetensors …          Adam's two moments, under the same tensor names,
    optimizer-exp_avg_sq-…, optimizer-master-…              and the float32 weights of a bfloat16 model
    trainer_state.json                                      step, place in the data, settings
    SHA256SUMS                                              see checkpoint_folder.py

Every tensor is written whole, and the model alone decides which file holds it. So no layout is in any file, and each
layout reads what any other wrote. The files of a pipeline stage are shared out over its tp × dp ranks, which write at
the same time, each with one file's tensors in memory. Nothing is pickled.

All ranks call the functions together; on a ValueError or OSError of one, all raise the same.
"""

import itertools
import json
import platform
import re
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

import process_group_manager as pgm
from architecture import ONLY_VALUE, lay_over, read_architecture, read_json, show
from checkpoint_folder import TRAINER_STATE, on_all_ranks, write_folder, write_tensors
from config import Config
from local_state import LocalState, place_of
from model import build_on_meta, named_parameters
from read_config import explain

RENAMED = {  # from our names to Hugging Face's, one replacement after the other
    "embedding.": "model.embed_tokens.",
    "decoder_layers.": "model.layers.",
    ".attention.out_proj.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    "final_norm.": "model.norm.",
    "final_proj.": "lm_head.",
}
INDEX = "{}.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # in a safetensors header
END_OF_TEXT = 256  # of dataset.tokenizer "bytes"
# Keys of the section `model` that change neither the shape of a tensor nor what is computed with it.
NOT_ARCHITECTURE = {"name", "initializer_range", "max_position_embeddings", "recompute"}


def hugging_face_name(name):
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return name


class TensorFile(NamedTuple):
    """One safetensors file: some tensors of one family, all of one pipeline stage."""

    family: str  # "model", or "optimizer-" and what the optimizer keeps for each weight
    name: str
    shapes: dict  # {our name: full shape}
    nbytes: int


def tensor_files(config):
    """All the safetensors files of a checkpoint of this model."""
    dtype = getattr(torch, config.dtype)
    optimizer_dtype = torch.promote_types(dtype, torch.float32)
    families = {"model": dtype, "optimizer-exp_avg": optimizer_dtype, "optimizer-exp_avg_sq": optimizer_dtype}
    if dtype != optimizer_dtype:
        families["optimizer-master"] = optimizer_dtype
    parts = {}
    for name, parameter in named_parameters(build_on_meta(config, dtype)):
        parts.setdefault(re.match(r"embedding|decoder_layers\.\d+|final", name)[0], {})[name] = parameter.shape
    files = []
    for family, dtype in families.items():
        for i, shapes in enumerate(parts.values(), start=1):
            nbytes = dtype.itemsize * sum(shape.numel() for shape in shapes.values())
            files.append(TensorFile(family, f"{family}-{i:05d}-of-{len(parts):05d}.safetensors", shapes, nbytes))
    return files


# --- saving ----------------------------------------------------------------------------------------------------------


def save_checkpoint(save_dir, model, data_parallel, optimizer, trainer_state, tokenizer=None, keep=None):
    """Writes `save_dir/step_…` for trainer_state["step"], then deletes all but the newest `keep` (None: nothing).

    `trainer_state` is what `load_checkpoint` gives back. `tokenizer`: transformers' object, None for "bytes".
    """
    local, files = LocalState(model, data_parallel, optimizer), tensor_files(model.config)
    optimizer_step = max((int(adam["step"]) for adam in optimizer.state.values()), default=0)
    trainer_state = trainer_state | {"optimizer_step": optimizer_step}
    write_folder(
        Path(save_dir, f"step_{trainer_state['step']:08d}"),
        lambda folder: write_tensor_files(folder, files, local),
        lambda folder: write_descriptions(folder, files, model.config, trainer_state, tokenizer),
        keep,
    )


def write_tensor_files(folder, files, local):
    """Writes this rank's share of its stage's files. Returns {file name: SHA-256}."""
    manager, sums, problem = pgm.process_group_manager, {}, None
    queues = [[] for _ in range(manager.dp_size * manager.tp_size)]  # one a writer, about equal in bytes
    for file in sorted(files, key=lambda file: -file.nbytes):
        here = [local.parameters[name] for name in file.shapes if name in local.parameters]
        if here and not any(getattr(parameter, "is_copy", False) for parameter in here):
            min(queues, key=lambda queue: sum(file.nbytes for file in queue)).append(file)
    # In rounds: each writer gets the tensors of one file, then all of them write at the same time.
    for one_each in itertools.zip_longest(*queues):
        mine = tensors = None  # frees the last file's
        for writer, file in enumerate(one_each):
            if file is not None:
                writer = divmod(writer, manager.tp_size)
                tensors = {hugging_face_name(name): local.gather(file.family, name, *writer) for name in file.shapes}
                if writer == (manager.dp_rank, manager.tp_rank):
                    mine = file.name, tensors
        if mine and not problem:
            try:
                sums[mine[0]] = write_tensors(folder / mine[0], mine[1])
            except OSError as error:  # raised at the end: until then other writers need pieces from here
                problem = error
    if problem:
        raise problem
    return sums


def write_descriptions(folder, files, config, trainer_state, tokenizer):
    """Everything but the tensors."""
    tokens = {"bos_token_id": None, "eos_token_id": END_OF_TEXT if config.vocab_size > END_OF_TEXT else None}
    if tokenizer is not None:
        tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        tokenizer.save_pretrained(folder)
    model_fields = ONLY_VALUE | config.model_dump(exclude={"name", "recompute"}) | tokens
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    descriptions = {
        "config.json": {"architectures": ["LlamaForCausalLM"], **model_fields},
        "generation_config.json": tokens,
        TRAINER_STATE: trainer_state | {"versions": versions},
    }
    for file in files:
        index = descriptions.setdefault(INDEX.format(file.family), {"metadata": {"total_size": 0}, "weight_map": {}})
        index["metadata"]["total_size"] += file.nbytes
        index["weight_map"].update({hugging_face_name(name): file.name for name in file.shapes})
    for name, description in descriptions.items():
        (folder / name).write_text(json.dumps(description, indent=2) + "\n")


# --- loading ---------------------------------------------------------------------------------------------------------


def read_trainer_state(path):
    return read_json(Path(path, TRAINER_STATE))


def load_checkpoint(path, model, data_parallel, optimizer):
    """Reads a checkpoint that `find_checkpoint` has verified into model and optimizer. Returns the trainer's state."""

    def load():
        check_architecture(path, model.config)
        local, files = LocalState(model, data_parallel, optimizer), tensor_files(model.config)
        for family in sorted({file.family for file in files}):
            load_family(path, family, files, local)
        state = read_trainer_state(path)
        for adam in optimizer.state.values():
            adam["step"].fill_(state["optimizer_step"])
        return state

    return on_all_ranks(load)[0]


def load_weights(path, model, data_parallel, optimizer):
    """Reads the weights, of any float type, of any Hugging Face Llama folder into a model that has not been trained."""

    def load():
        check_architecture(path, model.config, {"dtype"})
        load_family(path, "model", tensor_files(model.config), LocalState(model, data_parallel, optimizer))
        for bucket in data_parallel.buckets:
            bucket.master.copy_(bucket.values[bucket.shard])

    on_all_ranks(load)


def check_architecture(folder, config, ignored=frozenset()):
    """ValueError unless the folder's config.json describes the run's model."""
    fields = lay_over({}, read_architecture(str(folder)))
    if "dtype" not in ignored:
        fields["dtype"] = read_json(Path(folder, "config.json"))["dtype"]
    try:
        theirs = Config.model_validate({"model": fields}).model
    except ValidationError as error:
        raise ValueError("\n".join(f"{folder}: {explain(finding)}" for finding in error.errors())) from None
    keys = sorted(type(config).model_fields.keys() - NOT_ARCHITECTURE - ignored)
    if other := [key for key in keys if getattr(config, key) != getattr(theirs, key)]:
        values = ((key, show(getattr(config, key)), show(getattr(theirs, key))) for key in other)
        raise ValueError("; ".join(f"model.{key} = {ours}, but {folder} has {theirs}" for key, ours, theirs in values))


def load_family(folder, family, files, local):
    """Reads this rank's slice of each tensor. The files are mapped into memory: only that is read from the disk."""
    path_of = find_tensors(Path(folder), family, files)
    for path in sorted(set(path_of.values())):
        with safe_open(path, "pt") as file:
            for name, parameter in local.parameters.items():
                if path_of[hugging_face_name(name)] == path:
                    shard = getattr(parameter, "shard", None)
                    place = ... if shard is None else place_of(shard, pgm.process_group_manager.tp_rank)
                    piece, _, place_in_part = local.pieces[family, name]
                    piece.copy_(file.get_slice(hugging_face_name(name))[place].flatten()[place_in_part])


def find_tensors(folder, family, files):
    """{Hugging Face name: path} of a folder's tensors. ValueError unless they are the model's, no less and no more.

    But for what old folders have beside it: the rotary table of a layer, and the output matrix where it is tied.
    """
    index, single = folder / INDEX.format(family), folder / f"{family}.safetensors"
    if not index.exists() and not single.exists():
        raise ValueError(f"{folder} has neither {single.name} nor {index.name}, and no other format is read")
    shapes = {hugging_face_name(name): shape for file in files for name, shape in file.shapes.items()}
    found = {}
    weight_map = read_json(index).get("weight_map") if index.exists() else {"": single.name}
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} is damaged: its weight_map must give each tensor's file")
    for path in sorted(folder / name for name in set(weight_map.values())):
        try:
            file = safe_open(path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        with file:
            for name in file.keys():  # noqa: SIM118
                if name not in shapes:
                    if name.endswith(".rotary_emb.inv_freq") or name == hugging_face_name("final_proj.weight"):
                        continue
                    raise ValueError(f"{path} has a tensor that the model does not have: {name}")
                tensor, found[name] = file.get_slice(name), path
                if tensor.get_shape() != list(shapes[name]):
                    raise ValueError(f"{path}: {name} is {tensor.get_shape()}, in the model it is {list(shapes[name])}")
                if tensor.get_dtype() not in FLOATS:  # quantised: its numbers mean nothing without their scales
                    raise ValueError(f"{path}: {name} is {tensor.get_dtype()}, must be one of {', '.join(FLOATS)}")
    if missing := sorted(shapes.keys() - found.keys()):
        raise ValueError(f"{folder} lacks a tensor of the model: {missing[0]} ({len(missing)} missing)")
    return found
