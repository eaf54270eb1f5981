"""Checkpoints: what one layout saves, every other resumes; transformers reads them; nothing broken is ever loaded."""

import contextlib
import io
import json
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock
from safetensors.torch import load_file, save_file

import process_group_manager as pgm
from checkpoint import hugging_face_name, load_checkpoint, load_weights, read_trainer_state, save_checkpoint
from checkpoint_folder import find_checkpoint, lock_save_dir, verify_checkpoint
from config import ModelConfig
from data_parallel import DataParallelBucket
from layouts import MICRO_BATCH_SIZE, SEQ_LENGTH, RandomMicroBatches, tiny_config
from model import build_on_meta, materialize
from pipeline_parallel import PipelineParallel, train_step_pipeline
from tensor_parallel import apply_tensor_parallel

LAYOUTS = {
    "tp1_pp1_dp1": dict(),
    "tp2": dict(tp=2),
    "pp2": dict(pp=2),
    "dp2_zero1": dict(dp=2, zero1=True),
    "tp2_pp2": dict(tp=2, pp=2),
    "tp2_dp2_zero1": dict(tp=2, dp=2, zero1=True),
    "interleaved_pp2": dict(pp=2, engine="interleaved_1f1b", chunks=2),
    "zb_v_pp2": dict(pp=2, engine="zb_v", chunks=2),
}
GLOBAL_MICROBATCHES = 2
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
MODELS = {  # the vocabulary of 61 is not even over tp
    "untied": dict(dtype="float64"),
    "tied": dict(dtype="float64", tie_word_embeddings=True, attention_bias=True, rope_parameters=LLAMA3),
    "bfloat16": dict(dtype="bfloat16"),
}


def model_config(model="untied", **changes):
    return ModelConfig(**{**vars(tiny_config()), **MODELS[model], **changes})


def world_size(layout):
    return layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1)


# --- in the workers --------------------------------------------------------------------------------------------------


def set_up(layout):
    return pgm.setup_process_group_manager(layout.get("tp", 1), layout.get("pp", 1), layout.get("dp", 1))


class Run:
    """One rank of a training run, started from scratch."""

    def __init__(self, layout, config):
        dtype = getattr(torch, config.dtype)
        model = apply_tensor_parallel(build_on_meta(config, dtype))
        self.model = PipelineParallel(model, layout.get("engine", "1f1b"), layout.get("chunks", 1))
        materialize(self.model, config, seed=1, device=torch.device("cpu"))
        self.data_parallel = DataParallelBucket(self.model, layout.get("zero1", False), bucket_elements=1000)
        self.optimizer = self.data_parallel.optimizer(weight_decay=0.1, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
        self.parts = self.model, self.data_parallel, self.optimizer
        manager = pgm.process_group_manager
        # Every layout sees the same global batch.
        microbatches = GLOBAL_MICROBATCHES // manager.dp_size
        self.data_loader = RandomMicroBatches(config.vocab_size, microbatches, manager.dp_rank, manager.dp_size)

    def train(self, steps):
        """Losses and norms of these steps."""
        config, result = self.model.config, []
        shapes, dtype = (MICRO_BATCH_SIZE, SEQ_LENGTH, config.hidden_size), getattr(torch, config.dtype)
        for step in steps:
            self.data_loader.step = step
            self.data_parallel.zero_grad()
            loss = train_step_pipeline(self.model, self.data_loader, shapes, torch.device("cpu"), dtype)
            self.data_parallel.finish_grad_sync()
            norm = self.data_parallel.clip_gradients(1.0)
            self.optimizer.step()
            self.data_parallel.publish()
            result.append((loss.item(), norm.item()))
        return result

    def save(self, save_dir, step, **options):
        save_checkpoint(save_dir, *self.parts, {"step": step, "tokens": 7 * step}, **options)


def train_save_train(layout, config, save_dir):
    set_up(layout)
    run = Run(layout, config)
    run.train(range(2))
    run.save(save_dir, 2)
    return run.train(range(2, 4))


def resume_each(layout, saved, again):
    """Per checkpoint: the next two steps' losses and norms. Before them it is saved a second time, below `again`."""
    set_up(layout)
    results = {}
    for name, (config, save_dir) in saved.items():
        run = Run(layout, config)
        path = find_checkpoint("auto", save_dir)
        state = load_checkpoint(path, *run.parts)
        assert (state["step"], state["tokens"]) == (2, 14)
        save_checkpoint(Path(again, name), *run.parts, {"step": state["step"], "tokens": state["tokens"]})
        results[name] = run.train(range(2, 4))
    return results


def save_steps(layout, config, save_dir, steps, options):
    """One step of training before each save; the lists of `save_dir` after each."""
    set_up(layout)
    run, contents = Run(layout, config), []
    for step in steps:
        run.train([step])
        run.save(save_dir, step, **options)
        contents.append(sorted(path.name for path in Path(save_dir).iterdir()))
    return contents


def error_of(function, *arguments):
    """The error's type and text; on success None and the result."""
    try:
        return None, function(*arguments)
    except (OSError, ValueError) as error:
        return type(error).__name__, str(error)


def try_to_load(layout, config, load, path):
    set_up(layout)
    run = Run(layout, config)
    return error_of(load, path, *run.parts)[:2]


def load_and_train(layout, config, path):
    set_up(layout)
    run = Run(layout, config)
    load_weights(path, *run.parts)
    return run.train(range(2))


def try_to_find(resume, save_dir):
    set_up({"tp": dist.get_world_size()})
    with contextlib.redirect_stdout(io.StringIO()) as output:
        result = error_of(find_checkpoint, resume, save_dir)
    return result, output.getvalue().splitlines()


def save_with_little_space(layout, config, save_dir, poor_rank):
    """Step 1 is saved, step 2 when no file of `poor_rank` may grow beyond 8 KiB, and again when it may."""
    set_up(layout)
    run = Run(layout, config)
    run.save(save_dir, 1)
    if dist.get_rank() == poor_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    try:
        error = error_of(run.save, save_dir, 2)
        dist.barrier()
        names = sorted(path.name for path in Path(save_dir).iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    run.save(save_dir, 2)
    return error, names


def save_below(layout, config, save_dir):
    set_up(layout)
    return error_of(Run(layout, config).save, save_dir, 1), error_of(lock_save_dir, save_dir)


def try_to_lock(save_dir):
    set_up({"tp": dist.get_world_size()})
    kind, result = error_of(lock_save_dir, save_dir)
    return kind, result if kind else None


def try_to_lock_another(folder):
    set_up({"tp": dist.get_world_size()})
    own = Path(folder, str(dist.get_rank()))
    own.mkdir()
    (own / ".lock").touch()  # of a run of its own, once
    return error_of(lock_save_dir, own)


def logits_of(config, path, tokens):
    set_up({})
    run = Run({}, config)
    load_checkpoint(path, *run.parts)
    return run.model(tokens).detach()


# --- layouts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """{name: (model, layout, save_dir, what came after)} of runs that saved after step 2 and went on to step 4."""
    runs = [("untied", layout) for layout in LAYOUTS if layout != "tp2_dp2_zero1"]
    runs += [("tied", "tp2_pp2"), ("tied", "zb_v_pp2"), ("bfloat16", "tp2_dp2_zero1")]
    result = {}
    for model, layout in runs:
        name = f"{model}_{layout}"
        save_dir = tmp_path_factory.mktemp(name)
        after = pool.run(world_size(LAYOUTS[layout]), train_save_train, LAYOUTS[layout], model_config(model), save_dir)
        assert all(of_rank == after[0] for of_rank in after)
        result[name] = SimpleNamespace(model=model, layout=layout, save_dir=save_dir, after=after[0])
    return result


def sums_of(save_dir):
    (path,) = Path(save_dir).glob("step_*")
    return (path / "SHA256SUMS").read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resumes_what_every_layout_saved(layout, saved, pool, tmp_path):
    checkpoints = {name: (model_config(run.model), run.save_dir) for name, run in saved.items()}
    resumed = pool.run(world_size(LAYOUTS[layout]), resume_each, LAYOUTS[layout], checkpoints, tmp_path)
    for name, run in saved.items():
        assert sums_of(tmp_path / name) == sums_of(run.save_dir), f"{name} saved again is not the same"
        after = [result[name] for result in resumed]
        if run.layout == layout:
            assert all(of_rank == run.after for of_rank in after)
        elif run.model != "bfloat16":  # whose sums round differently on another layout
            for of_rank in after:
                torch.testing.assert_close(torch.tensor(of_rank), torch.tensor(run.after), rtol=1e-12, atol=0)


def test_files_and_keys_do_not_depend_on_the_layout(saved):
    def contents(run):
        (folder,) = run.save_dir.glob("step_*")
        shards = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
        others = {path.name: path.read_text() for path in folder.iterdir() if path.suffix == ".json"}
        return others, {file: {key: value.shape for key, value in shard.items()} for file, shard in shards.items()}

    one_process = contents(saved["untied_tp1_pp1_dp1"])
    assert len(one_process[1]) == 3 * 6  # families × (embedding, 4 layers, head)
    for run in saved.values():
        if run.model == "untied":
            assert contents(run) == one_process


def test_a_checkpoint_holds_weights_moments_and_masters(saved):
    (folder,) = saved["bfloat16_tp2_dp2_zero1"].save_dir.glob("step_*")

    def family(prefix):
        index = json.loads((folder / f"{prefix}.safetensors.index.json").read_text())
        tensors = {}
        for path in folder.glob(f"{prefix}-0*.safetensors"):
            tensors |= load_file(path)
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        return tensors

    weights, masters = family("model"), family("optimizer-master")
    assert weights["lm_head.weight"].dtype == torch.bfloat16 and masters["lm_head.weight"].dtype == torch.float32
    for name, weight in weights.items():
        assert torch.equal(masters[name].bfloat16(), weight)
        assert not torch.equal(masters[name], weight.float())
    for moment in ("exp_avg", "exp_avg_sq"):
        moments = family(f"optimizer-{moment}")
        assert moments.keys() == weights.keys()
        assert all(tensor.any() for tensor in moments.values())
    assert read_trainer_state(folder)["optimizer_step"] == 2


def test_saved_before_the_first_step(pool, tmp_path):
    layout = LAYOUTS["dp2_zero1"]
    pool.run(2, save_steps_untrained, layout, model_config(), tmp_path)
    resumed = pool.run(2, resume_untrained, layout, model_config(), tmp_path)
    assert resumed == pool.run(2, train_two_steps, layout, model_config())


def save_steps_untrained(layout, config, save_dir):
    set_up(layout)
    Run(layout, config).save(save_dir, 0)


def resume_untrained(layout, config, save_dir):
    set_up(layout)
    run = Run(layout, config)
    load_checkpoint(find_checkpoint("auto", save_dir), *run.parts)
    return run.train(range(2))


def train_two_steps(layout, config):
    set_up(layout)
    return Run(layout, config).train(range(2))


# --- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["untied_tp2_pp2", "tied_zb_v_pp2"])
def test_transformers_loads_a_checkpoint(name, saved, pool):
    from transformers import AutoModelForCausalLM

    run = saved[name]
    (folder,) = run.save_dir.glob("step_*")
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float64
    tokens = torch.arange(40).view(2, 20) % 61
    (ours,) = pool.run(1, logits_of, model_config(run.model), folder, tokens)
    theirs = model(tokens).logits.detach()
    # transformers' norms compute in float32, whatever the model's dtype.
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5 * ours.abs().max().item())
    generated = model.generate(tokens[:1], max_new_tokens=5, do_sample=False)
    assert generated.shape == (1, 25)


def test_config_is_what_transformers_writes(saved, tmp_path):
    from transformers import LlamaConfig

    (folder,) = saved["tied_zb_v_pp2"].save_dir.glob("step_*")
    config = LlamaConfig.from_pretrained(folder)
    assert config.rope_parameters == LLAMA3
    config.save_pretrained(tmp_path)
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    assert {key: ours.get(key) for key in theirs if theirs[key] is not None} | {
        "transformers_version": theirs["transformers_version"],
        "use_cache": True,
    } == {key: value for key, value in theirs.items() if value is not None}


def llama(config, folder, dtype=torch.float64, **options):
    """A random Hugging Face model, saved to `folder` by transformers; its mean loss on the batch of step 0."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = config.model_dump(exclude={"name", "dtype"})
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**fields, bos_token_id=None, eos_token_id=None)).to(dtype)
    model.save_pretrained(folder, **options)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    batches, losses = RandomMicroBatches(config.vocab_size, GLOBAL_MICROBATCHES), []
    for i in range(GLOBAL_MICROBATCHES):
        logits = model(batches[i]["input_ids"]).logits
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batches[i]["target_ids"].flatten()))
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize(
    ("model", "dtype", "options"),
    [
        ("untied", torch.float32, {}),
        ("untied", torch.float32, {"max_shard_size": "20KB"}),
        ("untied", torch.bfloat16, {}),
        ("tied", torch.float32, {}),
        ("tied", torch.bfloat16, {"max_shard_size": "20KB"}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_starts_from_a_hugging_face_folder(model, dtype, options, pool, tmp_path):
    config = model_config(model)
    expected = llama(config, tmp_path, dtype, **options)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 if options else (tmp_path / "model.safetensors").exists()
    reference = None
    for name in ("tp1_pp1_dp1", "tp2_pp2", "tp2_dp2_zero1"):
        results = pool.run(world_size(LAYOUTS[name]), load_and_train, LAYOUTS[name], config, tmp_path)
        for result in results:
            assert result[0][0] == pytest.approx(expected, rel=1e-6)  # its norms compute in float32
            reference = reference or result  # the second step shows that the optimizer started from the same weights
            torch.testing.assert_close(torch.tensor(result), torch.tensor(reference), rtol=1e-12, atol=0)


def load_and_save(layout, config, path, save_dir):
    set_up(layout)
    run = Run(layout, config)
    load_weights(path, *run.parts)
    run.save(save_dir, 0)


def test_bfloat16_starts_from_float32_weights(pool, tmp_path):
    config = model_config("bfloat16")
    llama(config, tmp_path, torch.float32)
    pool.run(4, load_and_save, LAYOUTS["tp2_dp2_zero1"], config, tmp_path, tmp_path / "saved")
    (folder,) = (tmp_path / "saved").glob("step_*")
    theirs, ours, masters = load_file(tmp_path / "model.safetensors"), {}, {}
    for path in folder.glob("model-*.safetensors"):
        ours |= load_file(path)
    for path in folder.glob("optimizer-master-*.safetensors"):
        masters |= load_file(path)
    assert ours.keys() == masters.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight.bfloat16())
        assert torch.equal(masters[name], weight.bfloat16().float())


def change_tensors(folder, change):
    path = Path(folder, "model.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


NORM = "model.layers.2.input_layernorm.weight"


@pytest.mark.parametrize("weight_map", [[1, 2], {"a": 3}, None])
def test_refuses_an_index_that_names_no_files(weight_map, pool, tmp_path):
    llama(model_config(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for kind, message in pool.run(2, try_to_load, LAYOUTS["pp2"], model_config(), load_weights, tmp_path):
        assert kind == "ValueError" and f"{index} is damaged: its weight_map" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: tensors.pop(NORM), f"lacks a tensor of the model: {NORM} (1 missing)"),
        (lambda tensors: tensors.update({NORM + "s": torch.ones(2)}), f"does not have: {NORM}s"),
        (lambda tensors: tensors.update({NORM: torch.ones(31)}), f"{NORM} is [31], in the model it is [32]"),
        (lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)}), f"{NORM} is I8, must be one of F64"),
    ],
    ids=["missing", "extra", "misshapen", "quantised"],
)
def test_refuses_other_tensors_by_name(change, expected, pool, tmp_path):
    llama(model_config(), tmp_path)
    change_tensors(tmp_path, change)
    for kind, message in pool.run(2, try_to_load, LAYOUTS["pp2"], model_config(), load_weights, tmp_path):
        assert kind == "ValueError" and expected in message and "\n" not in message


def test_reads_what_old_folders_have_beside_the_weights(pool, tmp_path):
    config = model_config("tied")
    llama(config, tmp_path)
    expected = pool.run(1, load_and_train, {}, config, tmp_path)
    more = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(config.num_hidden_layers)}
    more["lm_head.weight"] = torch.ones(config.vocab_size, config.hidden_size)
    change_tensors(tmp_path, lambda tensors: tensors.update(more))
    assert pool.run(1, load_and_train, {}, config, tmp_path) == expected


def test_refuses_pickles_and_half_a_download(pool, tmp_path):
    llama(model_config(), tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    (_, damaged), *_ = pool.run(1, try_to_load, {}, model_config(), load_weights, tmp_path)
    assert f"{shard} is damaged" in damaged
    shard.unlink()
    (_, missing), *_ = pool.run(1, try_to_load, {}, model_config(), load_weights, tmp_path)
    assert shard.name in missing
    for path in tmp_path.glob("model*"):
        path.unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    (_, other), *_ = pool.run(1, try_to_load, {}, model_config(), load_weights, tmp_path)
    assert "neither model.safetensors nor model.safetensors.index.json" in other


@pytest.mark.parametrize(
    ("field", "value"),
    [("sliding_window", 4096), ("mlp_bias", True), ("num_local_experts", 8), ("model_type", "qwen2")],
)
def test_refuses_other_models_of_the_family_by_field(field, value, pool, tmp_path):
    llama(model_config(), tmp_path)
    description = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**description, field: value}))
    for kind, message in pool.run(2, try_to_load, LAYOUTS["tp2"], model_config(), load_weights, tmp_path):
        assert kind == "ValueError" and f"model.{field} = " in message


@pytest.mark.parametrize(
    ("field", "value", "theirs"),
    [("intermediate_size", 64, 48), ("rms_norm_eps", 1e-6, 1e-5), ("dtype", "float32", "float64")],
)
def test_refuses_a_checkpoint_of_another_architecture(field, value, theirs, saved, pool):
    (folder,) = saved["untied_pp2"].save_dir.glob("step_*")
    config = model_config(**{field: value})
    for kind, message in pool.run(2, try_to_load, LAYOUTS["tp2"], config, load_checkpoint, folder):
        expected = f"model.{field} = {json.dumps(value)}, but {folder} has {json.dumps(theirs)}"
        assert (kind, message) == ("ValueError", expected)


def test_names_all_that_is_another_architecture(saved, pool):
    (folder,) = saved["untied_pp2"].save_dir.glob("step_*")
    config = model_config(num_hidden_layers=2, attention_bias=True)
    ((_, message),) = pool.run(1, try_to_load, {}, config, load_checkpoint, folder)
    layers = f"model.num_hidden_layers = 2, but {folder} has 4"
    assert message == f"model.attention_bias = true, but {folder} has false; {layers}"


def save_with_tokenizer(config, save_dir, tokenizer):
    set_up({})
    Run({}, config).save(save_dir, 1, tokenizer=tokenizer)


def test_a_checkpoint_brings_its_tokenizer(pool, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0, "one": 1, "two": 2}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    pool.run(1, save_with_tokenizer, model_config(), tmp_path, tokenizer)
    folder = tmp_path / "step_00000001"
    verify_checkpoint(folder)
    assert "tokenizer.json" in (folder / "SHA256SUMS").read_text()
    assert AutoTokenizer.from_pretrained(folder)("two one")["input_ids"] == [2, 1]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == 0


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_steps(saved, tmp_path):
    """A folder with the checkpoints of steps 2 and 3, the latter to be damaged."""
    (folder,) = saved["untied_pp2"].save_dir.glob("step_*")
    for step in (2, 3):
        shutil.copytree(folder, tmp_path / f"step_{step:08d}")
    return tmp_path


def test_every_flipped_byte_and_every_cut_is_found(two_steps):
    folder = two_steps / "step_00000003"
    verify_checkpoint(folder)
    files = sorted(folder.iterdir())
    assert len(files) == 18 + 3 + 3 + 1  # shards, indices, three other JSON files, SHA256SUMS
    for path in files:
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 4
        for damaged in (bytes(flipped), content[:-2], content[: len(content) // 2], b""):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=folder.name):
                verify_checkpoint(folder)
        path.unlink()
        with pytest.raises(ValueError, match=path.name):
            verify_checkpoint(folder)
        path.write_bytes(content)
    verify_checkpoint(folder)
    sums = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text("".join(sums[:-1]))
    with pytest.raises(ValueError, match="SHA256SUMS is damaged"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("damage", ["a cut", "a flipped byte", "a missing file", "nothing but tensors"])
def test_falls_back_to_the_newest_whole_checkpoint(damage, two_steps, pool):
    newest = two_steps / "step_00000003"
    shard = sorted(newest.glob("optimizer-exp_avg_sq-*.safetensors"))[3]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 128
    if damage == "a cut":
        os.truncate(shard, len(content) - 1)
    elif damage == "a flipped byte":
        shard.write_bytes(content)
    elif damage == "a missing file":
        shard.unlink()
    else:
        shard = newest
        (newest / "SHA256SUMS").unlink()
    (two_steps / ".tmp-step_00000004").mkdir()
    results = pool.run(3, try_to_find, "auto", two_steps)
    assert {found for (_, found), _ in results} == {two_steps / "step_00000002"}
    (warning,) = [line for _, lines in results for line in lines]
    assert warning.startswith(f"warning: passed over a checkpoint: {shard} ")
    for (kind, message), _ in pool.run(2, try_to_find, str(newest), two_steps):  # named by its path: an error
        assert kind == "ValueError" and message.startswith("checkpoint.resume: ") and str(shard) in message


def test_finds_nothing_or_says_so(two_steps, pool, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    for save_dir in (empty, empty / "not_there"):
        assert pool.run(2, try_to_find, "auto", save_dir) == 2 * [((None, None), [])]
    assert pool.run(2, try_to_find, "none", two_steps) == 2 * [((None, None), [])]
    ((kind, message), _), _ = pool.run(2, try_to_find, str(empty), two_steps)
    assert kind == "ValueError" and "no SHA256SUMS" in message
    for folder in two_steps.glob("step_*"):
        (folder / "config.json").unlink()
    ((kind, message), _), _ = pool.run(2, try_to_find, "auto", two_steps)
    assert kind == "ValueError" and f"checkpoint.save_dir = {two_steps}: every checkpoint there is damaged" in message


# --- the folder ------------------------------------------------------------------------------------------------------


def test_keeps_the_newest_and_cleans_up(pool, tmp_path):
    leftover = tmp_path / ".tmp-step_00000099"
    leftover.mkdir()
    (leftover / "model-00001-of-00006.safetensors").write_text("half")
    contents = pool.run(2, save_steps, LAYOUTS["tp2"], model_config(), tmp_path, [1, 2, 3], {"keep": 2})
    names = [f"step_0000000{step}" for step in range(5)]
    assert contents[0] == [names[1:2], names[1:3], names[2:4]]
    # A run that goes on from an older step: what it has just written stays, whatever lies beside it.
    contents = pool.run(2, save_steps, LAYOUTS["tp2"], model_config(), tmp_path, [1], {"keep": 1})
    assert contents[0] == [names[1:2]]
    contents = pool.run(2, save_steps, LAYOUTS["tp2"], model_config(), tmp_path, [2, 3, 4], {})
    assert contents[0][-1] == names[1:5]


def test_a_step_saved_twice_is_replaced(pool, tmp_path):
    pool.run(1, save_steps, {}, model_config(), tmp_path, [4], {})
    first = sums_of(tmp_path)
    pool.run(1, save_steps, {}, model_config(), tmp_path, [3, 4], {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]
    assert (tmp_path / "step_00000004" / "SHA256SUMS").read_text() != first
    # Killed between the two renames: the old one is found under its other name, until the step is saved again.
    (tmp_path / "step_00000004").rename(tmp_path / ".old-step_00000004")
    ((_, found), _), *_ = pool.run(1, try_to_find, "auto", tmp_path)
    assert found == tmp_path / ".old-step_00000004"
    # Killed after the second rename: the new one is found.
    shutil.copytree(found, tmp_path / "step_00000004")
    ((_, found), _), *_ = pool.run(1, try_to_find, "auto", tmp_path)
    assert found == tmp_path / "step_00000004"
    backup = tmp_path / "step_00000004.old"  # somebody's own
    backup.mkdir()
    pool.run(1, save_steps, {}, model_config(), tmp_path, [4], {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000004", backup.name]


@pytest.mark.parametrize("poor_rank", [0, 1, 3])
def test_a_rank_that_cannot_write_stops_all_and_harms_nothing(poor_rank, pool, tmp_path):
    config = model_config(hidden_size=64)
    results = pool.run(4, save_with_little_space, LAYOUTS["tp2_pp2"], config, tmp_path, poor_rank, timeout=30)
    assert len({error for error, _ in results}) == 1
    (kind, message), names = results[0]
    assert kind == "OSError" and "File too large" in message and f"(rank {poor_rank})" in message
    assert str(tmp_path / ".tmp-step_00000002") in message and "\n" not in message
    assert names == ["step_00000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]
    for path in tmp_path.iterdir():
        verify_checkpoint(path)


def test_no_folder_can_be_made(pool, tmp_path):
    (tmp_path / "file").write_text("")
    for saving, locking in pool.run(2, save_below, LAYOUTS["pp2"], model_config(), tmp_path / "file" / "checkpoints"):
        for (kind, message), expected in ((saving, "OSError"), (locking, "ValueError")):
            assert kind == expected and "Not a directory" in message and str(tmp_path) in message
        assert locking[1].startswith("checkpoint.save_dir = ")


def test_one_run_at_a_time(pool, tmp_path):
    with FileLock(tmp_path / ".lock"):
        for kind, message in pool.run(2, try_to_lock, tmp_path):
            assert kind == "ValueError" and f"{tmp_path}: another run is using it" in message
    assert pool.run(2, try_to_lock, tmp_path) == [(None, None), (None, None)]


def test_ranks_that_do_not_share_a_folder(pool, tmp_path):
    for kind, message in pool.run(2, try_to_lock_another, tmp_path):
        assert kind == "ValueError" and message.endswith("must be one folder for all ranks, rank 1 has another")


def test_names_are_hugging_faces():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model_config("tied", tie_word_embeddings=False)
    fields = config.model_dump(exclude={"name", "dtype"})
    with torch.device("meta"):
        theirs = LlamaForCausalLM(LlamaConfig(**fields)).state_dict()
    ours = build_on_meta(config, torch.float32).named_parameters()
    assert {hugging_face_name(name): p.shape for name, p in ours} == {name: p.shape for name, p in theirs.items()}
