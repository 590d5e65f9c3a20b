"""Reads and writes plan files: JSON for people to read and edit, one fact per line.

    {
    "schema": 2,
    "program": "llama-8b: 8 layers, sequence 8192, 16 micro-batches, interleaved, dp 1 x tp 4",
    "target": {"hardware": "H200", "link": "nvlink", "setting": "connections1", "implementation": "nccl",
               "environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "xla_flags": ["..."], "gpus_per_node": 8},
    "predicted": {"makespan_us": 1005600, "compute_us": ..., "hidden_fraction": 0.93, "guessed_fraction": 0.004,
                  "guessed_overlap_fraction": 0.01},
    "collectives": {"decomposed": ["reduce-scatter 67108864B 4x1 groups=1 nccl"], "row_parts": 0, "reduced": 0},
    "order": {
    "skew": 0,
    "max_in_flight": 0,
    "memory_limit": 0,
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
    }

`"sharding": {"mesh": [8, 1], "parameters": [1, 1], "gradients": [1, 1], "optimizer": [8, 1], "split": "inside",
"axes": ["dp"]}` may follow. It has factors as [GPUs of a node, nodes], the names of mesh axes, and perhaps orders of
nodes and GPUs, and factors of groups of parameters (`passes/sharding/sharding_plan.py`). `"tuning": {...}` may follow,
too: settings of collectives under NCCL (`passes/tuning/collective_settings.py`).

To edit a plan, move names within the `run` of a segment, or from one `run` to another. Each operator must appear once.
`small` lists short instructions that are not operators, by the operator before which they run; do not edit it. Times
are only for information. Equal plans give equal text. Unknown fields are errors, so that a misspelled name is noticed.
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
from dhelix.passes.plans.plan import (
    FINALLY,
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
from dhelix.passes.plans.sharding_section import ShardingSection
from dhelix.passes.sharding.factors import ShardingError
from dhelix.passes.sharding.sharding_plan import ShardingPlan
from dhelix.passes.tuning.collective_settings import CollectiveSettings, TunedCollective
from dhelix.profiles import keys
from dhelix.profiles.channels.nccl_setting import ChannelError, NcclSetting
from dhelix.profiles.files import codec
from dhelix.profiles.files.codec import Bytes, Count, Kind, Share, Text, json_lines, json_text
from dhelix.profiles.keys import IMPLEMENTATIONS, CollectiveKey

SCHEMA = 2

_KIND = Kind("plan", "make it again with `dhelix plan`, `dhelix shard` or `dhelix tune`", PlanError)
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_Microseconds = Annotated[float, Meta(ge=0, le=1e12)]  # more than any step takes


class _Target(Struct, forbid_unknown_fields=True):
    hardware: Text
    link: Text
    setting: Text
    implementation: Text
    environment: dict[str, Text]
    xla_flags: list[Text]
    gpus_per_node: Bytes = 0


class _Collectives(Struct, forbid_unknown_fields=True):
    decomposed: list[Text] = []
    row_parts: Bytes = 0
    reduced: Bytes = 0
    parted: list[Text] = []


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


class _Order(Struct, forbid_unknown_fields=True):
    bodies: list[_Body]
    skew: Bytes = 0
    max_in_flight: Bytes = 0
    memory_limit: Bytes = 0


class _Tuned(Struct, forbid_unknown_fields=True):
    body: Text
    key: Text
    occurrence: Count
    algorithm: str = ""
    protocol: str = ""
    channels: Bytes = 0
    chunk: Bytes = 0
    us: _Microseconds = 0.0
    default_us: _Microseconds = 0.0
    slows: Annotated[float, Meta(ge=0, le=1e3)] = 1.0


class _Tuning(Struct, forbid_unknown_fields=True):
    nccl: Text
    devices: Count
    collectives: list[_Tuned]
    default_us: _Microseconds = 0.0
    tuned_us: _Microseconds = 0.0


class _File(Struct, forbid_unknown_fields=True):
    schema: int
    program: Text
    target: _Target
    predicted: _Prediction
    collectives: _Collectives
    order: _Order
    sharding: ShardingSection | None = None
    tuning: _Tuning | None = None


def load(path: str | Path) -> Plan:
    """Reads the plan in a file. Raises PlanError, with the line or the field, if it is not a valid plan."""
    path = Path(path)
    try:
        return loads(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}): check the path of the plan") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path}: not a text file, so not a plan: check the path") from None


def save(plan: Plan, path: str | Path) -> None:
    """Writes a plan to a file. Raises PlanError if the file cannot be written or `loads` would reject the plan."""
    text = dumps(plan)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: cannot be written ({error.strerror}): choose another place for the plan") from None


def dumps(plan: Plan) -> str:
    """The text of a plan's file. Raises PlanError if `loads` would reject it."""
    target, collectives, order = plan.target, plan.collectives, plan.order
    predicted = {name: _rounded(value) for name, value in vars(plan.predicted).items()}
    limits = {"skew": order.skew, "max_in_flight": order.max_in_flight, "memory_limit": order.memory_limit}
    bodies = f'"bodies": {json_lines("[", map(_body_text, plan.bodies), "]")}'
    text = codec.document(
        {
            "schema": str(SCHEMA),
            "program": json_text(plan.program),
            "target": json_text({**vars(target), "environment": dict(target.environment)}),
            "predicted": json_text(predicted),
            "collectives": json_text({**vars(collectives), **_keys_text(collectives)}),
            "order": _lines(*(f'"{name}": {value}' for name, value in limits.items()), bodies),
            **({"sharding": json_text(plan.sharding.as_json())} if plan.sharding else {}),
            **({"tuning": _tuning_text(plan.tuning)} if plan.tuning else {}),
        }
    )
    loads(text, "this plan")
    return text


def _keys_text(collectives: CollectivesSection) -> dict[str, list[str]]:
    return {name: list(map(str, getattr(collectives, name))) for name in ("decomposed", "parted")}


def _tuning_text(tuning: CollectiveSettings) -> str:
    fields = tuning.as_json()
    rows = json_lines("[", (json_text(_shortened(row)) for row in fields.pop("collectives")), "]")
    return _lines(*(f'"{n}": {json_text(value)}' for n, value in _shortened(fields).items()), f'"collectives": {rows}')


def _shortened(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in fields.items()}


def _lines(*fields: str) -> str:
    """A JSON object with one field per line."""
    return "{\n" + ",\n".join(fields) + "\n}"


def _body_text(body: PlanBody) -> str:
    operators = (f"{json_text(o.name)}: {json_text([o.key, o.occurrence])}" for o in body.operators)
    return _lines(
        f'"name": {json_text(body.name)}',
        f'"fingerprint": {json_text(body.fingerprint)}',
        f'"runs": {body.runs}',
        f'"segments": {json_lines("[", map(_segment_text, body.segments), "]")}',
        f'"operators": {json_lines("{", operators, "}")}',
        f'"small": {json_lines("{", (f"{json_text(name)}: {json_text(rows)}" for name, rows in body.small), "}")}',
    )


def _segment_text(segment: PlanSegment) -> str:
    fields: dict[str, Any] = {"run": list(segment.run), "predicted_us": _rounded(segment.predicted_us)}
    if segment.measured_us is not None:
        fields["measured_us"] = _rounded(segment.measured_us)
    return json_text({**fields, "guessed": _rounded(segment.guessed)})


def _rounded(value: float) -> float | int:
    """Rounds to six significant digits. Times are less precise than that. Whole numbers become integers."""
    short = float(f"{value:.6g}") if math.isfinite(value) else value
    return int(short) if math.isfinite(short) and short == int(short) else short


def loads(text: str, origin: str) -> Plan:
    """The plan in the text of a file.

    Args:
      text: the file's text.
      origin: name of the text in error messages.

    Raises:
      PlanError: `text` is not a valid plan of a known schema.
    """
    file = codec.decode(text, _File, origin, SCHEMA, _KIND, oldest=SCHEMA)
    taken: dict[str, int] = {}
    for n, body in enumerate(file.order.bodies):
        if (other := taken.setdefault(body.fingerprint, n)) != n:
            reason = f"bodies {other} and {n} have the same fingerprint, {body.fingerprint}"
            raise _wrong(origin, reason, f"order.bodies[{n}]")
    bodies = tuple(_body(body, f"order.bodies[{n}]", origin) for n, body in enumerate(file.order.bodies))
    return Plan(
        str(file.program),
        _target(file.target, origin),
        _collectives(file.collectives, origin),
        OrderSection(bodies, file.order.skew, file.order.max_in_flight, file.order.memory_limit),
        Prediction(**structs.asdict(file.predicted)),
        None if file.sharding is None else _sharding(file.sharding, origin),
        None if file.tuning is None else _tuning(file.tuning, origin),
    )


def _wrong(origin: str, message: str, place: str) -> DhelixError:
    return codec.wrong(origin, f"{message} - at `$.{place}`", _KIND)


def _target(read: _Target, origin: str) -> PlanTarget:
    if read.implementation not in IMPLEMENTATIONS:
        raise _wrong(origin, f"expected one of {', '.join(IMPLEMENTATIONS)}", "target.implementation")
    codec.names(read.environment, "target.environment", origin, _KIND)
    return PlanTarget(
        hardware=str(read.hardware),
        link=str(read.link),
        setting=str(read.setting),
        implementation=str(read.implementation),
        environment=tuple(sorted((name, str(value)) for name, value in read.environment.items())),
        xla_flags=tuple(map(str, read.xla_flags)),
        gpus_per_node=read.gpus_per_node,
    )


def _sharding(read: ShardingSection, origin: str) -> ShardingPlan:
    codec.names(read.groups, "sharding.groups", origin, _KIND)
    try:
        return read.plan()
    except ShardingError as error:
        raise _wrong(origin, str(error), "sharding") from None


def _tuning(read: _Tuning, origin: str) -> CollectiveSettings:
    place = "tuning"
    try:
        rows = []
        for n, row in enumerate(read.collectives):
            place = f"tuning.collectives[{n}]"
            setting = NcclSetting(str(row.algorithm), str(row.protocol), row.channels, row.chunk)
            identity = _fingerprint(row.body, place, origin), str(row.key), row.occurrence
            rows.append(TunedCollective(*identity, setting, row.us, row.default_us, row.slows))
        place = "tuning"
        return CollectiveSettings(str(read.nccl), read.devices, tuple(rows), read.default_us, read.tuned_us)
    except ChannelError as error:
        raise _wrong(origin, str(error), place) from None


def _collectives(read: _Collectives, origin: str) -> CollectivesSection:
    if read.row_parts == 1:
        raise _wrong(origin, "expected 0, or at least 2", "collectives.row_parts")
    decomposed, parted = (
        tuple(_key(key, f"collectives.{name}[{n}]", origin) for n, key in enumerate(given))
        for name, given in (("decomposed", read.decomposed), ("parted", read.parted))
    )
    return CollectivesSection(decomposed, read.row_parts, read.reduced, parted)


def _key(text: str, place: str, origin: str) -> CollectiveKey:
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
    operators = _operators(body.operators, f"{place}.operators", origin)
    segments = _segments(body.segments, operators, f"{place}.segments", origin)
    small = []
    for name, rows in body.small.items():
        if name not in operators and name != FINALLY:
            raise _wrong(origin, f"none of the body's operators is called {name!r}", f"{place}.small")
        small.append((name, tuple((str(key), occurrence) for key, occurrence in rows)))
    fingerprint = _fingerprint(body.fingerprint, f"{place}.fingerprint", origin)
    return PlanBody(str(body.name), fingerprint, body.runs, tuple(operators.values()), segments, tuple(small))


def _fingerprint(text: str, place: str, origin: str) -> str:
    if _FINGERPRINT.fullmatch(text):
        return str(text)
    raise _wrong(origin, "expected 16 hexadecimal digits", place)


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
    """Reads the segments of a body. Raises PlanError unless each of the body's operators is in exactly one segment."""
    seen: dict[str, str] = {}
    for n, row in enumerate(rows):
        for k, name in enumerate(row.run):
            here = f"{place}[{n}].run[{k}]"
            if name not in operators:
                raise _wrong(origin, f"expected the name of one of the body's operators, not {name!r}", here)
            if name in seen:
                raise _wrong(origin, f"{name!r} already runs in segment {seen[name]}", here)
            seen[name] = str(n)
    for name in operators:
        if name not in seen:
            raise _wrong(origin, f"{name!r} is in no segment", place)
    return tuple(PlanSegment(tuple(map(str, row.run)), row.predicted_us, row.measured_us, row.guessed) for row in rows)
