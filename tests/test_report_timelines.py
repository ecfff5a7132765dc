"""Traces, pictures and comparisons of timelines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from zerobubble.errors import UserError
from zerobubble.report.chrome_trace import read_chrome_trace, to_chrome_trace, write_chrome_trace
from zerobubble.report.compare import compare
from zerobubble.report.picture import draw
from zerobubble.schedule import families
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.placement import linear
from zerobubble.schedule.simulate import simulate
from zerobubble.schedule.timeline import Timeline


def timeline_of(name: str, chunks: int = 1, milliseconds: float = 20.0) -> Timeline:
    time = milliseconds / chunks
    costs = Costs.uniform(4 * chunks, time, time, time)
    return simulate(families.build(name, 4, 8, costs=costs), costs)


def test_trace_events_are_what_perfetto_reads():
    timeline = timeline_of("zb-v", chunks=2)
    trace = json.loads(json.dumps(to_chrome_trace([timeline])))
    names = [e for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in names] == [(r, f"rank {r}") for r in range(4)]
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == 3 * 8 * 8
    last = events[-1]
    assert last["pid"] == 3
    assert last["dur"] == pytest.approx(10_000)
    assert last["ts"] + last["dur"] == pytest.approx(510_000)
    assert last["args"] == {
        "iteration": 0, "stage": 3, "microbatch": 7, "slice": 0, "kind": "W", "chunk": 0,
    }  # fmt: skip
    assert trace["otherData"]["schedule"] == "zb-v"
    assert trace["otherData"]["version"] == 1


def test_traces_read_back(tmp_path):
    path = tmp_path / "trace.json"
    plan = timeline_of("1f1b")
    later = replace(plan, unit="s", peak_memory=None)
    write_chrome_trace(path, [plan, plan, later])
    back = read_chrome_trace(path)
    assert len(back) == 3
    for written, read in zip([plan, plan, later], back, strict=True):
        assert replace(read, rows=()) == replace(written, rows=())
        for (rank, one), (other_rank, other) in zip(written, read, strict=True):
            assert (rank, one.op) == (other_rank, other.op)
            assert other.start == pytest.approx(one.start, abs=1e-6)
            assert other.end == pytest.approx(one.end, abs=1e-6)


def test_iterations_do_not_overlap():
    plan = timeline_of("1f1b")
    trace = to_chrome_trace([plan, plan])
    ends = [0.0, 0.0]
    starts = [1e12, 1e12]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            iteration = event["args"]["iteration"]
            starts[iteration] = min(starts[iteration], event["ts"])
            ends[iteration] = max(ends[iteration], event["ts"] + event["dur"])
    assert starts[1] == pytest.approx(ends[0])


def test_damaged_traces_are_refused(tmp_path):
    path = tmp_path / "trace.json"
    write_chrome_trace(path, [timeline_of("1f1b")])
    text = path.read_text()

    def refusal(content: str) -> str:
        path.write_text(content)
        with pytest.raises(UserError) as caught:
            read_chrome_trace(path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "cut off" in refusal(text[: len(text) // 2])
    assert "cut off" in refusal("")
    assert "not a trace of zerobubble" in refusal("[]")
    assert "not a trace of zerobubble" in refusal('{"traceEvents": []}')
    data = json.loads(text)
    assert "version 9" in refusal(
        json.dumps(data | {"otherData": data["otherData"] | {"version": 9}})
    )
    del data["traceEvents"][-1]["args"]["stage"]
    assert "'stage'" in refusal(json.dumps(data))
    with pytest.raises(UserError, match="cannot read"):
        read_chrome_trace(tmp_path / "absent.json")
    with pytest.raises(UserError, match="cannot write"):
        write_chrome_trace(tmp_path / "absent" / "trace.json", [timeline_of("1f1b")])
    with pytest.raises(UserError, match="no iteration"):
        to_chrome_trace([])


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_pictures(tmp_path, suffix, start):
    path = tmp_path / f"picture.{suffix}"
    draw([timeline_of("1f1b"), timeline_of("zb-v", chunks=2)], path, title="Two schedules")
    assert path.read_bytes().startswith(start)
    assert path.stat().st_size > 10_000


def test_impossible_pictures(tmp_path):
    with pytest.raises(UserError, match=r"cannot draw to 'picture\.gif'; use one of \.png"):
        draw([timeline_of("1f1b")], tmp_path / "picture.gif")
    with pytest.raises(UserError, match="nothing to draw"):
        draw([Timeline("empty", linear(1), 1, ((),))], tmp_path / "picture.png")
    with pytest.raises(UserError, match="cannot write picture"):
        draw([timeline_of("1f1b")], tmp_path / "absent" / "picture.png")


def test_comparison():
    plan, run = timeline_of("1f1b"), timeline_of("1f1b", milliseconds=21.0)
    v_plan, v_run = timeline_of("zb-v", 2), timeline_of("zb-v", 2, milliseconds=20.4)
    assert compare([(plan, run), (v_plan, v_run)]).splitlines() == [
        "schedule  simulated  measured  ratio  simulated bubble  measured bubble",
        "1f1b       660.0 ms  693.0 ms  1.050             27.3%            27.3%",
        "zb-v       510.0 ms  520.2 ms  1.020              5.9%             5.9%",
    ]
    with pytest.raises(UserError, match="simulated in ms and measured in s"):
        compare([(plan, replace(run, unit="s"))])
