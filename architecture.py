"""Hugging Face's config.json as the `model` section of a run: which of its fields count, and how rope is written.

A field that would change the numbers and is not supported is an error by name, never ignored.
"""

import json
import os
from typing import Any

# Fields of a Llama's config.json that cannot change a number of pre-training. One that is neither here, nor below, nor
# a key of ours, is an error: nobody knows what it would change.
NO_EFFECT = """
    architectures torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id transformers_version _name_or_path
    _commit_hash _attn_implementation _attn_implementation_autoset id2label label2id problem_type return_dict
    output_attentions output_hidden_states chunk_size_feed_forward is_encoder_decoder max_sequence_length
    is_llama_config""".split()

ONLY_VALUE = {  # fields that change numbers, with the one value that is computed here
    "model_type": "llama",
    "hidden_act": "silu",
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "rope_interleaved": False,
}


def show(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:200]


def read_json(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file, object_pairs_hook=_once_each)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # what the parser says names the line
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold an object {{...}}, it holds {show(value)}")
    return value


def _once_each(pairs: list) -> dict:
    fields = {}
    for key, value in pairs:
        if key in fields:  # the parser would take the last one, in silence
            raise ValueError(f"the key {show(key)} is there twice")
        fields[key] = value
    return fields


def read_architecture(name: str) -> dict:
    """What matters in the config.json of a folder or of a model on the hub."""
    try:
        if os.path.exists(name):
            path = os.path.join(name, "config.json") if os.path.isdir(name) else name
        else:
            from huggingface_hub import hf_hub_download

            path = hf_hub_download(name, "config.json")
        fields = {"model_type": "missing"} | read_json(path)
    except Exception as error:  # the hub's library, and what is below it, raise dozens of classes
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"model.name = {show(name)}: no config.json in such a folder or on the hub: {reason}"
        ) from None
    return {key: value for key, value in fields.items() if value is not None and key not in NO_EFFECT}


def lay_over(base: dict, layer: dict) -> dict:
    """Both models' keys, `layer` wins. rope_theta and rope_scaling (transformers 4) move into rope_parameters (5)."""
    layer = {key: value for key, value in layer.items() if key not in ONLY_VALUE or value != ONLY_VALUE[key]}
    theta = layer.pop("rope_theta", None)
    blocks = [layer.pop(key) for key in ("rope_scaling", "rope_parameters") if key in layer]
    rope, old_rope = {}, base.get("rope_parameters", {})
    if blocks:
        block = blocks[0] or blocks[-1] or "default"
        rope = dict(block) if isinstance(block, dict) else {"rope_type": block}
        if "type" in rope and rope.get("rope_type", rope["type"]) == rope["type"]:  # its name long ago
            rope["rope_type"] = rope.pop("type")
        if "rope_type" in rope:  # replaces the other, all but its theta
            old_rope = {key: value for key, value in old_rope.items() if key == "rope_theta"}
    if theta is not None:
        rope.setdefault("rope_theta", theta)  # inside the block beats beside it, as in transformers
    return base | layer | ({"rope_parameters": old_rope | rope} if rope else {})
