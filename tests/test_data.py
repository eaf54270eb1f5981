"""Tokens on disk and batches of them: exact ids, one build whoever asks, the same global batch in every layout."""

import contextlib
import errno
import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import token_file
from data import MicroBatchDataLoader
from token_file import TokenFile, check_vocabulary, prepare_tokens, standard_library_files

EOT = 256


@pytest.fixture(autouse=True)
def datasets_cache_in_tmp_path(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


def section(folder, **keys):
    defaults = dict(name=None, files=None, subset_name=None, split="train", text_column="text", tokenizer="bytes")
    return SimpleNamespace(**defaults | dict(shuffle=False, num_proc=1, cache_dir=str(folder / "cache")) | keys)


def write(folder, **contents):
    """write(folder, a_txt="x") writes folder/a.txt. A list becomes parquet: a row for each dict. Returns the paths."""
    paths = []
    for name, content in contents.items():
        path = folder / ".".join(name.rsplit("_", 1))
        if isinstance(content, list):
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        paths.append(str(path))
    return paths


def read(tokens):
    return np.fromfile(tokens.path, tokens.dtype).tolist()


# ---- documents to tokens --------------------------------------------------------------------------------------------

DOCUMENTS = {
    "one text": (dict(a_txt="abc"), [b"abc"]),
    "two texts": (dict(a_txt="ab", b_txt="c"), [b"ab", b"c"]),
    "files in the order given": (dict(b_txt="b", a_txt="a"), [b"b", b"a"]),
    "beyond ascii, line ends kept": (dict(a_txt="é\r\n"), [b"\xc3\xa9\r\n"]),
    "empty texts": (dict(a_txt="", b_txt="b", c_txt="", d_txt="d", e_txt=""), [b"b", b"d"]),
    "jsonl": (
        dict(a_jsonl='{"text": "a\\nb", "id": 1}\n{"text": ""}\n\n  \n{"text": "c", "id": [2]}'),
        [b"a\nb", b"c"],
    ),
    "parquet": (dict(a_parquet=[{"text": "ab"}, {"text": ""}, {"text": "c"}]), [b"ab", b"c"]),
    "all kinds": (dict(a_parquet=[{"text": "p"}], b_txt="t\n", c_jsonl='{"text": "j"}\n'), [b"p", b"t\n", b"j"]),
}


@pytest.mark.parametrize("contents, documents", DOCUMENTS.values(), ids=DOCUMENTS)
def test_one_separator_between_documents(tmp_path, contents, documents):
    tokens = prepare_tokens(section(tmp_path, files=write(tmp_path, **contents)))
    expected = list(documents[0])
    for document in documents[1:]:
        expected += [EOT, *document]
    assert read(tokens) == expected
    assert (tokens.num_tokens, tokens.num_documents) == (len(expected), len(documents))
    assert (tokens.max_token_id, tokens.dtype, tokens.tokenizer) == (max(expected), "uint16", "bytes")


def test_more_documents_than_a_batch_keep_their_order(tmp_path):
    texts = [str(number) for number in range(1000)]
    files = write(tmp_path, a_jsonl="\n".join(json.dumps({"text": text}) for text in texts))
    ids = read(prepare_tokens(section(tmp_path, files=files)))
    assert "".join("|" if i == EOT else chr(i) for i in ids) == "|".join(texts)


@pytest.mark.parametrize("contents", [dict(a_jsonl='{"body": "x", "text": "y"}'), dict(a_parquet=[{"body": "x"}])])
def test_text_column(tmp_path, contents):
    assert read(prepare_tokens(section(tmp_path, files=write(tmp_path, **contents), text_column="body"))) == [ord("x")]


def test_python_standard_library(tmp_path, capsys):
    files = standard_library_files()
    root = Path(sysconfig.get_paths()["stdlib"])
    names = {path.relative_to(root).as_posix() for path in files}
    assert {"argparse.py", "json/decoder.py", "unittest/mock.py"} <= names and files == sorted(files)
    assert not {name for name in names if {"site-packages", "test", "tests", "idle_test"} & set(name.split("/"))}
    assert 500 < len(files) < 1000

    tokens = prepare_tokens(section(tmp_path, name="python-stdlib"))
    texts = [text for text in (path.read_bytes() for path in files) if text]
    assert tokens.num_documents == len(texts)
    assert tokens.num_tokens == sum(map(len, texts)) + len(texts) - 1 > 9_000_000
    ids = np.fromfile(tokens.path, tokens.dtype)
    assert (ids == EOT).sum() == len(texts) - 1
    assert ids[: len(texts[0])].tolist() == list(texts[0]) and ids[-len(texts[-1]) :].tolist() == list(texts[-1])
    assert str(tokens) == f"{len(texts)} documents, {tokens.num_tokens:,} tokens (tokenizer bytes)"
    progress = capsys.readouterr().err
    assert "tokenising" in progress and f"{len(files)} documents" in progress and f"{tokens.num_tokens:,}" in progress


# ---- what the user got wrong ----------------------------------------------------------------------------------------

ERRORS = {
    "no text at all": (dict(a_txt=""), ["is empty", "a.txt"]),
    "no rows": (dict(a_jsonl="\n"), ["is empty", "a.jsonl"]),
    "only empty rows": (dict(a_parquet=[{"text": ""}]), ["is empty"]),
    "row without column": (
        dict(a_jsonl='{"text": "a"}\n{"id": 1, "body": "b"}'),
        ["a.jsonl: line 2", "column 'text'", "its columns: id, body"],
    ),
    "parquet without column": (dict(a_parquet=[{"id": 1, "body": "b"}]), ["row 0", "'text'", "its columns: id, body"]),
    "null": (dict(a_parquet=[{"text": "a"}, {"text": None}]), ["a.parquet: row 1", "has None in column 'text'"]),
    "number": (dict(a_jsonl='{"text": 3}'), ["a.jsonl: line 1", "has 3 in column 'text'", "not text"]),
    "malformed json": (
        dict(a_jsonl='{"text": "a"}\n{"text": oops}'),
        ["a.jsonl: line 2 is not a JSON object", "char 9"],
    ),
    "not an object": (dict(a_jsonl='{"text": "a"}\n\n3'), ["a.jsonl: line 3 is not a JSON object"]),
    "list": (dict(a_jsonl="[1, 2]"), ["a.jsonl: line 1 is not a JSON object"]),
    "half a surrogate": (dict(a_jsonl='{"text": "a\\ud800"}'), ["a.jsonl: line 1", "surrogates not allowed"]),
    "not utf-8": (dict(a_txt="ok", b_txt=b"abc\xffd"), ["b.txt", "0xff in position 3"]),
    "jsonl not utf-8": (dict(a_jsonl=b'{"text": "a"}\n{"text": "\xff"}'), ["a.jsonl: line 2", "0xff in position 10"]),
    "not parquet": (dict(a_parquet="nonsense" * 9), ["a.parquet", "not a parquet file"]),
    "unknown kind of file": (dict(a_csv="a"), ["dataset.files", "a.csv", ".txt, .jsonl or .parquet"]),
}


@pytest.mark.parametrize("contents, parts", ERRORS.values(), ids=ERRORS)
def test_error_names_what_is_wrong(tmp_path, contents, parts):
    with pytest.raises(ValueError) as error:
        prepare_tokens(section(tmp_path, files=write(tmp_path, **contents)))
    assert all(part in str(error.value) for part in parts) and "\n" not in str(error.value)
    assert not list(tmp_path.glob("cache/*.bin")) and not list(tmp_path.glob("cache/*.partial"))


@pytest.mark.parametrize("name", ["missing.txt", "folder.txt"])
def test_missing_file(tmp_path, name):
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match=f"dataset.files: '.*{name}' is not an existing"):
        prepare_tokens(section(tmp_path, files=[str(tmp_path / name)]))


# ---- Hugging Face tokenizers ----------------------------------------------------------------------------------------

TEXTS = ["the cat sat", "", "on <eos> the mat", "the cat"]


def save_tokenizer(folder, vocabulary, **special_tokens):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # What a Llama tokenizer does when special tokens are asked for: a token before every text.
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    words = ["<unk>", "<bos>", "the", "cat", "sat", "on", "mat"]  # "<eos>" is added behind them
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), words, unk_token="<unk>", eos_token="<eos>")


def jsonl_of(folder, texts):
    return write(folder, a_jsonl="\n".join(json.dumps({"text": text}) for text in texts))


def test_tokenizer_folder(tmp_path, tokenizer_folder):
    tokens = prepare_tokens(section(tmp_path, files=jsonl_of(tmp_path, TEXTS), tokenizer=tokenizer_folder))
    # No <bos>; one <eos> between documents; "<eos>" in a text is not an end of text.
    unknown, _, the, cat, sat, on, mat, eos = range(8)
    assert read(tokens) == [the, cat, sat, eos, on, unknown, the, mat, eos, the, cat]
    assert (tokens.num_documents, tokens.max_token_id, tokens.dtype) == (3, eos, "uint16")
    assert tokens.tokenizer == tokenizer_folder


@pytest.mark.parametrize("size, dtype", [(65536, "uint16"), (65537, "uint32")])
def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path, size, dtype):
    words = ["<unk>", "<bos>", *(f"w{i}" for i in range(2, size - 1))]  # "<eos>" makes it `size`
    folder = save_tokenizer(tmp_path / "wide", words, unk_token="<unk>", eos_token="<eos>")
    files = write(tmp_path, a_txt=f"w3 w{size - 2}", b_txt="w2")
    tokens = prepare_tokens(section(tmp_path, files=files, tokenizer=folder))
    assert read(tokens) == [3, size - 2, size - 1, 2] and (tokens.dtype, tokens.max_token_id) == (dtype, size - 1)


def test_tokenizer_without_end_of_text(tmp_path):
    folder = save_tokenizer(tmp_path / "no_eos", ["<unk>", "<bos>", "the"], unk_token="<unk>")
    with pytest.raises(ValueError, match="dataset.tokenizer '.*no_eos' has no end-of-text token"):
        prepare_tokens(section(tmp_path, files=write(tmp_path, a_txt="the"), tokenizer=folder))


def test_folder_without_tokenizer(tmp_path):
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"dataset.tokenizer '.*nothing' cannot be loaded \(.*bytes\): .") as error:
        prepare_tokens(section(tmp_path, files=write(tmp_path, a_txt="a"), tokenizer=str(tmp_path / "nothing")))
    assert "\n" not in str(error.value)


# ---- the cache ------------------------------------------------------------------------------------------------------


def state_of(tokens):
    return tokens.path, tokens.path.stat().st_ino, tokens.path.stat().st_mtime_ns


def test_second_call_does_nothing(tmp_path, capsys):
    dataset = section(tmp_path, files=write(tmp_path, a_txt="abc"))
    first = prepare_tokens(dataset)
    before = state_of(first)
    assert "tokenising" in capsys.readouterr().err
    dataset.num_proc, dataset.shuffle = 2, True  # decide no token
    second = prepare_tokens(dataset)
    assert second == first and state_of(second) == before
    assert capsys.readouterr().err == ""


def test_everything_that_matters_is_in_the_key(tmp_path, tokenizer_folder):
    files = write(tmp_path, a_jsonl='{"text": "the", "body": "cat"}', b_jsonl='{"text": "mat", "body": "sat"}')
    base = section(tmp_path, files=files)
    paths = [prepare_tokens(base).path]
    for change in (
        dict(files=files[:1]),
        dict(files=files[::-1]),
        dict(text_column="body"),
        dict(tokenizer=tokenizer_folder),
    ):
        paths.append(prepare_tokens(SimpleNamespace(**vars(base) | change)).path)
    Path(files[0]).write_text('{"text": "tha", "body": "cat"}')  # as long as before
    tokens = prepare_tokens(base)
    assert bytes(read(tokens)[:3]) == b"tha"
    assert len({*paths, tokens.path}) == 6


def test_key_of_a_tokenizer_folder_is_its_content(tmp_path, tokenizer_folder):
    copy = shutil.copytree(tokenizer_folder, tmp_path / "copy")
    files = write(tmp_path, a_txt="the cat")

    def key(folder):
        return token_file.cache_key(section(tmp_path, files=files, tokenizer=str(folder)))

    assert key(copy) == key(tokenizer_folder)
    (copy / "model.safetensors").write_bytes(b"weights")
    assert key(copy) == key(tokenizer_folder)
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    assert key(copy) != key(tokenizer_folder)


def test_key_of_a_hub_data_set(tmp_path):
    base = section(tmp_path, name="owner/name")
    changes = [{}, dict(name="owner/other"), dict(subset_name="en"), dict(split="test"), dict(text_column="body")]
    assert len({token_file.cache_key(SimpleNamespace(**vars(base) | change)) for change in changes}) == len(changes)


def test_key_of_a_local_folder_is_its_files(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    base = section(tmp_path, name=str(folder))
    keys = [token_file.cache_key(base)]
    for text in ("one", "another"):
        (folder / "a.jsonl").write_text(json.dumps({"text": text}))
        keys.append(token_file.cache_key(base))
    assert len(set(keys)) == 3


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 2), os.remove], ids=["truncated", "removed"])
def test_damaged_cache_is_built_again(tmp_path, damage):
    dataset = section(tmp_path, files=write(tmp_path, a_txt="abc"))
    damage(prepare_tokens(dataset).path)
    assert bytes(read(prepare_tokens(dataset))) == b"abc"


def prepare_and_report(dataset):
    """In a worker: what was printed, and the file that this process was given."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        tokens = prepare_tokens(dataset)
    return printed.getvalue(), tokens, state_of(tokens)


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_at_once_tokenise_once(tmp_path, pool, world_size):
    files = jsonl_of(tmp_path, [str(number) for number in range(20_000)])
    printed, tokens, states = zip(
        *pool.run(world_size, prepare_and_report, section(tmp_path, files=files)), strict=True
    )
    assert sum("tokenising" in text for text in printed) == 1
    assert len(set(states)) == len(set(tokens)) == 1 and tokens[0].num_documents == 20_000


def fail_to_prepare(dataset):
    with pytest.raises(ValueError) as error:
        prepare_tokens(dataset)
    return str(error.value)


def test_every_process_gets_the_error(tmp_path, pool):
    messages = pool.run(2, fail_to_prepare, section(tmp_path, files=write(tmp_path, a_txt=b"\xff")))
    assert messages[0] == messages[1] and "a.txt" in messages[0]


def test_a_full_disk_is_told_with_the_file(tmp_path, monkeypatch):
    def write(dataset, path):
        raise OSError(errno.ENOSPC, "No space left on device")  # as Python's write raises it: without a name

    monkeypatch.setattr(token_file, "write_tokens", write)
    with pytest.raises(OSError, match=r"No space left on device: '.*/cache/\w+\.partial \(dataset.cache_dir\)'"):
        prepare_tokens(section(tmp_path, files=jsonl_of(tmp_path, ["text"])))


def test_the_sum_is_that_of_the_file(tmp_path):
    tokens = prepare_tokens(section(tmp_path, files=jsonl_of(tmp_path, ["one", "two"])))
    assert tokens.sha256 == hashlib.sha256(tokens.path.read_bytes()).hexdigest()


def test_killed_build_is_built_again(tmp_path):
    dataset = section(tmp_path, files=jsonl_of(tmp_path, ["x" * 50] * 200_000))
    builder = multiprocessing.get_context("fork").Process(target=prepare_tokens, args=(dataset,))
    builder.start()
    deadline = time.monotonic() + 30
    while not (partial := [path for path in tmp_path.glob("cache/*.partial") if path.stat().st_size > 0]):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    whole = (200_000 * 51 - 1) * 2
    assert builder.exitcode == -signal.SIGKILL and 0 < partial[0].stat().st_size < whole
    assert not list(tmp_path.glob("cache/*.json"))

    tokens = prepare_tokens(dataset)
    assert tokens.path.stat().st_size == whole and tokens.num_documents == 200_000
    ids = np.fromfile(tokens.path, tokens.dtype)
    assert (ids[50::51] == EOT).all() and (np.delete(ids, np.s_[50::51]) == ord("x")).all()
    assert not list(tmp_path.glob("cache/*.partial"))


# ---- a process of its own: what is imported, the hub out of reach, threads ------------------------------------------

FRESH_PROCESS = """
import json, os, sys
from types import SimpleNamespace
from token_file import prepare_tokens

cached, name, tokenizer, one, three = [SimpleNamespace(**keys) for keys in json.loads(sys.argv[1])]
report = {"cached": prepare_tokens(cached).num_tokens}
report["imported"] = sorted({"datasets", "transformers", "tokenizers", "pyarrow"} & set(sys.modules))
for key, dataset in (("name", name), ("tokenizer", tokenizer)):
    try:
        prepare_tokens(dataset)
    except ValueError as error:
        report[key] = str(error)
for key, dataset in (("one", one), ("three", three)):
    before = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else None
    path = str(prepare_tokens(dataset).path)
    report[key] = {"path": path, "threads": before and len(os.listdir("/proc/self/task")) - before}
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def fresh_process(tmp_path_factory, tokenizer_folder):
    folder = tmp_path_factory.mktemp("fresh")
    files = jsonl_of(folder, TEXTS * 200)
    cached = section(folder, files=files)
    prepare_tokens(cached)
    sections = [
        cached,
        section(folder, name="no-such/data"),
        section(folder, files=files, tokenizer="no-such/tokenizer"),
    ]
    for number in (1, 3):
        sections.append(section(folder / str(number), files=files, tokenizer=tokenizer_folder, num_proc=number))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    for variable in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"):
        environment.pop(variable, None)
    command = [sys.executable, "-c", FRESH_PROCESS, json.dumps([vars(dataset) for dataset in sections])]
    folder = Path(token_file.__file__).parent
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_cached_data_needs_no_heavy_import(fresh_process):
    assert fresh_process["cached"] > 0 and fresh_process["imported"] == []


@pytest.mark.parametrize(
    "key, parts",
    [
        ("name", ["dataset.name 'no-such/data'", "dataset.files", "python-stdlib", "Couldn't reach"]),
        ("tokenizer", ["dataset.tokenizer 'no-such/tokenizer'", "a folder, or bytes", "outgoing traffic"]),
    ],
)
def test_hub_out_of_reach(fresh_process, key, parts):
    assert all(part in fresh_process[key] for part in parts) and "\n" not in fresh_process[key]


def test_num_proc(fresh_process):
    one, three = fresh_process["one"], fresh_process["three"]
    assert one["path"] != three["path"] and Path(one["path"]).read_bytes() == Path(three["path"]).read_bytes()
    if one["threads"] is not None:  # where threads can be counted
        assert (one["threads"], three["threads"]) == (0, 3)


# ---- batches --------------------------------------------------------------------------------------------------------

SEQ = 4


def numbered_tokens(folder, num_tokens):
    """Token k is k, so that a sequence shows where it comes from."""
    path = folder / f"{num_tokens}.bin"
    np.arange(num_tokens, dtype=np.uint16).tofile(path)
    return TokenFile(path, num_tokens, "uint16", num_tokens - 1, 1, "bytes", "")


def make_loader(tokens, step=0, **keys):
    defaults = dict(seq_length=SEQ, micro_batch_size=2, gradient_accumulation_steps=2, dp_rank=0, dp_size=1)
    loader = MicroBatchDataLoader(tokens, **defaults | dict(seed=1, shuffle=False, device="cpu") | keys)
    loader.step = step
    return loader


def micro_batches(tokens, step, dp_size, **keys):
    """The sequences' numbers in each micro-batch of a step, in the order in which dp ranks take turns."""
    loaders = [make_loader(tokens, step, dp_size=dp_size, dp_rank=rank, **keys) for rank in range(dp_size)]
    steps = range(loaders[0].gradient_accumulation_steps)
    return [(loader[i]["input_ids"][:, 0] // SEQ).tolist() for i in steps for loader in loaders]


FACTORS = [(8, 1, 1), (1, 8, 1), (2, 4, 1), (2, 2, 2), (4, 1, 2), (1, 4, 2), (1, 2, 4), (2, 1, 4), (1, 1, 8)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("micro_batch_size, accumulation, dp_size", FACTORS)
def test_global_batch_does_not_depend_on_how_it_factors(tmp_path, micro_batch_size, accumulation, dp_size, shuffle):
    tokens = numbered_tokens(tmp_path, 30 * SEQ + 1)  # 30 sequences: 3 steps an epoch, 6 sequences left over
    factors = dict(micro_batch_size=micro_batch_size, gradient_accumulation_steps=accumulation, dp_size=dp_size)
    reference = make_loader(tokens, micro_batch_size=8, gradient_accumulation_steps=1, shuffle=shuffle)
    for step in range(7):
        batches = micro_batches(tokens, step, shuffle=shuffle, **factors)
        assert [len(batch) for batch in batches] == [micro_batch_size] * (accumulation * dp_size)
        reference.step = step
        assert sum(batches, []) == (reference[0]["input_ids"][:, 0] // SEQ).tolist()
        if not shuffle:
            assert sum(batches, []) == list(range(step % 3 * 8, step % 3 * 8 + 8))


def test_dp_ranks_share_the_micro_batches_of_one(tmp_path):
    tokens = numbered_tokens(tmp_path, 30 * SEQ + 1)
    one = micro_batches(tokens, 1, dp_size=1, gradient_accumulation_steps=4, shuffle=True)
    two = micro_batches(tokens, 1, dp_size=2, gradient_accumulation_steps=2, shuffle=True)
    assert one == two


def epoch_of(tokens, epoch, seed):
    steps = make_loader(tokens).steps_per_epoch
    batches = [micro_batches(tokens, epoch * steps + i, dp_size=1, seed=seed, shuffle=True) for i in range(steps)]
    return sum(sum(batches, []), [])


def test_an_epoch_is_a_permutation_by_seed_and_epoch(tmp_path):
    tokens = numbered_tokens(tmp_path, 30 * SEQ + 1)
    epochs = {(seed, epoch): epoch_of(tokens, epoch, seed) for seed in (1, 2) for epoch in (0, 1, 2)}
    assert len(set(map(tuple, epochs.values()))) == 6
    for (seed, epoch), order in epochs.items():
        assert len(order) == 28 and max(Counter(order).values()) == 1 and set(order) <= set(range(30))
        assert order != sorted(order)
        assert order == epoch_of(tokens, epoch, seed)
        assert order == np.random.default_rng((seed, epoch)).permutation(30)[:28].tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_targets_are_the_inputs_shifted_by_one_across_epochs(tmp_path, shuffle):
    tokens = numbered_tokens(tmp_path, 9 * SEQ + 1)  # the last token is only ever a target
    loader = make_loader(tokens, shuffle=shuffle)
    assert loader.steps_per_epoch == 2
    for loader.step in range(5):
        for i in range(2):
            batch = loader[i]
            assert (batch["target_ids"] == batch["input_ids"] + 1).all()
            assert (batch["input_ids"] == batch["input_ids"][:, :1] + torch.arange(SEQ)).all()
            assert all(x.dtype == torch.int64 and x.shape == (2, SEQ) and x.is_contiguous() for x in batch.values())


def test_a_micro_batch_depends_on_nothing_asked_before(tmp_path):
    tokens = numbered_tokens(tmp_path, 30 * SEQ + 1)
    keys = dict(gradient_accumulation_steps=4, micro_batch_size=1, shuffle=True)
    loader = make_loader(tokens, **keys)
    questions = [(0, 0), (0, 3), (0, 0), (9, 1), (0, 1), (8, 2), (9, 1), (100, 3)]  # epochs 0, 1, 14 in turn
    for loader.step, i in questions:
        resumed = make_loader(tokens, loader.step, **keys)
        assert all(torch.equal(loader[i][key], resumed[i][key]) for key in ("input_ids", "target_ids"))
    assert not torch.equal(loader[0]["input_ids"], loader[1]["input_ids"])


def test_a_token_file_that_has_changed_is_told(tmp_path):
    tokens = numbered_tokens(tmp_path, 100)
    np.full(100, 0xFFFF, dtype=np.uint16).tofile(tokens.path)  # as long as it was
    with pytest.raises(ValueError, match=r"100\.bin has changed since it was written; delete it"):
        make_loader(tokens)[0]


def test_micro_batch_out_of_range(tmp_path):
    loader = make_loader(numbered_tokens(tmp_path, 100))
    for micro_batch in (-1, 2):
        with pytest.raises(AssertionError):
            loader[micro_batch]


def test_uint32_tokens(tmp_path):
    path = tmp_path / "wide.bin"
    np.array([70_000, 5, 1 << 31, 7], dtype=np.uint32).tofile(path)
    tokens = TokenFile(path, 4, "uint32", 1 << 31, 1, "wide", "")
    loader = make_loader(tokens, seq_length=3, micro_batch_size=1, gradient_accumulation_steps=1)
    assert loader[0]["input_ids"].tolist() == [[70_000, 5, 1 << 31]] and loader[0]["target_ids"].tolist() == [
        [5, 1 << 31, 7]
    ]


@pytest.mark.parametrize("num_tokens", [20, 32])
def test_too_little_data_for_a_sequence(tmp_path, num_tokens):
    tokens = prepare_tokens(section(tmp_path, files=write(tmp_path, a_txt="x" * num_tokens)))
    with pytest.raises(ValueError, match=f"^the data set has {num_tokens} tokens; one sequence needs 33$"):
        make_loader(tokens, seq_length=32)


def test_as_little_data_as_a_batch_needs(tmp_path):
    keys = dict(micro_batch_size=2, gradient_accumulation_steps=3, dp_size=2)
    loader = make_loader(numbered_tokens(tmp_path, 12 * SEQ + 1), **keys)
    assert loader.steps_per_epoch == 1 and loader[2]["input_ids"].shape == (2, SEQ)
    with pytest.raises(ValueError) as error:
        make_loader(numbered_tokens(tmp_path, 12 * SEQ), **keys)
    assert str(error.value) == (
        "the data set has 11 sequences of 4 tokens; one global batch needs 12 = micro_batch_size 2 x "
        "gradient_accumulation_steps 3 x dp_size 2: lower one of these, or seq_length"
    )


def test_vocabulary_must_hold_every_token_of_the_data(tmp_path):
    one = prepare_tokens(section(tmp_path, files=write(tmp_path, a_txt=b"a\xc3\xbf")))
    check_vocabulary(one, 256)  # a single document has no separator
    two = prepare_tokens(section(tmp_path, files=write(tmp_path, a_txt="a", b_txt="b")))
    check_vocabulary(two, 257)
    with pytest.raises(ValueError, match=r"model.vocab_size is 256, but .*'bytes'.* token id 256: .* at least 257$"):
        check_vocabulary(two, 256)
