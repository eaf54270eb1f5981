"""Every check of read_config.py fails on one wrong input and says what is right; every key can be set."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import process_group_manager as pgm
from config import VALID_KEYS
from read_config import load_config

ROOT = Path(__file__).parent.parent
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def write(tmp_path):
    """Writes a JSON file and returns its path."""

    def write(content, name="run.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


@pytest.fixture
def load(write):
    """load(*overrides) over an empty file."""
    return lambda *overrides: load_config(write({}), list(overrides))


@pytest.fixture
def problems(load):
    """problems(*overrides): the lines of the error."""

    def problems(*overrides):
        with pytest.raises(ValueError) as error:
            load(*overrides)
        return str(error.value).split("\n")

    return problems


def test_defaults_are_those_of_llama_config(load):
    """So that a config.json that leaves a field out means the same model. Copied from transformers' LlamaConfig()."""
    assert load().model.model_dump(exclude={"name", "dtype", "recompute"}) == {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "initializer_range": 0.02,
    }


# A value other than the default for each key, in a run that is right as a whole.
OTHER_VALUES = {
    "distributed.tp_size": 2,
    "distributed.pp_size": 3,
    "distributed.dp_size": None,
    "distributed.pp_engine": "zb_v",
    "distributed.pp_chunks": 2,
    "distributed.zero1": True,
    "distributed.sequence_parallel": True,
    "distributed.pp_layers": [3, 0, 2],
    "distributed.device": "cpu",
    "distributed.timeout_seconds": 5,
    "model.name": "here",
    "model.hidden_size": 64,
    "model.num_hidden_layers": 5,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 4,
    "model.head_dim": 10,
    "model.intermediate_size": 96,
    "model.vocab_size": 257,
    "model.max_position_embeddings": 99,
    "model.rms_norm_eps": 1e-5,
    "model.rope_theta": 7,
    "model.rope_scaling": {"type": "linear", "factor": 2},
    "model.tie_word_embeddings": True,
    "model.attention_bias": True,
    "model.initializer_range": 0.5,
    "model.dtype": "float64",
    "model.recompute": 2,
    "training.seed": 0,
    "training.steps": 7,
    "training.max_tokens": 1,
    "training.seq_length": 98,
    "training.micro_batch_size": 3,
    "training.gradient_accumulation_steps": 5,
    "training.learning_rate": 1,
    "training.min_learning_rate": 0.5,
    "training.warmup_steps": 7,
    "training.weight_decay": 0,
    "training.adam_beta1": 0,
    "training.adam_beta2": 0.5,
    "training.adam_eps": 1e-5,
    "training.grad_clip": None,
    "training.eval_frequency": 3,
    "training.max_bad_steps": 1,
    "training.eval_steps": 2,
    "dataset.name": None,
    "dataset.files": ["a.txt", "b.jsonl", "c.parquet"],
    "dataset.subset_name": "some",
    "dataset.split": "test",
    "dataset.validation_fraction": 0.5,
    "dataset.text_column": "story",
    "dataset.tokenizer": "folder",
    "dataset.shuffle": False,
    "dataset.num_proc": 2,
    "dataset.cache_dir": "elsewhere",
    "logging.log_frequency": 10,
    "logging.use_wandb": True,
    "logging.project_name": "mine",
    "logging.run_name": "first",
    "logging.metrics_file": "metrics.jsonl",
    "logging.show_transfers": True,
    "logging.trace_file": "trace.json",
    "logging.trace_step": 3,
    "checkpoint.save_dir": "checkpoints",
    "checkpoint.save_frequency": 5,
    "checkpoint.keep": 2,
    "checkpoint.resume": "none",
    "checkpoint.init_from": "elsewhere",
}


def test_the_home_folder(load, monkeypatch):
    monkeypatch.setenv("HOME", "/elsewhere")
    config = load("checkpoint.save_dir=~/saved", "dataset.cache_dir=~/cache", "logging.metrics_file=~/m.jsonl")
    assert config.checkpoint.save_dir == "/elsewhere/saved"
    assert config.dataset.cache_dir == "/elsewhere/cache" and config.logging.metrics_file == "/elsewhere/m.jsonl"


@pytest.mark.parametrize("way", ["file", "command line"])
def test_every_key_can_be_set(way, load, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write({"model_type": "llama"}, "here/config.json")
    for file in OTHER_VALUES["dataset.files"]:
        write("", file)
    # rope_parameters stands here in its older form, and validation_files excludes validation_fraction
    assert set(OTHER_VALUES) == set(VALID_KEYS) - {"model.rope_parameters", "dataset.validation_files"}
    if way == "command line":
        config = load(*(f"{name}={json.dumps(value)}" for name, value in OTHER_VALUES.items()))
    else:
        sections = {}
        for name, value in OTHER_VALUES.items():
            section, key = name.split(".")
            sections.setdefault(section, {})[key] = value
        config = load_config(write(sections), [])
    standard = load()
    for name, value in OTHER_VALUES.items():
        if name not in ("model.rope_theta", "model.rope_scaling"):
            section, key = name.split(".")
            assert getattr(getattr(config, section), key) == value
            assert getattr(getattr(standard, section), key) != value
    assert config.model.rope_parameters == {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}
    pgm.check_world_size(config, 12)
    assert (config.global_batch_size, config.tokens_per_step) == (3 * 5 * 2, 3 * 5 * 2 * 98)


def test_later_wins(write):
    path = write({"training": {"steps": 10, "seq_length": 64}, "dataset": {"split": "test"}})
    config = load_config(path, ["training.steps=20", "training.steps=30", "dataset.split=null-ish"])
    assert (config.training.steps, config.training.seq_length, config.dataset.split) == (30, 64, "null-ish")
    assert config.training.micro_batch_size == 1


def test_override_value_is_json_or_else_a_string(load):
    config = load(
        "training.grad_clip=null",
        "distributed.pp_layers=[20, 12]",
        "distributed.pp_size=2",
        "logging.run_name=a=b",
        'logging.metrics_file="7"',
        "logging.use_wandb=true",
    )
    assert config.training.grad_clip is None and config.distributed.pp_layers == [20, 12]
    assert (config.logging.run_name, config.logging.metrics_file, config.logging.use_wandb) == ("a=b", "7", True)


@pytest.mark.parametrize(
    "override, expected",
    [
        # names
        ("training.gradient_acumulation_steps=8", "= 8: unknown, .*nearest is training.gradient_accumulation_steps"),
        ("model.seq_length=8", "model.seq_length = 8: unknown, .*nearest is training.seq_length"),
        ("trainin.steps=8", 'trainin = {"steps": 8}: unknown, .*nearest is training$'),
        ("steps=8", "steps = 8: unknown, .*nearest is training.steps"),
        ("training.steps", "training.steps: must be section.key=value, without spaces"),
        ("training.steps = 3", "training.steps = 3: must be section.key=value, without spaces"),
        ("=2", "=2: must be section.key=value"),
        ("training=8", "training = 8: must be an object, .*; on the command line section.key=value"),
        # types and ranges
        ('training.steps="2"', 'training.steps = "2": must be a valid integer'),
        ("training.steps=true", "training.steps = true: must be a valid integer"),
        ("training.steps=2.0", "training.steps = 2.0: must be a valid integer"),
        ("training.steps=null", "training.steps = null: must be a valid integer"),
        ("training.steps=0", "training.steps = 0: must be greater than 0"),
        ("training.learning_rate=true", "training.learning_rate = true: must be a valid number"),
        ("training.learning_rate=NaN", "training.learning_rate = NaN: must be a finite number"),
        ("training.weight_decay=Infinity", "training.weight_decay = Infinity: must be a finite number"),
        ("training.weight_decay=-1", "training.weight_decay = -1: must be greater than or equal to 0"),
        ("training.adam_beta2=1", "training.adam_beta2 = 1: must be less than 1"),
        ("training.grad_clip=0", "training.grad_clip = 0: must be greater than 0, or null"),
        ("training.max_tokens=None", 'training.max_tokens = "None": must be a valid integer, or null'),
        ("training.max_tokens=0", "training.max_tokens = 0: must be greater than 0"),
        ("training.seed=-1", "training.seed = -1: must be greater than or equal to 0"),
        ("distributed.tp_size=0", "distributed.tp_size = 0: must be greater than 0"),
        ("model.vocab_size=99999999999999999999999", "vocab_size = 9+: must be less than 2147483648"),
        ("distributed.device=tpu", "distributed.device = \"tpu\": must be 'auto', 'cpu' or 'cuda'"),
        ("distributed.timeout_seconds=0", "distributed.timeout_seconds = 0: must be greater than or equal to 1"),
        ("distributed.pp_layers=3", "distributed.pp_layers = 3: must be 'balanced' or a list of layer counts"),
        ("distributed.pp_layers=even", "distributed.pp_layers = \"even\": must be 'balanced' or a list"),
        (
            "distributed.pp_layers=[33, -1]",
            r"pp_layers = \[33, -1\]: .* list of layer counts, each at least 0, or null$",
        ),
        ("distributed.pp_layers=[31, null]", r"pp_layers = \[31, null\]: .* each at least 0, or null$"),
        ("model.dtype=float16", "model.dtype = \"float16\": must be 'float32', 'float64' or 'bfloat16'"),
        ("model.attention_bias=1", "model.attention_bias = 1: must be true or false"),
        ("dataset.num_proc=0", "dataset.num_proc = 0: must be greater than 0"),
        ("dataset.files=a.txt", r'dataset.files = "a.txt": must be a list, such as \["a.txt", "b.txt"\], or null$'),
        ("dataset.files=[]", r"dataset.files = \[\]: List should have at least 1 item"),
        ("logging.log_frequency=0", "logging.log_frequency = 0: must be greater than 0"),
        # model fields that are not supported
        ("model.model_type=mistral", 'model.model_type = "mistral": not supported, must be "llama"'),
        ("model.hidden_act=gelu", 'model.hidden_act = "gelu": not supported, must be "silu"'),
        ("model.mlp_bias=true", "model.mlp_bias = true: not supported, must be false"),
        ("model.attention_dropout=0.1", "model.attention_dropout = 0.1: not supported, must be 0.0"),
        ("model.pretraining_tp=2", "model.pretraining_tp = 2: not supported, must be 1"),
        ("model.rope_interleaved=true", "model.rope_interleaved = true: not supported, must be false"),
        ("model.sliding_window=8", "model.sliding_window = 8: unknown, not supported"),
        ("model.torch_dtype=bfloat16", 'model.torch_dtype = "bfloat16": unknown, .*nearest is model.dtype'),
        # rotary embeddings
        ('model.rope_scaling={"type":"yarn"}', "rope_type = \"yarn\": must be 'default', 'linear' or 'llama3'"),
        ("model.rope_scaling=[2]", r"rope_type = \[2\]: must be 'default', 'linear' or 'llama3'"),
        ('model.rope_scaling={"type":"linear","rope_type":"llama3"}', "model.rope_parameters.type = .*: unknown"),
        ('model.rope_scaling={"type":"linear"}', "model.rope_parameters = .*: rope_type linear needs factor"),
        ('model.rope_parameters={"factor":2}', "rope_type default does not use factor"),
        (
            'model.rope_parameters={"rope_type":"llama3","factor":8,"high_freq_factor":4}',
            "llama3 needs low_freq_factor",
        ),
        ('model.rope_parameters={"partial_rotary_factor":0.5}', "partial_rotary_factor = 0.5: unknown"),
        (f"model.rope_scaling={json.dumps(LLAMA3 | {'factor': 0})}", "factor = 0: must be greater than 0"),
        (f"model.rope_scaling={json.dumps(LLAMA3 | {'low_freq_factor': 4})}", "must be below high_freq_factor"),
        ("model.rope_theta=0", "model.rope_parameters.rope_theta = 0: must be greater than 0"),
        # keys that have to fit each other
        ("model.num_key_value_heads=5", "model.num_key_value_heads = 5: must divide model.num_attention_heads = 32"),
        (
            "model.hidden_size=100",
            "hidden_size = 100: .* multiple of model.num_attention_heads = 32 while .*head_dim = null",
        ),
        ("model.head_dim=7", "model.head_dim = 7: must be even"),
        ("model.hidden_size=96", "model.head_dim = 3: must be even; .*model.hidden_size = 96 .*heads = 32"),
        ("distributed.pp_size=33", "distributed.pp_size = 33: must be at most model.num_hidden_layers = 32"),
        ("checkpoint.keep=2", "checkpoint.keep = 2: no folder with checkpoint.save_dir = null"),
        (
            "training.eval_frequency=5",
            "training.eval_frequency = 5: no data for it with dataset.validation_fraction = 0.0",
        ),
        ("distributed.pp_layers=[31]", r"distributed.pp_layers = \[31\]: .*add up to model.num_hidden_layers = 32"),
        ("training.seq_length=2049", "seq_length = 2049: must be at most model.max_position_embeddings = 2048"),
        ("training.min_learning_rate=1", "min_learning_rate = 1.0: .*at most training.learning_rate = 0.0003"),
        ("training.warmup_steps=1001", "training.warmup_steps = 1001: must be at most training.steps = 1000"),
        ("dataset.name=null", "dataset.name = null, dataset.files = null: give one"),
        ('dataset.files=["none.txt"]', r"dataset.files = \[\"none.txt\"\]: none.txt is not a file"),
    ],
)
def test_one_wrong_value_is_one_line(override, expected, problems):
    (problem,) = problems(override)
    assert re.search(expected, problem), problem


@pytest.mark.parametrize("value", ['"7x"', "0", "true", "null", "1.5", "[1]"])
def test_a_key_of_two_forms_tells_both_in_one_line(problems, value):
    right = "must be 'none', 'layer' or an integer greater than 0"
    assert problems(f"model.recompute={value}") == [f"model.recompute = {value}: {right}"]


def test_tp_size_that_does_not_divide_names_those_that_do(problems):
    sizes = ["model.num_attention_heads=12", "model.num_key_value_heads=4", "model.intermediate_size=132"]
    assert problems("distributed.tp_size=8", "model.hidden_size=96", *sizes) == [
        f"model.{field}: must be a multiple of distributed.tp_size = 8; tp sizes for this model: 1, 2, 4"
        for field in ("num_attention_heads = 12", "num_key_value_heads = 4", "intermediate_size = 132")
    ]


def test_a_vocabulary_smaller_than_tp(problems):
    expected = "model.vocab_size = 31: must be at least distributed.tp_size = 32"
    assert problems("distributed.tp_size=32", "model.vocab_size=31") == [expected]


def test_num_key_value_heads_left_out_is_num_attention_heads(load):
    assert load("model.num_attention_heads=8").model.num_key_value_heads == 8
    assert load("model.num_attention_heads=8", "model.num_key_value_heads=null").model.num_key_value_heads == 8


def test_vocabulary_need_not_divide_and_head_dim_frees_hidden_size(load):
    config = load("distributed.tp_size=2", "model.vocab_size=257", "model.hidden_size=100", "model.head_dim=8")
    assert (config.model.hidden_size, config.model.head_dim) == (100, 8)


def test_stages_may_be_empty_where_pp_layers_says_so(load):
    layers = ["distributed.pp_size=3", "distributed.pp_layers=[0, 2, 0]", "model.num_hidden_layers=2"]
    assert load(*layers).distributed.pp_layers == [0, 2, 0]


def test_all_problems_are_told_at_once(write):
    wrong = {"training": {"stepz": 3, "seq_length": 4096}, "distributed": {"tp_size": 3}, "extra": {}}
    with pytest.raises(ValueError) as error:
        load_config(write(wrong), ["model.hidden_size=wide", "logging"])
    assert [line.split(":")[0] for line in str(error.value).split("\n")] == [
        "logging",
        'model.hidden_size = "wide"',
        "training.stepz = 3",
        "extra = {}",
        "model.num_attention_heads = 32",
        "model.num_key_value_heads = 32",
        "model.intermediate_size = 11008",
        "training.seq_length = 4096",
    ]


def test_wrong_key_is_not_held_against_others(problems):
    (problem,) = problems("model.num_attention_heads=x", "model.num_key_value_heads=3")
    assert problem.startswith('model.num_attention_heads = "x"')


def test_run_cut_short_on_the_command_line_may_end_in_its_warmup(write):
    path = write({"training": {"steps": 100, "warmup_steps": 10}})
    assert load_config(path, ["training.steps=3"]).training.steps == 3
    with pytest.raises(ValueError, match="warmup_steps = 9: must be at most training.steps = 3"):
        load_config(path, ["training.steps=3", "training.warmup_steps=9"])
    with pytest.raises(ValueError, match="warmup_steps = 10: must be at most training.steps = 3"):
        load_config(write({"training": {"steps": 3, "warmup_steps": 10}}), [])


def test_dataset_name_and_files(write, load, problems, tmp_path):
    files = f"dataset.files={json.dumps([write('text', 'A.TXT')])}"
    assert load().dataset.name == "python-stdlib"
    assert load(files).dataset.name is None
    assert load("dataset.name=null", files).dataset.files == [str(tmp_path / "A.TXT")]
    (problem,) = problems("dataset.name=python-stdlib", files)
    assert problem.startswith('dataset.name = "python-stdlib", dataset.files = [') and "give one" in problem
    other = write("text", "a.csv")
    (problem,) = problems(f"dataset.files={json.dumps([other])}")
    assert f"{other} must end in .txt, .jsonl or .parquet" in problem


@pytest.mark.parametrize(
    "content, expected",
    [
        ('{\n"training": {\n"steps": 1\n"seed": 2}}', "Expecting ',' delimiter: line 4 column 1"),
        ("not JSON", "cannot be read as JSON: Expecting value: line 1"),
        ('{"training": {"steps": 1, "seed": 2, "steps": 3}}', 'the key "steps" is there twice'),
        ('{"training":' + "[" * 100_000, "cannot be read as JSON: .*recursion"),
        ("[]", r"must hold an object .* it holds \[\]"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_unreadable_file(content, expected, write, tmp_path):
    path = str(tmp_path / "missing.json") if content is None else write(content)
    with pytest.raises(ValueError, match=re.escape(path) + ".*" + expected):
        load_config(path, [])


HUB_CONFIG = {  # as transformers 4 writes it
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3,
    "sliding_window": None,
    "eos_token_id": [1, 2],
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0",
}
IN_FORM_5 = {k: v for k, v in HUB_CONFIG.items() if not k.startswith("rope")} | {
    "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}
}


@pytest.mark.parametrize("fields", [HUB_CONFIG, IN_FORM_5], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize(
    "overrides, rope",
    [
        ([], LLAMA3 | {"rope_theta": 500000.0}),
        (["model.rope_theta=7"], LLAMA3 | {"rope_theta": 7.0}),
        (["model.rope_scaling=null"], {"rope_type": "default", "rope_theta": 500000.0}),
        (["model.rope_parameters=null", "model.rope_theta=7"], {"rope_type": "default", "rope_theta": 7.0}),
        (["model.rope_theta=7", "model.rope_parameters=null"], {"rope_type": "default", "rope_theta": 7.0}),
        (
            ['model.rope_scaling={"type":"linear","factor":2}'],
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0},
        ),
        (
            ['model.rope_parameters={"rope_type":"linear","factor":2,"rope_theta":9}'],
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0},
        ),
        (['model.rope_parameters={"factor":16}'], LLAMA3 | {"factor": 16.0, "rope_theta": 500000.0}),
    ],
)
def test_architecture_of_a_folder_and_what_is_laid_over_it(fields, overrides, rope, write, load):
    folder = os.path.dirname(write(fields, "llama/config.json"))
    model = load(f"model.name={folder}", "model.hidden_size=96", *overrides).model
    assert model.rope_parameters == rope
    assert (model.hidden_size, model.num_attention_heads, model.num_key_value_heads, model.head_dim) == (96, 4, 2, 24)
    assert (model.rms_norm_eps, model.vocab_size, model.dtype) == (1e-5, 32000, "float32")


@pytest.mark.parametrize(
    "fields, rope",
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 7, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 7.0}),
        ({"rope_scaling": None, "rope_parameters": LLAMA3}, LLAMA3 | {"rope_theta": 10000.0}),
        ({"rope_theta": 7, "rope_parameters": LLAMA3 | {"rope_theta": 9}}, LLAMA3 | {"rope_theta": 9.0}),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
        ),
    ],
)
def test_rope_forms_in_one_file_are_read_as_transformers_reads_them(fields, rope, write):
    assert load_config(write({"model": fields}), []).model.rope_parameters == rope


@pytest.mark.parametrize(
    "field, value, expected",
    [
        ("model_type", "mistral", 'model.model_type = "mistral": not supported, must be "llama"'),
        ("mlp_bias", True, "model.mlp_bias = true: not supported"),
        ("sliding_window", 4096, "model.sliding_window = 4096: unknown, not supported"),
        ("num_local_experts", 8, "model.num_local_experts = 8: unknown, not supported"),
        ("quantization_config", {"bits": 4}, 'model.quantization_config = {"bits": 4}: unknown, not supported'),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, 'model.rope_parameters.rope_type = "dynamic"'),
        ("vocab_size", "big", 'model.vocab_size = "big": must be a valid integer'),
    ],
)
def test_architecture_that_is_not_supported(field, value, expected, write, problems):
    path = write(HUB_CONFIG | {field: value}, "llama/config.json")  # the file itself may be named as well
    assert problems(f"model.name={path}")[0].startswith(expected)


def test_architecture_without_model_type_is_refused(write, problems):
    path = write({"hidden_size": 64}, "other/config.json")
    assert problems(f"model.name={path}")[0].startswith('model.model_type = "missing"')


def test_architecture_that_cannot_be_had(tmp_path, problems):
    (problem,) = problems(f"model.name={tmp_path}", "distributed.tp_size=5")
    assert problem.startswith(f'model.name = "{tmp_path}": no config.json') and "No such file" in problem
    (problem,) = problems("model.name=not/a/name")
    assert problem.startswith('model.name = "not/a/name": no config.json')


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_config_files_load(path):
    config = load_config(str(path), [])
    d = config.distributed
    pgm.check_world_size(config, d.tp_size * d.pp_size * d.dp_size)
    assert load_config(str(path), ["training.steps=1", "training.seq_length=128"]).tokens_per_step > 0


def test_tiny_config_and_its_single_process_twin_are_the_same_training():
    tiny, twin = (load_config(str(ROOT / "configs" / name), []) for name in ("tiny_pp2_tp2.json", "tiny_1gpu.json"))
    assert (tiny.model, tiny.training, tiny.dataset) == (twin.model, twin.training, twin.dataset)
    assert tiny.global_batch_size == twin.global_batch_size


def test_llama_1b_has_1_1_billion_parameters():
    for name in ("llama_1b_pp4_tp2.json", "llama_1b_tinystories.json"):
        m = load_config(str(ROOT / "configs" / name), []).model
        attention = 2 * m.hidden_size * m.head_dim * (m.num_attention_heads + m.num_key_value_heads)
        layer = attention + 3 * m.hidden_size * m.intermediate_size + 2 * m.hidden_size
        assert m.num_hidden_layers * layer + 2 * m.vocab_size * m.hidden_size + m.hidden_size == 1_100_048_384


def test_world_size(load, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="^world size 3 != tp 1 × pp 2 × dp 1 = 2; start as many processes"):
        pgm.check_world_size(load("distributed.pp_size=2"), 3)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "my run.json"])
    for not_torchrun in (1, None):
        with pytest.raises(ValueError) as error:
            pgm.check_world_size(load("distributed.pp_size=2"), not_torchrun)
        assert str(error.value) == (
            "world size 1 != tp 1 × pp 2 × dp 1 = 2; type: torchrun --nproc_per_node 2 train.py --config 'my run.json'"
        )
        pgm.check_world_size(load(), not_torchrun)


def test_dp_size_of_null_is_what_is_left(load, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    for world_size, dp_size in ((4, 1), (8, 2), (12, 3)):
        config = load("distributed.tp_size=2", "distributed.pp_size=2", "distributed.dp_size=null")
        pgm.check_world_size(config, world_size)
        assert (config.distributed.dp_size, config.global_batch_size) == (dp_size, dp_size)
    for world_size, grid in ((3, "tp 2 × pp 2 × dp 1 = 4"), (9, "tp 2 × pp 2 × dp 2 = 8")):
        config = load("distributed.tp_size=2", "distributed.pp_size=2", "distributed.dp_size=null")
        with pytest.raises(ValueError, match=f"world size {world_size} != {grid}"):
            pgm.check_world_size(config, world_size)


def stop_in_a_process(local_rank, patience):
    environment = {key: value for key, value in os.environ.items() if key != "LOCAL_RANK"}
    if local_rank is not None:
        environment["LOCAL_RANK"] = local_rank
    return subprocess.Popen(
        [sys.executable, "-c", f"import failure; failure.stop(ValueError('one\\ntwo'), {patience})"],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_stop_prints_on_local_rank_0_and_the_others_wait():
    speaker, plain, silent, alone = (
        stop_in_a_process(*arguments) for arguments in (("0", 60), (None, 60), ("1", 60), ("1", 0.01))
    )
    for process in (speaker, plain, alone):  # alone: nobody ended it, so it speaks for itself
        assert process.communicate(timeout=30)[1] == "error: one\n       two\n"
        assert process.returncode == 2
    with pytest.raises(subprocess.TimeoutExpired):
        silent.communicate(timeout=1)
    silent.kill()
    assert silent.communicate()[1] == ""


def test_nothing_heavy_is_imported():
    """Eight ranks share two cores at start."""
    code = "import read_config, sys; print({'torch', 'transformers', 'huggingface_hub', 'wandb'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "set()\n"
