"""
    tokens = prepare_tokens(config.dataset)       # tokenised once, afterwards read from the cache
    tokens.open()                                 # all of it as an array that lies on disk

All documents become one flat file of token ids, one end-of-text token between two documents. Nothing here knows about
process groups: every process calls `prepare_tokens`, one of them works, the others wait for its file.
"""

import hashlib
import itertools
import json
import os
import platform
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

FORMAT_VERSION = 1  # part of the cache key: to be raised when the same documents would give another token file


@dataclass(frozen=True)
class TokenFile:
    """A flat binary file of token ids, and what was counted while it was written."""

    path: Path
    num_tokens: int
    dtype: str
    max_token_id: int
    num_documents: int
    tokenizer: str
    sha256: str  # of all the tokens, in bytes
    first_token: int = 0  # where this part of the file begins

    def split(self, fraction: float) -> tuple["TokenFile", "TokenFile"]:
        """The tokens without the last `fraction` of them, and that."""
        cut = self.num_tokens - int(self.num_tokens * fraction)
        last = replace(self, num_tokens=self.num_tokens - cut, first_token=self.first_token + cut)
        return replace(self, num_tokens=cut), last

    def open(self) -> np.ndarray:
        size = np.dtype(self.dtype).itemsize
        return np.memmap(self.path, self.dtype, "r", offset=self.first_token * size, shape=(self.num_tokens,))

    def __str__(self) -> str:
        return f"{self.num_documents:,} documents, {self.num_tokens:,} tokens (tokenizer {self.tokenizer})"


def check_vocabulary(tokens: TokenFile, vocab_size: int) -> None:
    if tokens.max_token_id >= vocab_size:
        raise ValueError(
            f"model.vocab_size is {vocab_size}, but the data (dataset.tokenizer {tokens.tokenizer!r}) has token id "
            f"{tokens.max_token_id}: model.vocab_size must be at least {tokens.max_token_id + 1}"
        )


# ---- Documents: text, one after the other ---------------------------------------------------------------------------


def standard_library_files() -> list[Path]:
    """The Python standard library's own source (600 to 750 files, 11 to 12 MB): real text without a download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(path for path in root.rglob("*.py") if skipped.isdisjoint(path.relative_to(root).parts))


def text_of(row: dict, text_column: str, where: str) -> str:
    if text_column not in row:
        raise ValueError(f"{where} has no column {text_column!r} (dataset.text_column); its columns: {', '.join(row)}")
    if not isinstance(row[text_column], str):
        raise ValueError(
            f"{where} has {row[text_column]!r:.60} in column {text_column!r} (dataset.text_column): not text"
        )
    return row[text_column]


def read_jsonl(path: Path, text_column: str):
    # Not through `datasets`: that refuses rows whose other columns differ, turns a missing column into null, and does
    # not say where in a file the error is.
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
                if not isinstance(row, dict):
                    raise ValueError(f"it is {line.decode().strip()[:60]}")
                str(row.get(text_column)).encode()  # half a surrogate pair: JSON can escape it, UTF-8 cannot hold it
            except ValueError as error:
                raise ValueError(f"line {number} is not a JSON object: {error}") from None
            yield text_of(row, text_column, f"line {number}")


def read_rows(text_column: str, *args, **kwargs):
    from datasets import load_dataset

    for number, row in enumerate(load_dataset(*args, **kwargs)):
        yield text_of(row, text_column, f"row {number}")


def read_file(path: Path, text_column: str):
    if path.suffix.lower() == ".parquet":
        yield from read_rows(text_column, "parquet", data_files=str(path), split="train")
    elif path.suffix.lower() == ".jsonl":
        yield from read_jsonl(path, text_column)
    else:
        yield path.read_bytes().decode()  # a UnicodeDecodeError says which byte


def read_documents(dataset):
    if dataset.files or dataset.name == "python-stdlib":
        paths = map(Path, dataset.files) if dataset.files else standard_library_files()
        sources = ((str(path), read_file(path, dataset.text_column)) for path in paths)
    else:
        source = f"dataset.name {dataset.name!r} (where the hub is out of reach: dataset.files, or python-stdlib)"
        sources = [(source, read_rows(dataset.text_column, dataset.name, dataset.subset_name, split=dataset.split))]
    for source, documents in sources:
        try:
            yield from documents
        except Exception as error:  # `datasets` has kinds of its own
            raise ValueError(f"{source}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # the library says "an error occurred", its cause says which
        error = error.__cause__
    return " ".join(str(error).split())


# ---- Tokens: documents, in one file ---------------------------------------------------------------------------------


def load_tokenizer(name: str, num_proc: int):
    """(function from a list of texts to their token ids, end-of-text id, largest id)"""
    if name == "bytes":
        return lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts], 256, 256
    # The tokenizers library is parallel inside (threads, no Python); it reads these when it first encodes a batch.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_proc > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(num_proc)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # OSError, ValueError, and the Rust library's plain Exception
        hint = "where the hub is out of reach: a folder, or bytes"
        raise ValueError(f"dataset.tokenizer {name!r} cannot be loaded ({hint}): {one_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"dataset.tokenizer {name!r} has no end-of-text token (eos_token) to put between documents")

    def encode(texts):  # split_special_tokens: a "</s>" in a text is text; the end-of-text id only comes from us
        return tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    return encode, tokenizer.eos_token_id, max(tokenizer.get_vocab().values())


def write_tokens(dataset, path: Path) -> dict:
    """Tokenise all documents into the file `path`; return what TokenFile says about it."""
    encode, end_of_text, largest_id = load_tokenizer(dataset.tokenizer, dataset.num_proc)
    dtype = np.dtype(np.uint16 if largest_id <= np.iinfo(np.uint16).max else np.uint32)
    num_tokens, num_documents, max_token_id, digest = 0, 0, 0, hashlib.sha256()
    documents = read_documents(dataset)
    with open(path, "wb") as file, tqdm(desc="tokenising", unit=" documents", mininterval=1.0) as progress:
        while batch := list(itertools.islice(documents, 64)):
            for ids in filter(len, encode(batch)):  # an empty document gets no separator either
                for part in ([end_of_text], ids) if num_documents > 0 else (ids,):
                    part = np.asarray(part, dtype=dtype)
                    file.write(part)
                    digest.update(part)
                    num_tokens += len(part)
                    max_token_id = max(max_token_id, int(part.max()))
                num_documents += 1
            progress.set_postfix(tokens=f"{num_tokens:,}", refresh=False)
            progress.update(len(batch))
        file.flush()
        os.fsync(file.fileno())
    if num_tokens == 0:
        raise ValueError(f"the data set {dataset.files or dataset.name} is empty: no document has any text")
    counts = {"num_documents": num_documents, "num_tokens": num_tokens, "max_token_id": max_token_id}
    return counts | {"dtype": dtype.name, "tokenizer": dataset.tokenizer, "sha256": digest.hexdigest()}


# ---- Cache: one process tokenises, all others and all later runs read -----------------------------------------------


def known_file(name: str) -> Path:
    if Path(name).suffix.lower() not in (".txt", ".jsonl", ".parquet") or not Path(name).is_file():
        raise ValueError(f"dataset.files: {name!r} is not an existing .txt, .jsonl or .parquet file")
    return Path(name)


def file_identity(path: Path) -> tuple:
    return str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns


def cache_key(dataset) -> str:
    """A hash of everything that decides the tokens (of what lies on the hub: its name)."""
    if dataset.files:
        source = [file_identity(known_file(name)) for name in dataset.files]
    elif dataset.name == "python-stdlib":
        source = [dataset.name, platform.python_version(), sysconfig.get_paths()["stdlib"]]
    else:
        source = [dataset.name, dataset.subset_name, dataset.split]
        source += [file_identity(path) for path in sorted(Path(dataset.name).rglob("*")) if path.is_file()]  # local
    tokenizer = dataset.tokenizer
    if Path(tokenizer).is_dir():  # a model's folder: its weights are large and decide no token
        files = sorted(path for path in Path(tokenizer).iterdir() if path.is_file() and path.suffix != ".safetensors")
        tokenizer = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]
    decisive = json.dumps([FORMAT_VERSION, source, dataset.text_column, tokenizer])
    return hashlib.sha256(decisive.encode()).hexdigest()


def read_cache(path: Path) -> TokenFile | None:
    try:
        tokens = TokenFile(path=path, **json.loads(path.with_suffix(".json").read_text()))
        whole = path.stat().st_size == tokens.num_tokens * np.dtype(tokens.dtype).itemsize
    except (FileNotFoundError, ValueError, TypeError):  # never built, or damaged: built again
        return None
    return tokens if whole else None


def prepare_tokens(dataset) -> TokenFile:
    """The data set as tokens on disk. Every process calls this: one tokenises, the others wait for it."""
    path = Path(dataset.cache_dir) / f"{cache_key(dataset)}.bin"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ValueError(f"dataset.cache_dir: {problem}") from None
    if tokens := read_cache(path):
        return tokens
    # A file lock, not a barrier: there is no process group yet, so no timeout, and the lock dies with its process.
    with FileLock(path.with_suffix(".lock")):
        if tokens := read_cache(path):
            return tokens
        partial = path.with_suffix(".partial")
        try:
            description = write_tokens(dataset, partial)
            os.replace(partial, path)
            # The .json makes an entry valid and comes last: what a killed build leaves is never taken for whole.
            partial.write_text(json.dumps(description))
            os.replace(partial, path.with_suffix(".json"))
        except OSError as problem:  # that of a write does not name the file
            problem.filename = problem.filename or f"{partial} (dataset.cache_dir)"
            raise
        finally:
            partial.unlink(missing_ok=True)
    return read_cache(path)
