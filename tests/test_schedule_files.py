"""Custom schedules from files: round trips, every fault refused with row, op and reason (C11)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.ranks import run_ranks
from tests.test_training import TINY, losses, train
from zerobubble.errors import UserError
from zerobubble.schedule import families
from zerobubble.schedule.files import load_schedule
from zerobubble.schedule.formats import to_json
from zerobubble.schedule.torch_csv import from_csv, to_csv
from zerobubble.training.arguments import parse

VALID = families.build("zb-v", 2, 4)


@given(
    st.sampled_from([n for n in families.names() if n != "seq1f1b"]),
    st.integers(1, 5),
    st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_csv_comes_back(name: str, ranks: int, microbatches: int) -> None:
    schedule = families.build(name, ranks, microbatches)
    back = from_csv(to_csv(schedule), schedule.name)
    assert back.orders == schedule.orders
    assert back.placement.rank_of == schedule.placement.rank_of
    assert back.microbatches == microbatches


def test_idle_slots_and_overlapped_ops() -> None:
    schedule = from_csv("0F0,,0F1,0B0,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1,\n")
    assert [op.text for op in schedule.orders[1]] == ["1F0", "1F1", "1B0", "1B1"]
    assert schedule.placement.name == "linear"


def _rows() -> list[list[str]]:
    return [[op.text for op in order] for order in VALID.orders]


def _edit(rank: int, old: str, *new: str) -> list[list[str]]:
    rows = _rows()
    at = rows[rank].index(old)
    rows[rank][at : at + 1] = new
    return rows


def _moved(rank: int, op: str, before: str) -> list[list[str]]:
    rows = _rows()
    rows[rank].remove(op)
    rows[rank].insert(rows[rank].index(before), op)
    return rows


def _elsewhere() -> list[list[str]]:
    rows = _edit(0, "0F2")
    rows[1].insert(0, "0F2")
    return rows


MUTANTS = {
    "W missing": (_edit(0, "0W2"), "0W2|W of microbatch 2 on stage 0"),
    "F twice": (_edit(1, "1F1", "1F1", "1F1"), "F of microbatch 1 on stage 1.*second time"),
    "W before B": (_moved(0, "0W1", "0I1"), "W of microbatch 1 on stage 0"),
    "B before F": (_moved(1, "1I0", "1F0"), "B of microbatch 0 on stage 1"),
    "stage on a wrong rank": (_elsewhere(), "rank 1, op 0 .F of microbatch 2 on stage 0"),
    "unknown op": (_edit(0, "0F1", "0X1"), "row 0, cell .*'0X1'|rank 0, op .*'0X1'"),
    "garbled cell": (_edit(1, "1F1", "1F"), "row 1, cell .*'1F'|rank 1, op .*'1F'"),
    "extra row": ([*_rows(), ["0F0"]], "rows"),
    "interleaved ops on a V placement": (
        [[op.text for op in row] for row in families.build("interleaved", 2, 4).orders],
        "rank|row",
    ),
    "stage missing": (
        [[c for c in row if not c.startswith("1")] for row in _rows()],
        "stage 1",
    ),
}


@pytest.mark.parametrize("ending", [".csv", ".json"])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_refused(name: str, ending: str, tmp_path: Path) -> None:
    rows, message = MUTANTS[name]
    path = tmp_path / f"mutant{ending}"
    if ending == ".csv":
        if name.startswith("interleaved"):
            return  # a CSV names no placement: as one of its own, it is right
        path.write_text("\n".join(",".join(row) for row in rows))
    else:
        whole = json.loads(to_json(VALID))
        path.write_text(json.dumps({**whole, "orders": rows}))
    with pytest.raises(UserError, match=message) as error:
        load_schedule(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.txt", "", "is neither .json nor .csv"),
        ("x.csv", "", "holds no op"),
        ("x.json", "{", "broken or cut off"),
        ("x.csv", "0F0.1,0B0", "has a slice"),
    ],
)
def test_files_that_are_no_schedules(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_schedule(str(tmp_path / name))
    with pytest.raises(UserError, match="cannot be read"):
        load_schedule(str(tmp_path / "none.csv"))


@pytest.mark.parametrize("ending", [".csv", ".json"])
def test_a_loaded_schedule_trains_to_the_same_bits(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"custom{ending}"
    path.write_text(to_csv(VALID) if ending == ".csv" else to_json(VALID))
    assert load_schedule(str(path)).orders == VALID.orders
    text = f"{TINY} --global-batch-size 4 --train-iters 2"
    plain = losses(train(2, text, tmp_path / "log"))
    assert losses(train(2, f"{text} --schedule {path}", tmp_path / "log")) == plain


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pipeline-model-parallel-size 4", "is for 2 ranks, --pipeline-model-parallel-size is 4"),
        ("--pipeline-model-parallel-size 2", "is for 4 microbatches, the batch sizes give 8"),
    ],
)
def test_a_loaded_schedule_must_fit_the_run(flags: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(to_csv(VALID))
    text = f"{TINY} --train-iters 1 --global-batch-size 8 --schedule {tmp_path}/x.csv {flags}"
    with pytest.raises(UserError, match=message):
        parse(text.split())


def _torch_runtime(rank: int, path: str) -> Any:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    held = [PipelineStage(layers[s], s, 4, torch.device("cpu")) for s in (rank, 3 - rank)]
    runtime = _PipelineScheduleRuntime(held, 4, loss_fn=lambda y, t: ((y - t) ** 2).sum())
    runtime._load_csv(path)
    torch.manual_seed(1)
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    values: list[torch.Tensor] = []
    if rank == 0:
        runtime.step(x, target=target, losses=values)
    else:
        runtime.step()
    return [value.item() for value in values]


def test_torchs_runtime_runs_our_csv(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(to_csv(VALID))
    found = run_ranks(_torch_runtime, 2, str(tmp_path / "x.csv"))[0]
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
    torch.manual_seed(1)
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    expected = [
        ((layers(x[i : i + 2]) - target[i : i + 2]) ** 2).sum().item() for i in (0, 2, 4, 6)
    ]
    assert found == pytest.approx(expected, rel=1e-5)
