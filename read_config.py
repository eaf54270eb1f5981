"""A run is one JSON file: `torchrun train.py --config configs/tiny_pp2_tp2.json training.steps=20` reads it here.

Later wins: the defaults in config.py, the config.json of `model.name`, the JSON file, `section.key=value` on the
command line. Whatever is wrong is found before any process group exists, and told all at once.
"""

import difflib
import json
import math
import os
import re
from collections.abc import Iterator
from operator import attrgetter
from types import NoneType
from typing import get_args

from pydantic import ValidationError

from architecture import ONLY_VALUE, lay_over, read_architecture, read_json, show
from config import VALID_KEYS, Config

ROPE_NEEDS = {
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
}


def requirements(config: Config) -> Iterator[tuple[bool, str]]:
    """(does it hold, what must hold) for keys that have to fit each other; `unmet` adds to each full name its value."""
    d, m, t, data = config.distributed, config.model, config.training, config.dataset
    common = math.gcd(m.num_attention_heads, m.num_key_value_heads, m.intermediate_size)
    tp_sizes = ", ".join(str(size) for size in range(1, min(common, 1024) + 1) if common % size == 0)
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        divides = getattr(m, key) % d.tp_size == 0
        yield divides, f"model.{key}: must be a multiple of distributed.tp_size; tp sizes for this model: {tp_sizes}"
    yield m.vocab_size >= d.tp_size, "model.vocab_size: must be at least distributed.tp_size"
    divides = m.num_attention_heads % m.num_key_value_heads == 0
    yield divides, "model.num_key_value_heads: must divide model.num_attention_heads"
    divides = m.head_dim is not None
    yield divides, "model.hidden_size: must be a multiple of model.num_attention_heads while model.head_dim"
    even = (m.head_dim or 0) % 2 == 0  # rotary embeddings turn pairs
    yield even, "model.head_dim: must be even; left out it is model.hidden_size / model.num_attention_heads"
    rope, needs = m.rope_parameters, ROPE_NEEDS[m.rope_parameters["rope_type"]]
    missing = ", ".join(key for key in needs if key not in rope)
    yield not missing, f"model.rope_parameters: rope_type {rope['rope_type']} needs {missing}"
    unused = ", ".join(key for key in rope if key not in ("rope_type", "rope_theta", *needs))
    yield not unused, f"model.rope_parameters: rope_type {rope['rope_type']} does not use {unused}"
    ordered = rope.get("low_freq_factor", 0) < rope.get("high_freq_factor", math.inf)
    yield ordered, "model.rope_parameters: low_freq_factor must be below high_freq_factor"
    if isinstance(d.pp_layers, list):  # how many, `distribute_layers` says, when the number of chunks is known
        total = sum(d.pp_layers)
        yield total == m.num_hidden_layers, "distributed.pp_layers: must add up to model.num_hidden_layers"
    else:
        yield d.pp_size <= m.num_hidden_layers, "distributed.pp_size: must be at most model.num_hidden_layers"
    divides = not d.sequence_parallel or t.seq_length % d.tp_size == 0
    yield divides, "training.seq_length: must be a multiple of distributed.tp_size for sequence parallelism"
    fits = t.seq_length <= m.max_position_embeddings
    yield fits, "training.seq_length: must be at most model.max_position_embeddings"
    yield t.min_learning_rate <= t.learning_rate, "training.min_learning_rate: must be at most training.learning_rate"
    yield t.warmup_steps <= t.steps, "training.warmup_steps: must be at most training.steps"
    yield (data.name is None) != (data.files is None), "dataset.name, dataset.files: give one, let the other be null"
    validates = data.validation_fraction > 0 or data.validation_files is not None
    nothing = "training.eval_frequency: no data for it with dataset.validation_fraction and dataset.validation_files"
    yield t.eval_frequency == 0 or validates, nothing
    one = data.validation_fraction == 0 or data.validation_files is None
    yield one, "dataset.validation_fraction, dataset.validation_files: give one of them"
    saves = config.checkpoint.save_dir is not None
    yield saves or not config.checkpoint.save_frequency, "checkpoint.save_frequency: no folder with checkpoint.save_dir"
    yield saves or not config.checkpoint.keep, "checkpoint.keep: no folder with checkpoint.save_dir"
    for key in ("files", "validation_files"):
        for file in getattr(data, key) or []:
            known = os.path.splitext(file)[1].lower() in (".txt", ".jsonl", ".parquet")
            yield known, f"dataset.{key}: {file} must end in .txt, .jsonl or .parquet"
            yield os.path.isfile(file), f"dataset.{key}: {file} is not a file here"


def unmet(config: Config, exempt: set[str]) -> Iterator[str]:
    """The requirements that do not hold, but for those about an `exempt` section or key."""
    key = re.compile(r"\b(?:" + "|".join(map(re.escape, VALID_KEYS)) + r")\b")
    for holds, text in requirements(config):
        about = {part for name in key.findall(text) for part in (name, name.split(".")[0])}
        if not holds and not exempt & about:
            yield key.sub(lambda match: f"{match[0]} = {show(attrgetter(match[0])(config))}", text)


NULLABLE = {
    f"{section}.{key}"
    for section, keys in Config.model_fields.items()
    for key, field in keys.annotation.model_fields.items()
    if NoneType in get_args(field.annotation)
}
RIGHT = {  # where pydantic's words, by type of error, are not those of JSON
    "bool_type": "must be true or false",
    "list_type": 'must be a list, such as ["a.txt", "b.txt"]',
    "model_type": "must be an object, such as {...}; on the command line section.key=value",
    "string_type": "must be a string",
}


def explain(error: dict) -> str:
    """One finding of pydantic as `section.key = value: what is right`."""
    name, key = ".".join(map(str, error["loc"])), error["loc"][-1]
    right = RIGHT.get(error["type"], error["msg"].replace("Input should be", "must be"))
    if name == f"model.{key}" and key in ONLY_VALUE:
        right = f"not supported, must be {show(ONLY_VALUE[key])}"
    elif error["type"] == "extra_forbidden":  # meant: this key of another section, or else the most similar name
        names = [*Config.model_fields, *VALID_KEYS]
        likely = [valid for valid in names if valid.split(".")[-1] == key]
        likely += difflib.get_close_matches(name, names, n=1, cutoff=0)
        right = f"unknown, not supported; the nearest is {likely[0]}"
    elif name in NULLABLE:
        right += ", or null"
    return f"{name} = {show(error['input'])}: {right}"


def read_override(override: str) -> dict:
    """training.steps=20 -> {"training": {"steps": 20}}; a value that is not JSON is a string."""
    name, _, value = override.partition("=")
    try:
        value = json.loads(value)
    except ValueError:
        pass
    section, dot, key = name.partition(".")
    return {section: {key: value}} if dot else {section: value}


def load_config(path: str, overrides: list[str]) -> Config:
    """The checked run; ValueError with a line for each problem."""
    is_setting = {text: bool(re.match(r"\w+(\.\w+)*=", text)) for text in overrides}
    problems = [
        f"{text}: must be section.key=value, without spaces" for text, is_one in is_setting.items() if not is_one
    ]
    given = {}
    for layer in [read_json(path), *(read_override(text) for text in overrides if is_setting[text])]:
        for section, keys in layer.items():
            base = given.get(section, {})
            if isinstance(base, dict) and isinstance(keys, dict):
                given[section] = lay_over(base, keys) if section == "model" else base | keys
            elif isinstance(base, dict):
                given[section] = keys

    exempt = set()  # sections and keys that no other key is held against: wrong ones, and
    set_here = {text.partition("=")[0] for text in overrides}
    if "training.steps" in set_here and "training.warmup_steps" not in set_here:
        exempt.add("training.steps")  # a run cut short to try it may end inside its warm-up
    model = given.get("model")
    if isinstance(model, dict) and isinstance(model.get("name"), str):
        try:
            given["model"] = lay_over(lay_over({}, read_architecture(model["name"])), model)
        except ValueError as error:
            problems.append(str(error))
            exempt.add("model")
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        for finding in error.errors():
            problems.append(explain(finding))
            section, *key = finding["loc"][:2]
            exempt.add(".".join([section, *key]))
            given[section].pop(key[0], None) if key else given.pop(section)
        config = Config.model_validate(given)  # without what is wrong, to see what else is
    problems += unmet(config, exempt)
    if problems:
        raise ValueError("\n".join(problems))
    return config
