"""The text of a plan's file: JSON for people to read and to edit, one fact a line.

    {
    "schema": 1,
    "program": "llama-8b: 8 layers, sequence 8192, 16 micro-batches, interleaved, dp 1 x tp 4",
    "made_for": {"hardware": "H200", "link": "nvlink", "setting": "connections1", "collectives": "nccl",
                 "decomposed": ["reduce-scatter 67108864B 4x1 groups=1 nccl"], "memory_limit": 0, "max_in_flight": 0,
                 "skew": 0, "row_parts": 0, "reduced": 0, "gpus_per_node": 8},
    "start_with": {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "xla_flags": ["..."]},
    "predicted": {"makespan_us": 1005600, "compute_us": ..., "hidden_fraction": 0.93, "guessed_fraction": 0.004,
                  "guessed_overlap_fraction": 0.01},
    "bodies": [
    {
    "name": "both strands: 8 collectives, 18 products, 2 attentions",
    "fingerprint": "5d0c5f7e0c1b7a52",
    "runs": 120,
    "segments": [
    {"run": ["beta all-gather 1", "alpha wgrad 1"], "predicted_us": 352.1, "guessed": 0},
    {"run": ["alpha reduce-scatter 1", "beta attention"], "predicted_us": 340.6, "measured_us": 351.2, "guessed": 0}
    ],
    "operators": {
    "beta all-gather 1": ["all-gather 67108864B 4x1 groups=1 nccl", 1],
    "alpha wgrad 1": ["gemm bf16,bf16:tn 3584x4096x8192", 1]
    },
    "small": {
    "alpha wgrad 1": [["fusion loop-convert:95a1b1d22c 2048x4096", 1]]
    }
    }
    ]
    }

To edit is to move names within `run`, and from one segment's `run` to another's; every operator stands there once.
`small` is what takes microseconds, with the operator that it runs before; leave it as it is. Times are for reading.
Equal plans give equal text. Unknown fields are errors, so that a slip of the pen is noticed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from dhelix.errors import DhelixError
from dhelix.passes.communication import exchange
from dhelix.passes.plans.pairing_plan import (
    FINALLY,
    PairingPlan,
    PlanBody,
    PlanError,
    PlanOperator,
    PlanSegment,
    PlanTarget,
    Prediction,
)
from dhelix.profiles import keys
from dhelix.profiles.files import codec
from dhelix.profiles.files.codec import Bytes, Count, Kind, Share, Text, json_lines, json_text
from dhelix.profiles.keys import IMPLEMENTATIONS, CollectiveKey

SCHEMA = 1

_KIND = Kind("plan", "make it again with `dhelix plan`", PlanError)
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_Microseconds = Annotated[float, Meta(ge=0, le=1e12)]  # of a whole step


class _MadeFor(Struct, forbid_unknown_fields=True):
    hardware: Text
    link: Text
    setting: Text
    collectives: Text
    decomposed: list[Text]
    memory_limit: Bytes = 0
    max_in_flight: Bytes = 0
    skew: Bytes = 0
    row_parts: Bytes = 0
    reduced: Bytes = 0
    gpus_per_node: Bytes = 0


class _StartWith(Struct, forbid_unknown_fields=True):
    environment: dict[str, Text]
    xla_flags: list[Text]


class _Prediction(Struct, forbid_unknown_fields=True):
    makespan_us: _Microseconds = 0.0
    compute_us: _Microseconds = 0.0
    communication_us: _Microseconds = 0.0
    hidden_fraction: Share = 0.0
    guessed_fraction: Share = 0.0
    guessed_overlap_fraction: Share = 0.0


class _Segment(Struct, forbid_unknown_fields=True):
    run: list[Text]
    predicted_us: _Microseconds = 0.0
    measured_us: _Microseconds | None = None
    guessed: Share = 0.0


_Identity = tuple[Text, Count]  # operator key, occurrence


class _Body(Struct, forbid_unknown_fields=True):
    name: Text
    fingerprint: Text
    runs: Count
    segments: list[_Segment]
    operators: dict[str, _Identity]
    small: dict[str, list[_Identity]] = {}


class _File(Struct, forbid_unknown_fields=True):
    schema: int
    program: Text
    made_for: _MadeFor
    start_with: _StartWith
    predicted: _Prediction
    bodies: list[_Body]


def load(path: str | Path) -> PairingPlan:
    """The plan in a file. Raises PlanError for all that is not a sound plan, with the line or the field."""
    path = Path(path)
    try:
        return loads(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}): check the path of the plan") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not text, so no plan: check the path") from None


def save(plan: PairingPlan, path: str | Path) -> None:
    """Writes the file. Raises PlanError where that is not possible."""
    text = dumps(plan)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be written ({error.strerror}): choose another place for the plan") from None


def dumps(plan: PairingPlan) -> str:
    """The text of a file. Raises PlanError for a plan that `loads` would not take."""
    target = plan.target
    made_for = {
        "hardware": target.hardware,
        "link": target.link,
        "setting": target.setting,
        "collectives": target.collectives,
        "decomposed": list(map(str, target.decomposed)),
        "memory_limit": target.memory_limit,
        "max_in_flight": target.max_in_flight,
        "skew": target.skew,
        "row_parts": target.row_parts,
        "reduced": target.reduced,
        "gpus_per_node": target.gpus_per_node,
    }
    start_with = {"environment": dict(target.environment), "xla_flags": list(target.xla_flags)}
    predicted = {name: _rounded(value) for name, value in vars(plan.predicted).items()}
    text = codec.document(
        {
            "schema": str(SCHEMA),
            "program": json_text(plan.program),
            "made_for": json_text(made_for),
            "start_with": json_text(start_with),
            "predicted": json_text(predicted),
            "bodies": json_lines("[", map(_body_text, plan.bodies), "]"),
        }
    )
    loads(text, "this plan")
    return text


def _body_text(body: PlanBody) -> str:
    operators = (f"{json_text(o.name)}: {json_text([o.key, o.occurrence])}" for o in body.operators)
    parts = [
        f'"name": {json_text(body.name)}',
        f'"fingerprint": {json_text(body.fingerprint)}',
        f'"runs": {body.runs}',
        f'"segments": {json_lines("[", map(_segment_text, body.segments), "]")}',
        f'"operators": {json_lines("{", operators, "}")}',
        f'"small": {json_lines("{", (f"{json_text(name)}: {json_text(rows)}" for name, rows in body.small), "}")}',
    ]
    return "{\n" + ",\n".join(parts) + "\n}"


def _segment_text(segment: PlanSegment) -> str:
    fields: dict[str, Any] = {"run": list(segment.run), "predicted_us": _rounded(segment.predicted_us)}
    if segment.measured_us is not None:
        fields["measured_us"] = _rounded(segment.measured_us)
    return json_text({**fields, "guessed": _rounded(segment.guessed)})


def _rounded(value: float) -> float | int:
    """Six digits, which is more than any of these numbers is good for."""
    short = float(f"{value:.6g}") if math.isfinite(value) else value
    return int(short) if math.isfinite(short) and short == int(short) else short


def loads(text: str, origin: str) -> PairingPlan:
    """The plan in the text of a file; errors call the text `origin`.

    Raises PlanError for all that is not a sound plan of a known schema.
    """
    file = codec.decode(text, _File, origin, SCHEMA, _KIND)
    taken: dict[str, int] = {}
    for n, body in enumerate(file.bodies):
        if (other := taken.setdefault(body.fingerprint, n)) != n:
            raise _wrong(origin, f"bodies {other} and {n} have one fingerprint, {body.fingerprint}", f"bodies[{n}]")
    bodies = tuple(_body(body, f"bodies[{n}]", origin) for n, body in enumerate(file.bodies))
    predicted = Prediction(**structs.asdict(file.predicted))
    return PairingPlan(str(file.program), _target(file.made_for, file.start_with, origin), bodies, predicted)


def _wrong(origin: str, message: str, place: str) -> DhelixError:
    return codec.wrong(origin, f"{message} - at `$.{place}`", _KIND)


def _target(made_for: _MadeFor, start: _StartWith, origin: str) -> PlanTarget:
    if made_for.row_parts == 1:
        raise _wrong(origin, "expected 0 or 2 or more", "made_for.row_parts")
    if made_for.collectives not in IMPLEMENTATIONS:
        raise _wrong(origin, f"expected one of {', '.join(IMPLEMENTATIONS)}", "made_for.collectives")
    codec.names(start.environment, "start_with.environment", origin, _KIND)
    decomposed = [_decomposed(key, f"made_for.decomposed[{n}]", origin) for n, key in enumerate(made_for.decomposed)]
    return PlanTarget(
        hardware=str(made_for.hardware),
        link=str(made_for.link),
        setting=str(made_for.setting),
        collectives=str(made_for.collectives),
        decomposed=tuple(decomposed),
        environment=tuple(sorted((name, str(value)) for name, value in start.environment.items())),
        xla_flags=tuple(map(str, start.xla_flags)),
        memory_limit=made_for.memory_limit,
        max_in_flight=made_for.max_in_flight,
        skew=made_for.skew,
        row_parts=made_for.row_parts,
        reduced=made_for.reduced,
        gpus_per_node=made_for.gpus_per_node,
    )


def _decomposed(text: str, place: str, origin: str) -> CollectiveKey:
    try:
        key = keys.parse(str(text))
    except DhelixError:
        key = None
    if not isinstance(key, CollectiveKey) or key.kind not in exchange.KINDS:
        kinds = ", ".join(exchange.KINDS)
        example = "all-gather 67108864B 4x1 groups=1 nccl"
        raise _wrong(origin, f"expected the key of a collective ({kinds}), such as {example}", place)
    return key


def _body(body: _Body, place: str, origin: str) -> PlanBody:
    if not _FINGERPRINT.fullmatch(body.fingerprint):
        raise _wrong(origin, "expected 16 hexadecimal digits", f"{place}.fingerprint")
    operators = _operators(body.operators, f"{place}.operators", origin)
    segments = _segments(body.segments, operators, f"{place}.segments", origin)
    small = []
    for name, rows in body.small.items():
        if name not in operators and name != FINALLY:
            raise _wrong(origin, f"none of the body's operators is called {name!r}", f"{place}.small")
        small.append((name, tuple((str(key), occurrence) for key, occurrence in rows)))
    fingerprint = str(body.fingerprint)
    return PlanBody(str(body.name), fingerprint, body.runs, tuple(operators.values()), segments, tuple(small))


def _operators(rows: Mapping[str, _Identity], place: str, origin: str) -> dict[str, PlanOperator]:
    codec.names(rows, place, origin, _KIND)
    taken: dict[_Identity, str] = {}
    for name, identity in rows.items():
        if (other := taken.setdefault(identity, name)) != name:
            raise _wrong(origin, f"{name!r} and {other!r} are the same operator", place)
    return {name: PlanOperator(name, str(key), occurrence) for name, (key, occurrence) in rows.items()}


def _segments(
    rows: list[_Segment], operators: Mapping[str, PlanOperator], place: str, origin: str
) -> tuple[PlanSegment, ...]:
    """Segments, in which each operator must run once."""
    seen: dict[str, str] = {}
    for n, row in enumerate(rows):
        for k, name in enumerate(row.run):
            here = f"{place}[{n}].run[{k}]"
            if name not in operators:
                raise _wrong(origin, f"expected the name of one of the body's operators, not {name!r}", here)
            if name in seen:
                raise _wrong(origin, f"{name!r} runs in segment {seen[name]}, too", here)
            seen[name] = str(n)
    for name in operators:
        if name not in seen:
            raise _wrong(origin, f"{name!r} stands in no segment", place)
    return tuple(PlanSegment(tuple(map(str, row.run)), row.predicted_us, row.measured_us, row.guessed) for row in rows)
