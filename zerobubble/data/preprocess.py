"""Text to Megatron's .bin/.idx, through megatron-core's own builder."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerobubble.data.tokenizer import Tokenizer
from zerobubble.errors import UserError


@dataclass(frozen=True)
class Written:
    """What `preprocess` wrote."""

    prefix: str
    documents: int
    tokens: int


def preprocess(
    inputs: Sequence[str],
    prefix: str,
    make_tokenizer: Callable[[], Tokenizer],
    *,
    json_key: str = "text",
    append_eod: bool = False,
    workers: int = 1,
    advance: Callable[[int], None] = lambda _: None,
) -> Written:
    """Write PREFIX.bin and PREFIX.idx, which `--data-path PREFIX` reads.

    inputs: files that end in .json or .jsonl hold one document per line, under `json_key`;
    any other file is one document. append_eod: end every document with the tokenizer's end of
    document. Empty documents are left out. `advance` is told of every document done.

    The pair appears when it is whole. Raises UserError for an input that cannot be read,
    naming file and line, or an output that cannot be written.
    """
    tokenizer = make_tokenizer()
    for name in inputs:
        if not Path(name).is_file():
            what = "is a folder; name its files" if Path(name).is_dir() else "is not there"
            raise UserError(f"--input {name} {what}")
    dtype = np.uint16 if tokenizer.vocab_size < 65500 else np.int32  # as Megatron chooses
    end = [tokenizer.eod] if append_eod else []
    partial_bin, partial_idx = f"{prefix}.partial.bin", f"{prefix}.partial.idx"
    documents = tokens = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPU libraries that are not needed here
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(partial_bin, dtype=dtype)
        for ids in _encode(_documents(inputs, json_key), make_tokenizer, workers):
            if ids:
                row = np.array(ids + end, dtype=np.int64)
                builder.add_document(row, [len(row)])
                documents, tokens = documents + 1, tokens + len(row)
            advance(1)
        if not documents:
            raise UserError(f"--input {' '.join(inputs)} holds no text")
        builder.finalize(partial_idx)
        Path(partial_bin).replace(f"{prefix}.bin")
        Path(partial_idx).replace(f"{prefix}.idx")
    except OSError as error:
        raise UserError(f"--output-prefix {prefix} cannot be written: {error.strerror}") from error
    finally:
        Path(partial_bin).unlink(missing_ok=True)
        Path(partial_idx).unlink(missing_ok=True)
    return Written(prefix, documents, tokens)


def _documents(inputs: Sequence[str], json_key: str) -> Iterator[str]:
    for name in inputs:
        try:
            with open(name, encoding="utf-8-sig") as file:
                if not name.endswith((".json", ".jsonl")):
                    yield file.read()
                    continue
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _text(line, json_key, f"{name}, line {number}")
        except UnicodeDecodeError as error:
            raise UserError(f"--input {name} is not UTF-8: byte {error.start}") from error


def _text(line: str, json_key: str, where: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg}") from error
    if not isinstance(value, dict) or not isinstance(value.get(json_key), str):
        raise UserError(f"{where} has no text under {json_key!r}; name the key with --json-key")
    text: str = value[json_key]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} holds half a surrogate pair, which is no text") from error
    return text


def _encode(
    documents: Iterator[str], make_tokenizer: Callable[[], Tokenizer], workers: int
) -> Iterator[list[int]]:
    if workers <= 1:
        tokenizer = make_tokenizer()
        for document in documents:
            yield tokenizer.tokenize(document)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start, (make_tokenizer,)) as pool:
        yield from pool.imap(_tokenize, documents, chunksize=32)


_worker: dict[str, Tokenizer] = {}  # one tokenizer per worker process


def _start(make_tokenizer: Callable[[], Tokenizer]) -> None:
    _worker["tokenizer"] = make_tokenizer()


def _tokenize(document: str) -> list[int]:
    return _worker["tokenizer"].tokenize(document)
