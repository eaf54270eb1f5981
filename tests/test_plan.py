"""Balanced stages against every other split; the plan's figures against what real processes keep, wait for and send."""

import itertools
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import parallel_region
import pipeline_parallel
import process_group_manager as pgm
import train
from data_parallel import DataParallelBucket
from layouts import MICRO_BATCH_SIZE, SEQ_LENGTH, RandomMicroBatches
from linear import deferred_weight_gradients
from pipeline_parallel import PipelineExecutor, train_step_pipeline
from plan import make_plan, neighbours
from read_config import load_config
from stage_memory import Sizes, Stage, actions_and_sends, rank_memory
from stages import balance_layers, head_cost, layers_of_stages, settle_stages, timetable_of

ROOT = Path(__file__).parent.parent
LLAMA_405B = str(ROOT / "configs/llama_405b_16k.json")
GIB = 2**30
TINY = {
    "distributed": {"device": "cpu"},
    "model": {
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 101,
        "max_position_embeddings": SEQ_LENGTH,
    },
    "training": {"seq_length": SEQ_LENGTH, "micro_batch_size": MICRO_BATCH_SIZE, "gradient_accumulation_steps": 4},
}


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    """settled("distributed.tp_size=2", …): the checked config of a tiny model, or of the file `path`."""
    tiny = tmp_path_factory.mktemp("config") / "tiny.json"
    tiny.write_text(json.dumps(TINY))

    def settled(*overrides, path=tiny):
        config = load_config(str(path), list(overrides))
        settle_stages(config)
        return config

    return settled


def test_tied_ends_of_a_placement_that_have_no_group_are_refused(settled, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from schedules import SCHEDULES\ndef mine(*numbers):\n    return SCHEDULES['afab'](*numbers)\n"
        "mine.placement = lambda rank, chunk, size: (rank + 1) % size\n"
    )
    turned = (f"distributed.pp_engine={path}:mine", "distributed.pp_size=3")
    settled(*turned)
    settled("model.tie_word_embeddings=true", "distributed.pp_size=2", turned[0])
    with pytest.raises(ValueError, match="first and the last stage on pp ranks 1 and 2: must be 0 and 2, or the same"):
        settled("model.tie_word_embeddings=true", *turned)


# --- balanced stages --------------------------------------------------------------------------------------------------


def splits(num_layers, num_stages):
    """All lists of num_stages counts that add up to num_layers, none of them 0 but at the ends."""
    for cuts in itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        edges = (0, *cuts, num_layers)
        counts = [after - before for before, after in itertools.pairwise(edges)]
        if 0 not in counts[1:-1]:
            yield counts


def rank_sums(counts, rank_of_stage, layer, embedding, head):
    sums = [0.0] * (max(rank_of_stage) + 1)
    for stage, count in enumerate(counts):
        sums[rank_of_stage[stage]] += count * layer
    sums[rank_of_stage[0]] += embedding
    sums[rank_of_stage[-1]] += head
    return sums


@pytest.mark.parametrize(
    "rank_of_stage",
    [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 1, 0], [0, 1, 2, 2, 1, 0]],
    ids=str,
)
def test_no_split_has_a_faster_slowest_rank(rank_of_stage):
    choose = random.Random(str(rank_of_stage))
    for _ in range(40):
        num_layers = choose.randrange(max(0, len(rank_of_stage) - 2), 10)
        costs = [choose.uniform(0.5, 2), choose.choice([0, choose.uniform(0, 5)]), choose.uniform(0, 5)]
        counts = balance_layers(num_layers, len(rank_of_stage), *costs, rank_of_stage)
        best = min(max(rank_sums(split, rank_of_stage, *costs)) for split in splits(num_layers, len(rank_of_stage)))
        assert sum(counts) == num_layers and min(counts) >= 0
        assert max(rank_sums(counts, rank_of_stage, *costs)) == pytest.approx(best, abs=1e-9)


def test_a_rank_shares_its_layers_out_evenly_over_its_chunks():
    # rank 0 holds both ends of the V: 7 = 3 + 4 or 4 + 2 (and 1.5 for the head), not 6 + 0
    assert balance_layers(13, 4, head_cost=1.5, rank_of_stage=[0, 1, 1, 0]) == [4, 3, 4, 2]


def test_golden_splits():
    assert balance_layers(22, 4, head_cost=0.7) == [5, 6, 6, 5]
    assert balance_layers(22, 4, head_cost=1.25) == [6, 6, 6, 4]
    assert balance_layers(22, 4, head_cost=2.5) == [6, 6, 6, 4]
    assert balance_layers(8, 4) == [2, 2, 2, 2]
    assert balance_layers(9, 4) == [2, 2, 2, 3]  # later ranks hold fewer micro-batches
    assert balance_layers(2, 4, head_cost=3.0) == [0, 1, 1, 0]
    with pytest.raises(ValueError, match='"balanced" needs a layer for each of the 8 stages .*num_hidden_layers is 5'):
        balance_layers(5, 8)


def test_head_cost_counts_attention_and_recomputation(settled):
    # 1 B model: a layer is 2 · (2048² · 2 + 2048 · 256 · 2 + 3 · 2048 · 5632) + 4 · 2048 · seq FLOPs a token
    matrices, path = 2048**2 * 2 + 2048 * 256 * 2 + 3 * 2048 * 5632, ROOT / "configs/llama_1b_pp4_tp2.json"
    for seq_length in (512, 2048):
        config = settled(f"training.seq_length={seq_length}", path=path)
        assert head_cost(config) == pytest.approx(2048 * 32000 / (matrices + 2 * 2048 * seq_length))
    recomputed = settled("model.recompute=layer", path=path)  # the layers take four thirds, the head does not
    assert head_cost(recomputed) == pytest.approx(head_cost(settled(path=path)) * 3 / 4)


def test_balanced_is_a_value_of_pp_layers(settled):
    config = settled("distributed.pp_size=4", "distributed.pp_layers=balanced", "model.vocab_size=2048")
    assert config.distributed.pp_layers == balance_layers(8, 4, head_cost=head_cost(config)) == [2, 3, 3, 0]
    two_chunks = settled("distributed.pp_size=2", "distributed.pp_engine=zb_v", "distributed.pp_layers=[1, 2, 4, 1]")
    assert [len(layers) for layers in layers_of_stages(two_chunks)] == [1, 2, 4, 1]
    with pytest.raises(ValueError, match=r"pp_layers: \[8, 0\] must be 1 layer counts \(one a stage\)"):
        settled("distributed.pp_layers=[8, 0]")
    with pytest.raises(ValueError, match="distributed.pp_layers = \"equal\": must be 'balanced'"):
        settled("distributed.pp_layers=equal")


def test_a_run_on_balanced_stages_gives_the_reasons(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(TINY))
    (tmp_path / "text.txt").write_text(Path(__file__).read_text())
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "train.py", "--config", f"{tmp_path}/run.json"]
    command += ["distributed.pp_size=2", "distributed.pp_layers=balanced", "model.vocab_size=1024", "training.steps=1"]
    command += [f"dataset.cache_dir={tmp_path}", f'dataset.files=["{tmp_path}/text.txt"]']
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("head costs 2.") == 1 and "stages 5 3; slowest rank" in result.stdout
    assert "stage 0 on pp rank 0: embedding, layers 0-4" in result.stdout


# --- what a micro-batch leaves behind ---------------------------------------------------------------------------------

VARIANTS = [
    (),
    ("model.dtype=bfloat16",),
    ("model.dtype=float64", "model.attention_bias=true", "model.tie_word_embeddings=true"),
    ("distributed.tp_size=2",),
    ("distributed.tp_size=2", "distributed.sequence_parallel=true", "model.attention_bias=true"),
    ("distributed.pp_size=2", "model.recompute=layer", "model.tie_word_embeddings=true"),
    ("distributed.pp_size=2", "distributed.tp_size=2", "distributed.sequence_parallel=true", "model.recompute=2"),
    ("distributed.pp_size=2", "distributed.pp_engine=zb_v", "model.num_key_value_heads=8"),
]


def measure_stages(config):
    """Of each stage of this rank: bytes that autograd saves in F, and that the closures of I keep. And parameters."""
    d, t, m = config.distributed, config.training, config.model
    pgm.setup_process_group_manager(d.tp_size, d.pp_size, d.dp_size)
    model = train.build_model(config, torch.device("cpu"))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    values = {bucket.values.untyped_storage().data_ptr() for bucket in DataParallelBucket(model).buckets}
    own_seq_length = t.seq_length // d.tp_size if d.sequence_parallel else t.seq_length
    results = {}
    for chunk, stage in enumerate(model.stages):
        saved = {}

        def note(tensor, saved=saved):
            saved[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        tokens = torch.randint(m.vocab_size, (t.micro_batch_size, t.seq_length + 1))
        shape = (t.micro_batch_size, own_seq_length, m.hidden_size)
        x = torch.randn(shape, dtype=getattr(torch, m.dtype)).requires_grad_() if stage else tokens[:, :-1]
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(x, chunk, tokens[:, 1:])
        with deferred_weight_gradients() as closures:
            torch.autograd.backward(output, torch.randn_like(output))
        cells = [cell.cell_contents for closure in closures for cell in closure.__closure__]
        left = {x.untyped_storage().data_ptr(): x for x in cells if isinstance(x, torch.Tensor)}
        known = values | {table.untyped_storage().data_ptr() for table in model._rotary}
        results[stage] = [
            sum(tensor.untyped_storage().nbytes() for place, tensor in found.items() if place not in known)
            for found in (saved, left)
        ]
    return results, num_parameters


def measure_stages_in_pieces(config):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.LOGITS_BYTES", 5000)
        return measure_stages(config)


def stage_of(config, stage):
    layers, tied = layers_of_stages(config), config.model.tie_word_embeddings
    return Stage(Sizes(config), layers[stage], stage == 0, stage == len(layers) - 1, not tied or len(layers) > 1)


@pytest.mark.parametrize("overrides", VARIANTS, ids=lambda overrides: " ".join(overrides) or "plain")
def test_a_stage_keeps_and_leaves_just_these_bytes(pool, settled, overrides):
    config = settled(*overrides)
    d, plan = config.distributed, make_plan(config)
    of_ranks = pool.run(d.tp_size * d.pp_size, measure_stages, config)
    for rank, (stages, num_parameters) in enumerate(of_ranks[:: d.tp_size]):  # tp_rank 0, the larger vocabulary
        assert num_parameters == plan["ranks"][rank]["parameters"]
        for stage, measured in stages.items():
            expected = stage_of(config, stage)
            assert measured == [sum(expected.kept), sum(expected.left)]


def test_logits_in_pieces_are_not_kept(pool, settled, monkeypatch):
    monkeypatch.setattr("stage_memory.LOGITS_BYTES", 5000)
    config = settled()
    expected = stage_of(config, 0)
    assert Sizes(config).recomputes_logits and expected.kept.logits == 0
    ((stages, _),) = pool.run(1, measure_stages_in_pieces, config)
    few = 9 * MICRO_BATCH_SIZE * SEQ_LENGTH  # a piece keeps its targets, the whole loss columns and a mask
    assert stages[0] == [pytest.approx(sum(expected.kept), abs=few), sum(expected.left)]


# --- what a step sends, and what waits for a boundary -----------------------------------------------------------------


class CountingRun(PipelineExecutor):
    """Notes for each action how many boundary tensors are there that are not its own input or result."""

    counts = []

    def _note(self, kind, chunk, has_input):
        leaving = sum(len(batch) for batch in self.sends_in_flight[-4:])
        self.counts.append((kind, chunk, len(self.inbox) + len(self.outbox) + leaving - has_input))

    def forward(self, kind, chunk, microbatch):
        self._note(kind, chunk, not self.model.is_first(chunk))
        super().forward(kind, chunk, microbatch)

    def backward(self, kind, chunk, microbatch):
        self._note(kind, chunk, not self.model.is_last(chunk))
        super().backward(kind, chunk, microbatch)

    def weight(self, kind, chunk, microbatch):
        self._note(kind, chunk, False)
        super().weight(kind, chunk, microbatch)


def count_step(config):
    """Bytes that this rank hands over in one step, by group and operation, and CountingRun's counts."""
    d, t, m = config.distributed, config.training, config.model
    manager = pgm.setup_process_group_manager(d.tp_size, d.pp_size, d.dp_size)
    model = train.build_model(config, torch.device("cpu"))
    data_parallel = DataParallelBucket(model, d.zero1)
    data_loader = RandomMicroBatches(m.vocab_size, t.gradient_accumulation_steps, manager.dp_rank, d.dp_size)
    groups = {manager.tp_group: "tp", manager.pp_group: "pp", manager.dp_group: "dp", manager.embedding_group: "pp"}
    sent = {"tp": 0.0, "pp": 0.0, "dp": 0.0}

    def counting(function, of_ring, tensor_at):
        """The function, and of_ring · (n - 1)/n of its tensor's bytes on the account of its group."""

        def call(*arguments, group=None, **options):
            tensor = arguments[tensor_at]
            if group in groups and tensor.numel() > 1:  # without the loss's and the norm's single numbers
                share = of_ring * (1 - 1 / group.size())
                sent[groups[group]] += share * tensor.numel() * tensor.element_size()
            return function(*arguments, group=group, **options)

        return call

    def batch_isend_irecv(operations, function=dist.batch_isend_irecv):
        tensors = [operation.tensor for operation in operations if operation.op is dist.isend]
        sent["pp"] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return function(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting(dist.all_reduce, 2, 0))
        # Two ranks swap instead: as many bytes.
        patch.setattr(
            parallel_region, "start_all_reduce", lambda x, group: dist.all_reduce(x, group=group, async_op=True).wait
        )
        patch.setattr(dist, "all_gather_single", counting(dist.all_gather_single, 1, 0))
        patch.setattr(dist, "reduce_scatter_single", counting(dist.reduce_scatter_single, 1, 1))
        patch.setattr(dist, "batch_isend_irecv", batch_isend_irecv)
        patch.setattr(pipeline_parallel, "PipelineExecutor", CountingRun)
        CountingRun.counts = []
        own_seq_length = t.seq_length // d.tp_size if d.sequence_parallel else t.seq_length
        shape = (t.micro_batch_size, own_seq_length, m.hidden_size)
        train_step_pipeline(model, data_loader, shape, torch.device("cpu"), getattr(torch, m.dtype))
        data_parallel.finish_grad_sync()
        data_parallel.publish()
    return sent, CountingRun.counts


TP2_PP2 = ("distributed.tp_size=2", "distributed.pp_size=2", "model.vocab_size=128")


@pytest.mark.parametrize(
    "overrides",
    [
        ("distributed.tp_size=2", "distributed.dp_size=2", "distributed.zero1=true", "model.vocab_size=128"),
        ("distributed.tp_size=2", "distributed.sequence_parallel=true", "model.dtype=bfloat16", "model.vocab_size=128"),
        ("distributed.dp_size=2", "distributed.pp_size=2", "model.tie_word_embeddings=true"),
        (*TP2_PP2, "model.recompute=layer", "distributed.pp_engine=interleaved_1f1b"),
        (*TP2_PP2, "model.recompute=2", "distributed.sequence_parallel=true", "distributed.pp_engine=zb_v"),
        ("distributed.pp_size=4", "distributed.pp_engine=dualpipev", "model.tie_word_embeddings=true"),
        ("distributed.pp_size=4", "distributed.pp_engine=zb_h1", "training.gradient_accumulation_steps=7"),
        ("distributed.pp_size=4", "distributed.pp_engine=afab"),
    ],
    ids=" ".join,
)
def test_a_rank_sends_and_has_waiting_what_the_plan_says(pool, settled, overrides):
    config = settled(*overrides)
    d, plan = config.distributed, make_plan(config)
    for rank, (sent, counts) in enumerate(pool.run(plan["grid"]["ranks"], count_step, config)):
        pp_rank = rank // d.tp_size % d.pp_size
        expected = plan["ranks"][pp_rank]["sent"]
        assert sent["pp"] == expected["pp"]
        assert sent["tp"] == pytest.approx(expected["tp"], rel=1e-6)
        assert sent["dp"] == pytest.approx(expected["dp"], rel=0.01)  # buckets are padded to 64 elements
        assert counts == actions_and_sends(timetable_of(config))[pp_rank][0]


# --- memory over a step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["afab", "1f1b", "interleaved_1f1b", "dualpipev"])
def test_activations_are_those_of_the_timetables_peak(settled, engine):
    config = settled(
        "distributed.pp_size=4", f"distributed.pp_engine={engine}", "training.gradient_accumulation_steps=8"
    )
    timetable, layer = timetable_of(config), Sizes(config).layer
    for rank in (1, 2):  # 2 layers each, and neither embedding nor head
        stages = [stage_of(config, stage) for stage in timetable.stages[rank]]
        held, _ = rank_memory(actions_and_sends(timetable)[rank][0], stages, 0)
        assert held.activations == 2 * layer * timetable.peak_microbatches[rank]


def test_weights_gradients_and_optimizer(settled):
    """Bytes per parameter: of bfloat16 also masters; ZeRO-1 shares moments and masters out over dp."""
    for dtype, zero1, expected in [
        ("float32", "false", (4, 4, 8)),
        ("float32", "true", (4, 4, 2)),
        ("float64", "false", (8, 8, 16)),
        ("bfloat16", "false", (2, 4, 12)),
        ("bfloat16", "true", (2, 4, 3)),
    ]:
        config = settled(f"model.dtype={dtype}", f"distributed.zero1={zero1}", "distributed.dp_size=4")
        (rank,) = make_plan(config)["ranks"]
        assert (
            tuple(rank["memory"][part] / rank["parameters"] for part in ("weights", "gradients", "optimizer"))
            == expected
        )


# --- the command ------------------------------------------------------------------------------------------------------


def test_llama_405b_in_seconds(settled):
    started = time.process_time()
    plan = make_plan(settled(path=LLAMA_405B))
    assert time.process_time() - started < 2
    assert plan["parameters"] == 405_853_388_800
    assert (plan["grid"]["ranks"], plan["tokens"]) == (16384, 2**24)
    assert [stages[0] for stages in (list(plan["ranks"][rank]["stages"].values()) for rank in (0, 1))] == [
        "embedding",
        "0",
    ]
    assert 20 * GIB < plan["largest"] < 30 * GIB and 0.10 < plan["bubble"] < 0.11


def test_neighbours_fit_and_are_sorted(settled):
    config, limit = settled("model.recompute=none", path=LLAMA_405B), 80 * 10**9
    plan = make_plan(config)
    assert plan["largest"] > limit
    found = neighbours(config, limit)
    assert {"model.recompute": "layer"} in [other["changes"] for other in found]
    assert [other["relative_time"] for other in found] == sorted(other["relative_time"] for other in found)
    for other in found:
        assert other["largest"] <= limit and (other["grid"]["ranks"], other["tokens"]) == (16384, 2**24)
        changes = [f"{key}={json.dumps(value)}" for key, value in other["changes"].items()]
        again = make_plan(settled("model.recompute=none", *changes, path=LLAMA_405B))
        assert again == {key: value for key, value in other.items() if key != "changes"}


def test_a_change_that_does_not_pay_is_not_offered(settled):
    found = [other["changes"] for other in neighbours(settled("model.recompute=none", path=LLAMA_405B), 80 * 10**9)]
    slower = {"distributed.pp_engine": "1f1b", "distributed.pp_chunks": 1, "model.recompute": "layer"}
    assert {"model.recompute": "layer"} in found and slower not in found
    assert not any(changes.get("distributed.zero1") is False for changes in found)  # nobody needs it here


def command(capsys, *arguments):
    """(exit code, stdout, stderr) of `python train.py …` in this process."""
    try:
        code = train.main(list(arguments))
    except SystemExit as ending:
        code = ending.code
    output = capsys.readouterr()
    return code, output.out, output.err


def test_text_and_json_say_the_same(capsys):
    code, text, _ = command(capsys, "--config", LLAMA_405B, "--dry-run", "--memory", "80GB")
    assert code == 0 and "405,853,388,800 parameters" in text and "tp 8 × pp 16 × dp 128 = 16,384 ranks" in text
    code, printed, _ = command(capsys, "--config", LLAMA_405B, "--dry-run", "--memory", "80GB", "--json")
    plan = json.loads(printed)
    assert code == 0 and plan["fits"] and plan["neighbours"] == []
    assert f"{plan['largest'] / GIB:.3f} GiB of tensors fit in 74.51 GiB" in text
    lines = [line.split() for line in text.splitlines() if "|" in line and line.startswith("pp rank")][-16:]
    for rank, line in zip(plan["ranks"], lines, strict=True):
        sizes = [*rank["memory"].values(), rank["total"], *rank["sent"].values()]
        assert [x for x in line[3:] if x != "|"] == [f"{size / GIB:.2f}" for size in sizes]


def test_a_layout_that_does_not_fit_names_others(capsys):
    arguments = ["--config", LLAMA_405B, "--dry-run", "--memory", "80GB", "model.recompute=none"]
    _, text, _ = command(capsys, *arguments)
    assert "GiB of tensors do not fit in 74.51 GiB (--memory); these do, best first" in text
    assert text.splitlines()[-1].endswith("recompute=layer")
    _, text, _ = command(capsys, *arguments[:-2], "1GiB")
    assert "do not fit in 1.00 GiB (--memory); nor does any layout that is one or two changes away" in text


@pytest.mark.parametrize(
    "wrong",
    [
        ["distributed.pp_engine=1f2b"],
        ["distributed.pp_chunks=2"],
        ["distributed.pp_layers=[8, 0]"],
        ["distributed.pp_engine=zb_v", "distributed.pp_chunks=3"],
        ["training.seq_length=4096", "model.hidden_size=65"],
        ["model.num_hidden_layers=5", "distributed.pp_engine=interleaved_1f1b", "distributed.pp_chunks=9"],
        ["training.stepz=1"],
    ],
    ids=" ".join,
)
def test_configuration_errors_are_those_of_a_real_run(capsys, monkeypatch, tmp_path, wrong):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    arguments = ["--config", f"{tmp_path}/tiny.json", *wrong]
    real, dry = command(capsys, *arguments), command(capsys, *arguments, "--dry-run")
    assert dry == real and dry[0] == 2 and dry[2].startswith("error: ")


def test_arguments_of_the_dry_run(capsys):
    code, _, error = command(capsys, "--config", LLAMA_405B, "--memory", "80GB")
    assert code == 2 and "--memory and --json need --dry-run" in error
    code, _, error = command(capsys, "--config", LLAMA_405B, "--dry-run", "--memory", "80")
    assert code == 2 and error == "error: --memory 80: must be a size such as 80GB (80 · 10^9 bytes) or 74.5GiB\n"
    code, text, _ = command(capsys, "--config", LLAMA_405B, "--dry-run", "distributed.dp_size=null", "--json")
    assert json.loads(text)["grid"]["dp"] == 1
