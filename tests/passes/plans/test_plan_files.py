"""Plans as files: written plans are read again, and errors name the line or the field."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import (
    CollectivesSection,
    OrderSection,
    Plan,
    PlanBody,
    PlanError,
    PlanOperator,
    PlanSegment,
    PlanTarget,
    Prediction,
)
from dhelix.profiles.keys import CollectiveKey

GATHER = "all-gather 67108864B 4x1 groups=1 nccl"
BODY = PlanBody(
    "both strands: 2 collectives, 1 product",
    "0123456789abcdef",
    24,
    (
        PlanOperator("alpha wgrad", "gemm bf16,bf16:tn 3584x4096x8192", 1),
        PlanOperator("beta all-gather 1", GATHER, 1),
        PlanOperator("beta all-gather 2", GATHER, 2),
    ),
    (
        PlanSegment(("beta all-gather 1", "alpha wgrad"), 352.125, 349.0, 0.25),
        PlanSegment(("beta all-gather 2",), 190.0),
    ),
    (("alpha wgrad", (("copy contiguous 4096", 1), ("copy contiguous 4096", 2))), ("finally", (("copy a 1", 3),))),
)
SCATTER = CollectiveKey("reduce-scatter", 64 << 20, 4, implementation="symmetric")
PARTED = CollectiveKey("all-gather", 64 << 20, 4)
TARGET = PlanTarget.of("H200", "nvlink", "copy-engine1")
ORDER = OrderSection((BODY,), skew=1, max_in_flight=2, memory_limit=1 << 33)
PREDICTED = Prediction(1e6, 9e5, 2e5, 0.9, 0.01)
PLAN = Plan("llama-8b: 8 layers", TARGET, CollectivesSection((SCATTER,), 2, 1, (PARTED,)), ORDER, PREDICTED)
TEXT = plan_files.dumps(PLAN)


def edited(**changes: Any) -> str:
    return json.dumps({**json.loads(TEXT), **changes})


def body(**changes: Any) -> str:
    return section("order", bodies=[{**json.loads(TEXT)["order"]["bodies"][0], **changes}])


def section(name: str, **changes: Any) -> str:
    return edited(**{name: {**json.loads(TEXT)[name], **changes}})


def error_of(text: str) -> str:
    with pytest.raises(PlanError) as raised:
        plan_files.loads(text, "plan.json")
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    assert plan_files.loads(TEXT, "x") == PLAN
    plan_files.save(PLAN, tmp_path / "plan.json")
    again = plan_files.load(tmp_path / "plan.json")
    assert again == PLAN and plan_files.dumps(again) == TEXT


def test_the_target_says_how_a_process_is_started() -> None:
    assert dict(TARGET.environment) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_CTA_POLICY": "2"}
    assert TARGET.implementation == "symmetric" and any("symmetric" in flag for flag in TARGET.xla_flags)


def test_a_person_edits_one_line() -> None:
    """A segment is one line. A new order only needs an operator moved from one segment to another."""
    first = (
        '{"run": ["beta all-gather 1", "alpha wgrad"], "predicted_us": 352.125, "measured_us": 349, "guessed": 0.25}'
    )
    assert first in TEXT.splitlines()[TEXT.splitlines().index('"segments": [') + 1]
    text = TEXT.replace('["beta all-gather 1", "alpha wgrad"]', '["beta all-gather 1"]')
    text = text.replace('["beta all-gather 2"]', '["beta all-gather 2", "alpha wgrad"]')
    order = plan_files.loads(text, "x").bodies[0].order
    assert order == ("beta all-gather 1", "beta all-gather 2", "alpha wgrad")


def test_times_may_be_left_out() -> None:
    segments = [{"run": ["beta all-gather 1", "alpha wgrad", "beta all-gather 2"]}]
    assert plan_files.loads(body(segments=segments), "x").bodies[0].predicted_us == 0.0


RUN = ["beta all-gather 1", "alpha wgrad", "beta all-gather 2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "plan.json: line 1: ends too early"),
        ('{\n"schema": 1,\n"program" "x"}', "plan.json: line 3: is not JSON"),
        ("{}", 'it has no "schema"'),
        (edited(schema=3), "written by a newer dhelix"),
        (
            edited(schema=1),
            "written by an older dhelix (schema 1; this one reads 2): make it again with `dhelix plan`",
        ),
        (section("order", bodies=None), "plan.json: order.bodies: expected `array`"),
        (edited(extra=1), "unknown field `extra`"),
        (json.dumps({"schema": 2}), "`program` is missing"),
        (section("collectives", decomposed=["?"]), "collectives.decomposed"),
        (
            section("collectives", decomposed=["all-to-all 4B 4x1 groups=1 nccl"]),
            "expected the key of a collective (all-gather, reduce-scatter, collective-permute)",
        ),
        (
            section("order", bodies=json.loads(TEXT)["order"]["bodies"] * 2),
            "bodies.1: bodies 0 and 1 have the same fingerprint",
        ),
        (section("order", max_in_flight=-1), "max_in_flight: expected `int` >= 0"),
        (body(fingerprint="x"), "bodies.0.fingerprint: expected 16 hexadecimal digits"),
        (body(segments=[{"run": [*RUN, "beta gemm"]}]), "bodies.0.segments.0.run.3: expected the name of one of"),
        (
            body(segments=[{"run": RUN}, {"run": RUN[:1]}]),
            "bodies.0.segments.1.run.0: 'beta all-gather 1' already runs in segment 0",
        ),
        (body(segments=[{"run": RUN[:2]}]), "bodies.0.segments: 'beta all-gather 2' is in no segment"),
        (body(segments=[{"run": RUN, "predicted_us": -1}]), "predicted_us: expected `float` >= 0"),
        (body(segments=[{"runs": RUN}]), "unknown field `runs`"),
        (body(operators={"a": [GATHER, 1], "b": [GATHER, 1]}), "'b' and 'a' are the same operator"),
        (TEXT.replace('"alpha wgrad": [[', '"beta gemm": [], "beta gemm": [['), "has the field 'beta gemm' twice"),
        (body(operators={"a": [GATHER, 0]}), "bodies.0.operators.*.1: expected `int` >= 1"),
        (body(operators={"a": GATHER}), "expected `array`, got `str`"),
        (body(small={"beta gemm": []}), "small: none of the body's operators is called 'beta gemm'"),
    ],
)
def test_errors_say_where_and_what_to_do(text: str, said: str) -> None:
    message = error_of(text)
    assert said in message
    assert any(word in message for word in ("correct", "restore", "remove", "check", "upgrade", "put it", "again"))


def test_a_plan_that_could_not_be_read_is_not_written() -> None:
    with pytest.raises(PlanError, match="is in no segment"):
        plan_files.dumps(PLAN.with_body(replace(BODY, segments=BODY.segments[:1])))


def test_files_that_are_no_plans(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        plan_files.load(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="not a text file"):
        plan_files.load(tmp_path / "binary")
    with pytest.raises(PlanError, match="cannot be written"):
        plan_files.save(PLAN, tmp_path / "missing" / "plan.json")
