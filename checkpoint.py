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
import torch.distributed as dist
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

import process_group_manager as pgm
from architecture import ONLY_VALUE, lay_over, read_architecture, read_json
from checkpoint_folder import TRAINER_STATE, on_all_ranks, write_folder, write_tensors
from config import Config
from model import build_on_meta, named_parameters
from pipeline_parallel import pipeline_communicate
from read_config import explain
from tensor_parallel import shard_range

RENAMED = {  # from our names to Hugging Face's, one replacement after the other
    "embedding.": "model.embed_tokens.",
    "decoder_layers.": "model.layers.",
    ".attention.out_proj.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    "final_norm.": "model.norm.",
    "final_proj.": "lm_head.",
}
INDEX = "{}.safetensors.index.json"
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


class LocalState:
    """What this rank has: a tp shard of each parameter of its stages, and a piece of that shard's optimizer state.

    The piece is all of it, except with ZeRO-1, whose slices of the flat buckets may cut through a parameter.
    """

    def __init__(self, model, data_parallel, optimizer):
        manager, self.parameters, self.pieces = pgm.process_group_manager, dict(named_parameters(model)), {}
        names = {parameter: name for name, parameter in self.parameters.items()}
        for bucket in data_parallel.buckets:
            master, state = bucket.master, optimizer.state[bucket.master]
            flats = {f"optimizer-{key}": flat for key, flat in [("master", master), *state.items()] if key != "step"}
            mine, num_slices = (manager.dp_rank, manager.dp_size) if bucket.zero1 else (0, 1)
            for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                name, size, length = names[parameter], parameter.numel(), master.numel()
                # cuts[r]: how many elements of the parameter lie before slice r of the bucket
                cuts = [min(max(r * length - offset, 0), size) for r in range(num_slices + 1)]
                places = [slice(*ends) for ends in itertools.pairwise(cuts)]
                first = max(offset - mine * length, 0)
                for family, flat in flats.items():
                    self.pieces[family, name] = flat[first : first + cuts[mine + 1] - cuts[mine]], places, places[mine]
                self.pieces["model", name] = parameter.detach().view(-1), [slice(0, size)], slice(0, size)

    def gather(self, family, name, dp_rank, tp_rank):
        """The whole tensor, in the memory of the rank of this stage with these coordinates; None on the others."""
        manager, parameter = pgm.process_group_manager, self.parameters[name]
        piece, places, _ = self.pieces[family, name]
        part = put_together(piece, places, [parameter.numel()], dp_rank, manager.dp_ranks, manager.dp_group)
        if manager.dp_rank != dp_rank:
            return None
        part, shard = part.view(parameter.shape), getattr(parameter, "shard", None)
        if shard is not None:
            places = [place_of(shard, rank) for rank in range(manager.tp_size)]
            part = put_together(part, places, shard.full_shape, tp_rank, manager.tp_ranks, manager.tp_group)
        return part.cpu() if manager.tp_rank == tp_rank else None


def place_of(shard, tp_rank):
    """Where in the full tensor tp rank `tp_rank` has its part, as an index."""
    ends = shard_range(shard.full_shape[shard.dim], tp_rank, pgm.process_group_manager.tp_size)
    return (slice(None),) * shard.dim + (slice(*ends),)


def put_together(piece, places, shape, target, ranks, group):
    """The tensor that has the piece of the r-th of `ranks` at places[r], on the `target`-th of them; else None."""
    if len(places) == 1:
        return piece
    whole, parts, operation = None, {target: piece}, dist.isend
    if group.rank() == target:
        whole, operation = piece.new_empty(shape), dist.irecv
        whole[places[target]] = piece
        # Rows are received where they belong. Columns are no contiguous memory and come in a copy.
        parts = {rank: whole[place].contiguous() for rank, place in enumerate(places) if rank != target}
    transfers = [(operation, part, ranks[rank]) for rank, part in parts.items() if part.numel() > 0]
    for handle in pipeline_communicate(transfers, group) if transfers else []:
        handle.wait()
    for rank, part in parts.items() if whole is not None else ():
        whole[places[rank]] = part
    return whole


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
        wanted = ", ".join(f"model.{key} = {getattr(config, key)}" for key in other)
        raise ValueError(f"{wanted}, but {folder} has {', '.join(str(getattr(theirs, key)) for key in other)}")


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
    names = set(read_json(index).get("weight_map", {}).values()) if index.exists() else {single.name}
    for path in sorted(folder / name for name in names):
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
                shape, found[name] = torch.Size(file.get_slice(name).get_shape()), path
                if shape != shapes[name]:
                    raise ValueError(f"{path}: {name} is {list(shape)}, in the model it is {list(shapes[name])}")
    if missing := sorted(shapes.keys() - found.keys()):
        raise ValueError(f"{folder} lacks a tensor of the model: {missing[0]} ({len(missing)} missing)")
    return found
