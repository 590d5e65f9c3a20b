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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

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
from dhelix.profiles import checked_json, keys
from dhelix.profiles.checked_json import Checked, Kind, json_lines, json_text
from dhelix.profiles.keys import IMPLEMENTATIONS, CollectiveKey

SCHEMA = 1

_KIND = Kind("plan", "make it again with `dhelix plan`", PlanError)
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_MAX_MICROSECONDS = 1e12
_MAX_BYTES = 2**62


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
    parts = [
        f'"schema": {SCHEMA}',
        f'"program": {json_text(plan.program)}',
        f'"made_for": {json_text(made_for)}',
        f'"start_with": {json_text(start_with)}',
        f'"predicted": {json_text(predicted)}',
        f'"bodies": {json_lines("[", map(_body_text, plan.bodies), "]")}',
    ]
    text = "{\n" + ",\n".join(parts) + "\n}\n"
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
    top = checked_json.parse(text, origin, _KIND)
    checked_json.check_schema(top, SCHEMA)
    fields = _fields(top, "schema program made_for start_with predicted bodies")
    bodies = tuple(_body(row) for row in fields["bodies"].sequence())
    for row, body in zip(fields["bodies"].sequence(), bodies, strict=True):
        if sum(other.fingerprint == body.fingerprint for other in bodies) > 1:
            raise PlanError(f"{row.place}: two bodies have the fingerprint {body.fingerprint}: remove one")
    target = _target(fields["made_for"], fields["start_with"])
    return PairingPlan(fields["program"].text(), target, bodies, _prediction(fields["predicted"]))


def _fields(value: Checked, required: str, optional: str = "") -> Mapping[str, Checked]:
    """The fields of an object, which are these and no others."""
    found = value.mapping()
    for name in required.split():
        if name not in found:
            raise PlanError(f'{value.place}: "{name}" is missing: restore it, or {_KIND.again}')
    for name in found:
        if name not in (*required.split(), *optional.split()):
            known = ", ".join((required + " " + optional).split())
            raise PlanError(f"{value.place}: {ascii(name[:80])} is no field of it (which are {known}): correct it")
    return found


def _target(made_for: Checked, start_with: Checked) -> PlanTarget:
    numbers = "memory_limit max_in_flight skew row_parts reduced gpus_per_node"
    fields = _fields(made_for, "hardware link setting collectives decomposed", numbers)
    start = _fields(start_with, "environment xla_flags")
    if "row_parts" in fields and fields["row_parts"].value == 1:
        raise fields["row_parts"].error("must be 0 or 2 or more")
    return PlanTarget(
        fields["hardware"].text(),
        fields["link"].text(),
        fields["setting"].text(),
        _one_of(fields["collectives"], IMPLEMENTATIONS),
        tuple(_decomposed(key) for key in fields["decomposed"].sequence()),
        tuple(sorted((name, value.text()) for name, value in start["environment"].mapping().items())),
        tuple(flag.text() for flag in start["xla_flags"].sequence()),
        *(fields[n].integer(0, _MAX_BYTES) if n in fields else 0 for n in numbers.split()),
    )


def _decomposed(value: Checked) -> CollectiveKey:
    try:
        key = keys.parse(value.text())
    except DhelixError:
        key = None
    if not isinstance(key, CollectiveKey) or key.kind not in exchange.KINDS:
        kinds = ", ".join(exchange.KINDS)
        raise value.error(
            f'must be the key of a collective ({kinds}), such as "all-gather 67108864B 4x1 groups=1 nccl"'
        )
    return key


def _prediction(value: Checked) -> Prediction:
    fields = _fields(value, "", " ".join(vars(Prediction())))
    return Prediction(**{n: v.number(_MAX_MICROSECONDS if n.endswith("_us") else 1.0) for n, v in fields.items()})


def _body(row: Checked) -> PlanBody:
    fields = _fields(row, "name fingerprint runs segments operators", "small")
    fingerprint = fields["fingerprint"].text()
    if not _FINGERPRINT.fullmatch(fingerprint):
        raise fields["fingerprint"].error("must be 16 hexadecimal digits")
    operators = _operators(fields["operators"])
    segments = _segments(fields["segments"], operators)
    small = _small(fields["small"], operators) if "small" in fields else ()
    runs = fields["runs"].integer(1)
    return PlanBody(fields["name"].text(), fingerprint, runs, tuple(operators.values()), segments, small)


def _operators(value: Checked) -> dict[str, PlanOperator]:
    found: dict[str, PlanOperator] = {}
    taken: dict[tuple[str, int], str] = {}
    for name, row in value.mapping().items():
        key, occurrence = _identity(row)
        if (key, occurrence) in taken:
            raise PlanError(f"{row.place}: the same operator as {ascii(taken[key, occurrence])}: correct one of them")
        taken[key, occurrence] = name
        found[name] = PlanOperator(name, key, occurrence)
    return found


def _identity(row: Checked) -> tuple[str, int]:
    parts = row.sequence(2)
    if len(parts) != 2:
        raise row.error("must be [operator key, occurrence]")
    return parts[0].text(), parts[1].integer(1)


def _small(
    value: Checked, operators: Mapping[str, PlanOperator]
) -> tuple[tuple[str, tuple[tuple[str, int], ...]], ...]:
    found = []
    for name, rows in value.mapping().items():
        if name not in operators and name != FINALLY:
            raise PlanError(f"{rows.place}: none of the body's operators is called so: correct it, or {_KIND.again}")
        found.append((name, tuple(_identity(row) for row in rows.sequence())))
    return tuple(found)


def _segments(value: Checked, operators: Mapping[str, PlanOperator]) -> tuple[PlanSegment, ...]:
    """Segments, in which each operator must run once."""
    seen: dict[str, Checked] = {}
    segments = []
    for row in value.sequence():
        fields = _fields(row, "run", "predicted_us measured_us guessed")
        for entry in fields["run"].sequence():
            name = entry.text()
            if name not in operators:
                raise entry.error("must be the name of one of the body's operators")
            if name in seen:
                raise PlanError(
                    f"{entry.place}: {ascii(name)} runs in {seen[name].place} too: remove it from one place"
                )
            seen[name] = entry
        segments.append(_segment(fields))
    for name in operators:
        if name not in seen:
            raise PlanError(f"{value.place}: {ascii(name)} stands in no segment: put it where it is to run")
    return tuple(segments)


def _segment(fields: Mapping[str, Checked]) -> PlanSegment:
    measured = fields.get("measured_us")
    return PlanSegment(
        tuple(entry.text() for entry in fields["run"].sequence()),
        fields["predicted_us"].number(_MAX_MICROSECONDS) if "predicted_us" in fields else 0.0,
        None if measured is None or measured.value is None else measured.number(_MAX_MICROSECONDS),
        fields["guessed"].number(1.0) if "guessed" in fields else 0.0,
    )


def _one_of(value: Checked, choices: Iterable[str]) -> str:
    if value.value not in tuple(choices):
        raise value.error(f"must be one of {', '.join(choices)}")
    return value.value
