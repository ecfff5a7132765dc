"""Problem files: each wrong one gives one line that names key and value; right ones are read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from zerobubble.errors import UserError
from zerobubble.planner.plan import InfeasibleError, plan
from zerobubble.planner.problem import Problem, load_problem, parse_problem
from zerobubble.schedule.costs import Costs
from zerobubble.schedule.placement import looped, v

STAGES: dict[str, Any] = {
    "ranks": 4,
    "microbatches": 8,
    "placement": "linear",
    "stage_times": [[1.0, 1.2, 0.8]],
    "link_latency": 0.05,
    "activation_per_stage": 1.0,
    "released_by_backward_input": 0.5,
    "memory_limit": 4.0,
}
LAYERS: dict[str, Any] = {
    "ranks": 2,
    "microbatches": 4,
    "placement": "v",
    "layer_times": [[1.0, 1.0, 1.0]] * 6,
    "layer_activation": 0.25,
    "layer_fixed": [1.0, 0, 0, 0, 0, 2.0],
    "link_latency": 0.0,
    "released_by_backward_input": 0.0,
    "memory_limit": None,
}
ANY = STAGES | {"placement": "any", "stage_times": [[0.5, 0.6, 0.4]], "activation_per_stage": 0.5}
GONE = object()
"""As a value: the key is taken out."""


def changed(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    merged = document | changes
    return {key: value for key, value in merged.items() if value is not GONE}


WRONG = [
    # The document and what it is changed to; what the one line must name.
    *(
        (STAGES, {key: GONE}, [f"{key!r} is missing"])
        for key in STAGES
        if key not in ("stage_times", "memory_limit")
    ),
    (STAGES, {"memory_limit": GONE}, ["'memory_limit' is missing"]),
    (STAGES, {"stage_times": GONE}, ["stage_times", "layer_times"]),
    (STAGES, {"rnaks": 4}, ["unknown key 'rnaks'"]),
    (STAGES, {"activation": 4}, ["unknown key 'activation'"]),
    # Counts.
    (STAGES, {"ranks": 0}, ["ranks is 0", "at least 1"]),
    (STAGES, {"ranks": -2}, ["ranks is -2"]),
    (STAGES, {"ranks": 2.5}, ["ranks is 2.5"]),
    (STAGES, {"ranks": True}, ["ranks is True"]),
    (STAGES, {"ranks": "4"}, ["ranks is '4'"]),
    (STAGES, {"ranks": None}, ["ranks is None"]),
    (STAGES, {"microbatches": 0}, ["microbatches is 0"]),
    (STAGES, {"microbatches": 8.0}, ["microbatches is 8.0"]),
    (STAGES, {"microbatches": [8]}, ["microbatches is [8]"]),
    (STAGES, {"placement": "looped", "chunks": 0}, ["chunks is 0"]),
    (STAGES, {"placement": "looped", "chunks": True}, ["chunks is True"]),
    (STAGES, {"placement": "linear", "chunks": 2}, ["chunks is 2", "linear"]),
    (STAGES, {"placement": "v", "chunks": 3}, ["chunks is 3", "'v'"]),
    # Placement.
    (STAGES, {"placement": "w"}, ["placement is 'w'", "linear, v, looped, any"]),
    (STAGES, {"placement": "V"}, ["placement is 'V'"]),
    (STAGES, {"placement": 1}, ["placement is 1"]),
    (STAGES, {"placement": ["v"]}, ["placement is ['v']"]),
    (STAGES, {"placement": None}, ["placement is None"]),
    # Times.
    (STAGES, {"stage_times": [[1, -1, 1]]}, ["stage_times[0][1] is -1"]),
    (STAGES, {"stage_times": [[1, math.nan, 1]]}, ["stage_times[0][1] is nan"]),
    (STAGES, {"stage_times": [[1, 1, math.inf]]}, ["stage_times[0][2] is inf"]),
    (STAGES, {"stage_times": [[1, 1, True]]}, ["stage_times[0][2] is True"]),
    (STAGES, {"stage_times": [[1, 1, "1"]]}, ["stage_times[0][2] is '1'"]),
    (STAGES, {"stage_times": [[1, None, 1]]}, ["stage_times[0][1] is None"]),
    (STAGES, {"stage_times": [[1, 1]]}, ["stage_times[0] is [1, 1]"]),
    (STAGES, {"stage_times": [[1, 1, 1, 1]]}, ["stage_times[0] is [1, 1, 1, 1]"]),
    (STAGES, {"stage_times": [1, 1, 1]}, ["stage_times[0] is 1"]),
    (STAGES, {"stage_times": []}, ["stage_times is []"]),
    (STAGES, {"stage_times": 1.0}, ["stage_times is 1.0"]),
    (STAGES, {"stage_times": None}, ["stage_times is None"]),
    (STAGES, {"stage_times": [[1, 1, 1]] * 3}, ["stage_times has 3 rows", "4 stages"]),
    (STAGES, {"stage_times": [[1, 1, 1]] * 8}, ["stage_times has 8 rows", "4 stages"]),
    (ANY, {"stage_times": [[1, 1, 1]] * 4}, ["stage_times has 4 rows", "8 stages"]),
    (
        STAGES,
        {"placement": "looped", "chunks": 3, "stage_times": [[1, 1, 1]] * 8},
        ["stage_times has 8 rows", "12 stages"],
    ),
    # Links.
    (STAGES, {"link_latency": -0.1}, ["link_latency is -0.1"]),
    (STAGES, {"link_latency": math.nan}, ["link_latency is nan"]),
    (STAGES, {"link_latency": False}, ["link_latency is False"]),
    (STAGES, {"link_latency": None}, ["link_latency is None"]),
    (STAGES, {"link_latency": [0.1] * 4}, ["link_latency has 4 entries", "3 boundaries"]),
    (STAGES, {"link_latency": []}, ["link_latency has 0 entries"]),
    (STAGES, {"link_latency": [0.1, -1, 0]}, ["link_latency[1] is -1"]),
    (ANY, {"link_latency": [0.1] * 7}, ["link_latency has 7 entries", "'any'"]),
    # Memory.
    (STAGES, {"activation_per_stage": -1}, ["activation_per_stage is -1"]),
    (STAGES, {"activation_per_stage": [1] * 5}, ["activation_per_stage has 5", "4 stages"]),
    (STAGES, {"activation_per_stage": [1, 1, None, 1]}, ["activation_per_stage[2] is None"]),
    (STAGES, {"released_by_backward_input": 1.5}, ["released_by_backward_input is 1.5"]),
    (STAGES, {"released_by_backward_input": -0.5}, ["released_by_backward_input is -0.5"]),
    (STAGES, {"released_by_backward_input": [0.5]}, ["released_by_backward_input is [0.5]"]),
    (STAGES, {"fixed_memory": -1}, ["fixed_memory is -1"]),
    (STAGES, {"fixed_memory": [1] * 3}, ["fixed_memory has 3", "4 stages"]),
    (STAGES, {"memory_limit": -4}, ["memory_limit is -4"]),
    (STAGES, {"memory_limit": math.inf}, ["memory_limit is inf"]),
    (STAGES, {"memory_limit": math.nan}, ["memory_limit is nan"]),
    (STAGES, {"memory_limit": True}, ["memory_limit is True"]),
    (STAGES, {"memory_limit": "4"}, ["memory_limit is '4'"]),
    (STAGES, {"memory_limit": [8, 8, 8]}, ["memory_limit has 3", "4 ranks"]),
    (STAGES, {"memory_limit": [8, 8, 8, "3"]}, ["memory_limit[3] is '3'"]),
    # What splitting costs.
    (STAGES, {"split_overhead": -0.1}, ["split_overhead is -0.1"]),
    (STAGES, {"split_overhead": "8%"}, ["split_overhead is '8%'"]),
    (STAGES, {"joint_stages": 1}, ["joint_stages is 1"]),
    (STAGES, {"joint_stages": [4]}, ["joint_stages holds 4", "0 to 3"]),
    (STAGES, {"joint_stages": [-1]}, ["joint_stages holds -1"]),
    (STAGES, {"joint_stages": [True]}, ["joint_stages holds True"]),
    (STAGES, {"joint_stages": [1.0]}, ["joint_stages holds 1.0"]),
    # Layers.
    (LAYERS, {"layer_times": [[1, 1, 1]], "layer_fixed": 0}, ["layer_times has 1 rows", "2 ranks"]),
    (LAYERS, {"layer_times": []}, ["layer_times is []"]),
    (LAYERS, {"layer_times": [[1, 1, -3]] * 6}, ["layer_times[0][2] is -3"]),
    (LAYERS, {"layer_activation": GONE}, ["'layer_activation' is missing"]),
    (LAYERS, {"layer_activation": [0.25] * 5}, ["layer_activation has 5", "6 layers"]),
    (LAYERS, {"layer_fixed": [0] * 7}, ["layer_fixed has 7", "6 layers"]),
    (LAYERS, {"layer_fixed": None}, ["layer_fixed is None"]),
    (LAYERS, {"stage_times": [[1, 1, 1]]}, ["stage_times", "layer_times"]),
    (LAYERS, {"activation_per_stage": 1.0}, ["activation_per_stage", "layer_activation"]),
    (LAYERS, {"fixed_memory": 1.0}, ["fixed_memory", "layer_fixed"]),
    (STAGES, {"layer_times": [[1, 1, 1]] * 6}, ["stage_times", "layer_times"]),
    (STAGES, {"layer_activation": 1.0}, ["layer_activation", "layer_times"]),
    (STAGES, {"layer_fixed": 1.0}, ["layer_fixed", "layer_times"]),
]


@pytest.mark.parametrize(
    ("document", "changes", "named"),
    WRONG,
    ids=[", ".join("no " + k if x is GONE else f"{k}={x}" for k, x in w[1].items()) for w in WRONG],
)
def test_wrong_files_are_refused_in_one_line(
    document: dict[str, Any], changes: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(changed(document, **changes)))
    with pytest.raises(UserError) as refused:
        load_problem(path)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    for words in named:
        assert words in message


@pytest.mark.parametrize("document", [[], 3, None, "linear", [STAGES]])
def test_what_is_no_object_is_refused(document: object) -> None:
    with pytest.raises(UserError, match="JSON object"):
        parse_problem(document)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nowhere\.json"):
        load_problem(tmp_path / "nowhere.json")
    with pytest.raises(UserError, match="cannot read"):
        load_problem(tmp_path)
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(STAGES)[:-5])
    with pytest.raises(UserError, match=r"cut\.json is not JSON"):
        load_problem(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"cut\.json"):
        load_problem(path)
    for text in ("[" * 100_000, "1" * 5_000, ""):
        path.write_text(text)
        with pytest.raises(UserError, match=r"cut\.json is not JSON"):
            load_problem(path)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text(json.dumps(STAGES)[:-1] + ', "ranks": 2}')
    with pytest.raises(UserError, match="'ranks'"):
        load_problem(path)


def test_numbers_too_large_for_a_float_are_refused() -> None:
    with pytest.raises(UserError, match="link_latency is 1000"):
        parse_problem(STAGES | {"link_latency": 10**400})


@pytest.mark.parametrize(
    ("document", "changes", "rank", "short"),
    [
        # A rank holds an activation of 1, or of 2 with two chunks, and what is fixed.
        (STAGES, {"memory_limit": 0.75}, None, 0.25),
        (STAGES, {"memory_limit": [8, 8, 0.5, 0.75]}, 2, 0.5),
        (STAGES, {"memory_limit": [None, 0.75, None, None]}, 1, 0.25),
        (STAGES, {"memory_limit": 0}, None, 1.0),
        (STAGES, {"fixed_memory": [0, 0, 0, 3.5]}, 3, 0.5),
        (STAGES, {"activation_per_stage": [1, 1, 5, 1]}, 2, 1.0),
        (STAGES, {"placement": "v", "memory_limit": 1.9}, None, 0.1),
        (STAGES, {"placement": "v", "fixed_memory": [3, 0, 0, 0, 0, 0, 0, 3]}, 0, 4.0),
        (STAGES, {"placement": "looped", "chunks": 3, "memory_limit": 2.5}, None, 0.5),
        (ANY, {"memory_limit": 0.75}, None, 0.25),
        # The last rank of linear holds 3 + 3.25, V's first 1 + 3.25, looped's last 0.5 + 3.25.
        (ANY, {"activation_per_stage": [1, 0.5, 0.5, 0.5, 0.5, 0.5, 3, 3.25], "memory_limit": 3.5},
         3, 0.25),
    ],
)  # fmt: skip
def test_under_one_microbatch_is_infeasible(
    document: dict[str, Any], changes: dict[str, Any], rank: int | None, short: float
) -> None:
    problem = parse_problem(document | changes)
    with pytest.raises(InfeasibleError) as refused:
        plan(problem)
    message = str(refused.value)
    assert "\n" not in message
    assert refused.value.shortfall == pytest.approx(short, abs=1e-6)
    assert rank is None or refused.value.rank == rank
    assert f"rank {refused.value.rank} is" in message
    assert f"{short:g} short" in message


def test_numbers_stand_for_all() -> None:
    many = STAGES | {
        "stage_times": [[1.0, 1.2, 0.8]] * 4,
        "link_latency": [0.05] * 3,
        "activation_per_stage": [1.0] * 4,
        "memory_limit": [4.0] * 4,
        "fixed_memory": [0.0] * 4,
    }
    (placement,) = parse_problem(STAGES).placements()
    assert parse_problem(many).costs(placement) == parse_problem(STAGES).costs(placement)


def test_targets_may_stand_beside_the_problem() -> None:
    beside = {"id": "x", "lower_bound": 1, "public_best": None, "best_known_makespan": 2}
    assert parse_problem(STAGES | beside | {"proved_optimum": 2}) == parse_problem(STAGES)


def test_any_joins_half_stages_two_by_two() -> None:
    problem = parse_problem(
        ANY
        | {
            "ranks": 2,
            "stage_times": [[1, 2, 3], [10, 20, 30], [4, 5, 6], [40, 50, 60]],
            "activation_per_stage": [0.1, 0.2, 0.3, 0.4],
            "fixed_memory": [1, 2, 3, 4],
            "joint_stages": [1],
        }
    )
    costs = {(p.name, p.chunks): problem.costs(p) for p in problem.placements()}
    assert set(costs) == {("linear", 1), ("v", 2), ("looped", 2)}
    joined = costs["linear", 1]
    assert joined.forward == (11, 44)
    assert joined.backward_input == (22, 55)
    assert joined.backward_weight == (33, 66)
    assert joined.activation == pytest.approx((0.3, 0.7))
    assert joined.fixed_memory == (3, 7)
    assert costs["v", 2].forward == costs["looped", 2].forward == (1, 10, 4, 40)
    assert costs["v", 2].joint_stages == {1}


def test_one_rank_is_linear_whatever_is_allowed() -> None:
    (placement,) = parse_problem(ANY | {"ranks": 1, "memory_limit": None}).placements()
    assert (placement.name, placement.stages) == ("linear", 1)


def test_split_overhead_is_on_b_and_w_only() -> None:
    problem = parse_problem(STAGES | {"split_overhead": 0.25})
    costs = problem.costs(problem.placements()[0])
    assert costs.backward_input == pytest.approx((1.5,) * 4)
    assert costs.backward_weight == pytest.approx((1.0,) * 4)
    assert costs.backward_joint == pytest.approx((2.0,) * 4)


def test_layers_are_summed_by_layout() -> None:
    problem = parse_problem(LAYERS)
    costs = problem.costs(v(2), (1, 2, 2, 1))
    assert costs.forward == (1, 2, 2, 1)
    assert costs.activation == (0.25, 0.5, 0.5, 0.25)
    assert costs.fixed_memory == (1, 0, 0, 2)
    assert problem.divisible


@pytest.mark.parametrize("placement", [v(3), looped(2, 3)])
def test_the_problem_of_costs_has_these_costs(placement: Any) -> None:
    costs = Costs.per_stage(
        [(1.0 + s, 2.0, 0.5 * s) for s in range(placement.stages)],
        link_latency=0.5,
        activation=0.5,
        released_by_backward_input=0.25,
        memory_limit=3.0,
        ranks=placement.ranks,
    )
    problem = Problem.of_costs(placement, 5, costs)
    assert problem.placements() == (placement,)
    assert problem.costs(placement) == costs
