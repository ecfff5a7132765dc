"""Tokenizers: bytes, GPT-2's BPE and SentencePiece, by Megatron-LM's names."""

from __future__ import annotations

import difflib
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

from zerobubble.errors import UserError


class Tokenizer(Protocol):
    """Text to ids and back. megatron-core's datasets read the properties too."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def eod(self) -> int:
        """The id that ends a document."""

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """What tells this tokenizer from others, for the names of cached indices."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`, without an end of document."""

    def detokenize(self, ids: list[int]) -> str:
        """The text of `ids`."""


class ByteTokenizer:
    """UTF-8 bytes, 256 ids; byte 0, which text does not hold, ends a document."""

    vocab_size = 256
    eod = 0

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Its name."""
        return OrderedDict({"class": "ByteTokenizer"})

    def tokenize(self, text: str) -> list[int]:
        """The bytes of `text`. Raises UserError for one that holds byte 0."""
        data = text.encode()
        if self.eod in data:
            raise UserError(
                f"a text holds byte 0 at byte {data.index(self.eod)}, which ends a document here; "
                "remove it"
            )
        return list(data)

    def detokenize(self, ids: list[int]) -> str:
        """The text; bytes that are no UTF-8 are replaced."""
        return bytes(ids).decode(errors="replace")


class GPT2BPETokenizer:
    """GPT-2's byte-level BPE from its vocab.json and merges.txt (the `tokenizers` library)."""

    END = "<|endoftext|>"

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        from tokenizers import ByteLevelBPETokenizer

        self._files = vocab_file, merge_file
        for path, flag in ((vocab_file, "--vocab-file"), (merge_file, "--merge-file")):
            _readable(path, flag)
        try:
            self._bpe = ByteLevelBPETokenizer(vocab_file, merge_file)
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(
                f"--vocab-file {vocab_file} and --merge-file {merge_file} are not a GPT-2 "
                f"vocabulary: {_line(error)}"
            ) from error
        self.vocab_size: int = self._bpe.get_vocab_size()
        end = self._bpe.token_to_id(self.END)
        if end is None:
            raise UserError(f"--vocab-file {vocab_file} has no {self.END}")
        self.eod: int = end

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Its name and files."""
        return OrderedDict({"class": "GPT2BPETokenizer", "files": self._files})

    def tokenize(self, text: str) -> list[int]:
        """GPT-2's ids of `text`."""
        ids: list[int] = self._bpe.encode(text).ids
        return ids

    def detokenize(self, ids: list[int]) -> str:
        """The text of `ids`."""
        text: str = self._bpe.decode(ids, skip_special_tokens=False)
        return text


class SentencePieceTokenizer:
    """A SentencePiece model, as Llama's; its end of sequence ends a document."""

    def __init__(self, model: str) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = model
        _readable(model, "--tokenizer-model")
        try:
            self._processor = SentencePieceProcessor(model_file=model)
        except Exception as error:  # the library raises RuntimeError and others
            raise UserError(
                f"--tokenizer-model {model} is not a SentencePiece model: {_line(error)}"
            ) from error
        self.vocab_size: int = self._processor.vocab_size()
        self.eod: int = self._processor.eos_id()
        if self.eod < 0:
            raise UserError(f"--tokenizer-model {model} has no end-of-sequence piece")

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Its name and model."""
        return OrderedDict({"class": "SentencePieceTokenizer", "model": self._model})

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text`."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def detokenize(self, ids: list[int]) -> str:
        """The text of `ids`."""
        text: str = self._processor.decode(ids)
        return text


_KINDS = {
    "bytes": "bytes",
    "ByteTokenizer": "bytes",
    "GPT2BPETokenizer": "gpt2",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
}


def build_tokenizer(
    kind: str | None, vocab_file: str | None, merge_file: str | None, model: str | None
) -> Tokenizer:
    """The tokenizer of that name; without one GPT-2's if there is a vocabulary, else bytes.

    Raises UserError for an unknown name, or a file that is needed and missing, not needed and
    given, or not what it should be.
    """
    name = kind or ("GPT2BPETokenizer" if vocab_file else "bytes")
    if name not in _KINDS:
        nearest = difflib.get_close_matches(name, _KINDS, n=1, cutoff=0.0)[0]
        raise UserError(
            f"unknown --tokenizer-type {name}; the nearest known one is {nearest} "
            f"(of {', '.join(_KINDS)})"
        )
    files = {"--vocab-file": vocab_file, "--merge-file": merge_file, "--tokenizer-model": model}
    needed = {
        "bytes": (),
        "gpt2": ("--vocab-file", "--merge-file"),
        "sentencepiece": ("--tokenizer-model",),
    }[_KINDS[name]]
    for flag, value in files.items():
        if value is None and flag in needed:
            raise UserError(f"--tokenizer-type {name} needs {flag}")
        if value is not None and flag not in needed:
            raise UserError(f"{flag} is of no use to --tokenizer-type {name}; remove one")
    if vocab_file and merge_file:
        return GPT2BPETokenizer(vocab_file, merge_file)
    return SentencePieceTokenizer(model) if model else ByteTokenizer()


def _readable(path: str, flag: str) -> None:
    if not Path(path).is_file():
        raise UserError(f"{flag} {path} is not there")


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
