"""Checks of Megatron's .bin/.idx pairs, before anything is built on them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerobubble.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")  # version, type of token, sequences, documents
_TYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Indexed:
    """A checked pair: `lengths` are the tokens of each sequence."""

    prefix: str
    lengths: np.ndarray
    dtype: type[np.generic]

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return int(self.lengths.sum(dtype=np.int64))

    def largest_token(self) -> int:
        """The largest id, read block by block."""
        data = np.memmap(self.prefix + ".bin", dtype=self.dtype, mode="r")
        blocks = range(0, len(data), _BLOCK)
        return max((int(data[at : at + _BLOCK].max()) for at in blocks), default=-1)


def check_indexed(prefix: str) -> Indexed:
    """The pair PREFIX.bin, PREFIX.idx. Raises UserError where it is missing or not whole."""
    for ending in (".bin", ".idx"):
        if prefix.endswith(ending) and Path(prefix).is_file():
            raise UserError(f"--data-path {prefix} is a file; give the prefix {prefix[:-4]}")
        if not Path(prefix + ending).is_file():
            raise UserError(f"--data-path {prefix}: {prefix}{ending} is not there{_hint(prefix)}")
    path = Path(prefix + ".idx")
    size = path.stat().st_size
    start = len(_MAGIC) + _HEADER.size
    with path.open("rb") as file:
        head = file.read(start)
        if not head.startswith(_MAGIC[: len(head)]) or len(head) < len(_MAGIC):
            raise UserError(f"{path} is not a Megatron index (it does not start with MMIDIDX)")
        if len(head) < start:
            raise UserError(f"{path} is cut off: {size} bytes, its header alone has {start}")
        version, code, sequences, documents = _HEADER.unpack(head[len(_MAGIC) :])
        if version != 1 or code not in _TYPES:
            raise UserError(f"{path} has version {version} and token type {code}; not known here")
        needed = start + 12 * sequences + 8 * documents
        if size < needed:
            raise UserError(
                f"{path} is cut off: {size} bytes, its {sequences} sequences and {documents} "
                f"documents need {needed}; write it again"
            )
        lengths = np.fromfile(file, dtype=np.int32, count=sequences)
    indexed = Indexed(prefix, lengths, _TYPES[code])
    if not indexed.tokens:
        raise UserError(f"--data-path {prefix} holds no tokens")
    wanted = indexed.tokens * np.dtype(_TYPES[code]).itemsize
    found = Path(prefix + ".bin").stat().st_size
    if found != wanted:
        raise UserError(
            f"{prefix}.bin has {found} bytes, its index speaks of {wanted}; one of them is cut "
            "off or of another data set"
        )
    return indexed


def _hint(prefix: str) -> str:
    """Megatron's preprocess_data.py adds `_text_document` to the prefix it is given."""
    longer = prefix + "_text_document"
    return f"; did you mean {longer}?" if Path(longer + ".idx").is_file() else ""
