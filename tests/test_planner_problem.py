"""A wrong problem is one line that names the key and the value."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from zerobubble.errors import UserError
from zerobubble.planner.plan import InfeasibleError, plan
from zerobubble.planner.problem import load_problem, parse_problem
from zerobubble.schedule.placement import v


def problem(**changes: Any) -> dict[str, Any]:
    """A good one with changes; a key set to ... is left out."""
    document = {
        "ranks": 4,
        "microbatches": 8,
        "placement": "linear",
        "stage_times": [[1.0, 1.0, 1.0]],
        "link_latency": 0.1,
        "activation_per_stage": 1.0,
        "released_by_backward_input": 0.5,
        "memory_limit": 4.0,
        **changes,
    }
    return {key: value for key, value in document.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": ...}, "key 'ranks' is missing"),
        ({"stage_times": ...}, "'stage_times' and 'layer_times'"),
        ({"activation_per_stage": ...}, "key 'activation_per_stage' is missing"),
        ({"rank": 4}, "unknown key 'rank'"),
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": True}, "ranks is True"),
        ({"ranks": 2.5}, "ranks is 2.5"),
        ({"microbatches": -1}, "microbatches is -1"),
        ({"placement": "w"}, "placement is 'w'"),
        ({"chunks": 2}, "chunks is 2"),
        ({"placement": "looped", "chunks": 0}, "chunks is 0"),
        ({"stage_times": [[1, -2, 1]]}, "stage_times[0][1] is -2"),
        ({"stage_times": [[1, math.nan, 1]]}, "stage_times[0][1] is nan"),
        ({"stage_times": [[1, "2", 1]]}, "stage_times[0][1] is '2'"),
        ({"stage_times": [[1, 1]]}, "stage_times[0] is [1, 1]"),
        ({"stage_times": []}, "stage_times is []"),
        ({"stage_times": [[1, 1, 1]] * 3}, "stage_times has 3 rows for 4 stages"),
        ({"layer_times": [[1, 1, 1]] * 8}, "'stage_times' and 'layer_times'"),
        ({"layer_fixed": 1.0}, "layer_fixed goes with layer_times"),
        ({"link_latency": [0.1, 0.1]}, "link_latency has 2 entries for 3 boundaries"),
        ({"link_latency": -1}, "link_latency is -1"),
        ({"placement": "any", "link_latency": [0.1] * 7}, "link_latency has 7 entries"),
        ({"activation_per_stage": [1.0]}, "activation_per_stage has 1 entries for 4 stages"),
        ({"released_by_backward_input": 1.5}, "released_by_backward_input is 1.5"),
        ({"memory_limit": [4.0, 4.0]}, "memory_limit has 2 entries for 4 ranks"),
        ({"memory_limit": math.inf}, "memory_limit is inf"),
        ({"fixed_memory": "3"}, "fixed_memory is '3'"),
        ({"split_overhead": -0.1}, "split_overhead is -0.1"),
        ({"joint_stages": [4]}, "joint_stages holds 4"),
        ({"joint_stages": 1}, "joint_stages is 1"),
    ],
)
def test_wrong(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        parse_problem(problem(**changes))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem()))
    assert load_problem(path).ranks == 4
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_problem(path)
    path.write_text("[]")
    with pytest.raises(UserError, match="a JSON object"):
        load_problem(path)
    with pytest.raises(UserError, match="cannot read"):
        load_problem(tmp_path / "none.json")


def test_a_limit_under_one_activation() -> None:
    limits = [4.0, 4.0, 0.75, 4.0]
    with pytest.raises(InfeasibleError) as error:
        plan(parse_problem(problem(memory_limit=limits)))
    assert (error.value.rank, error.value.shortfall) == (2, pytest.approx(0.25))
    assert "memory_limit of rank 2 is 0.75" in str(error.value)
    fixed = problem(placement="v", activation_per_stage=0.5, fixed_memory=[3] + 6 * [0] + [3])
    with pytest.raises(InfeasibleError) as error:
        plan(parse_problem({**fixed, "memory_limit": 6.5}))
    assert (error.value.rank, error.value.shortfall) == (0, pytest.approx(0.5))


def test_half_stages_are_joined_for_linear_and_kept_for_v() -> None:
    rows = [[float(s), 1.0, 0.5] for s in range(8)]
    parsed = parse_problem(
        problem(
            placement="any",
            stage_times=rows,
            activation_per_stage=0.5,
            split_overhead=0.1,
            joint_stages=[5],
        )
    )
    by_name = {placement.name: placement for placement in parsed.placements()}
    assert set(by_name) == {"linear", "v", "looped"}
    costs = parsed.costs(by_name["linear"])
    assert costs.forward == (1.0, 5.0, 9.0, 13.0)
    assert costs.backward_input == pytest.approx((2.2,) * 4)
    assert costs.backward_joint == (3.0,) * 4
    assert costs.activation == (1.0,) * 4
    assert 2 in costs.joint_stages
    assert parsed.costs(v(4)).forward == tuple(float(s) for s in range(8))
