"""HLO text of other XLA versions: what is read, which attributes are left out, and what stays an error."""

from __future__ import annotations

import time

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading import repairs
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.tests.machine import slowness

TEXT = """HloModule step, is_scheduled=trueHEADER

double {
  d = f32[8] parameter(0)
  ROOT e = f32[8] add(d, d)
}

ENTRY main {
  p = f32[8] parameter(0)PARAMETER
  n = f32[8] negate(p)NEGATE
  k = f32[8] negate(n)
  BODY
  ROOT z = f32[8] sine(k), metadata={op_name="jit(step)/sin"META}
}
"""


def text(header: str = "", parameter: str = "", negate: str = "", body: str = "", meta: str = "") -> str:
    parts = {"HEADER": header, "PARAMETER": parameter, "NEGATE": negate, "BODY": body, "META": meta}
    made = TEXT
    for place, part in parts.items():
        made = made.replace(place, part)
    return made


def by_name(module: HloModule) -> dict[str, Instruction]:
    return {i.name: i for i in module.entry.instructions}


@pytest.mark.parametrize(
    ("made", "left_out"),
    [
        (text(), ()),
        (text(body='c = f32[8] custom-call(k), custom_call_target="x", api_version=API_VERSION_UNSPECIFIED'), ()),
        (text(body="c = f8e4m3b11[] constant(1)"), ()),
        (text(body="s = ((f32[8]), f32[8], s32[]) async-start(k), async_group_id=3, calls=double\n"
              "  t = f32[8] async-done(s), async_group_id=3, calls=double"), ()),
        (text(body='s = ((f32[8]), f32[8], s32[]) custom-call-start(k), async_group_id=3, custom_call_target="x"\n'
              '  t = f32[8] custom-call-done(s), async_group_id=3, custom_call_target="x"'),
         ("custom_call_target of custom-call-done",)),
        (text(body="s = (f32[8], f32[8], u32[]) copy-start(k), is_cross_program_prefetch=true\n"
              "  t = f32[8] copy-done(s)"), ("is_cross_program_prefetch of copy-start",)),
        (text(header=', fingerprint="a, {b"'), ("fingerprint of the module",)),
        (text(negate=', made_up={1,{"}"}}, backend_config={"a":1}'), ("made_up of negate",)),
        (text(negate=', result_accuracy={mode=highest}', meta=" preserve_layout=true creation_pass=3"),
         ("result_accuracy of negate", "preserve_layout of metadata", "creation_pass of metadata")),
        (text(parameter=", sharding={mesh[x=8], [{x}]}"), ("sharding of parameter",)),
        (text(parameter=', origin={{"a"}, b}'), ("origin of parameter",)),
    ],
)  # fmt: skip
def test_what_other_versions_print_is_read(made: str, left_out: tuple[str, ...]) -> None:
    found = repairs.read(made)
    entry = by_name(found.module)
    assert found.left_out == left_out
    assert entry["z"].op_name == "jit(step)/sin"
    assert [i.name for i in entry["z"].operands] == ["k"]


def test_an_attribute_goes_from_instructions_of_its_opcode_only() -> None:
    body = "r = f32[] reduce(k, w), dimensions={0}, to_apply=sum"
    made = text(negate=", to_apply=double", body=f"w = f32[] constant(0)\n  {body}").replace(
        "double {",
        "sum {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT c = f32[] add(a, b)\n}\n\ndouble {",
    )
    found = repairs.read(made)
    assert found.left_out == ("to_apply of negate",)
    assert [c.name for c in by_name(found.module)["r"].called] == ["sum"]


def test_a_large_constant_that_is_not_in_the_text_takes_no_memory() -> None:
    body = "c = f32[65536,65536]{1,0} constant({...})\n  s = f32[4] constant({...})"
    start = time.monotonic()
    module = repairs.read(text(body=body)).module
    assert time.monotonic() - start < 10 * slowness() and len(module.to_bytes()) < 10_000
    constant = by_name(module)["c"]
    assert constant.opcode == "constant" and list(constant.shape.dimensions) == [65536, 65536]
    assert list(constant.shape.layout.minor_to_major) == [1, 0]
    assert by_name(module)["s"].proto.HasField("literal")
    assert "constant({...})" in module.to_text()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (text(body="t = f32[8] teleport(k)"), "was parsing 12:.*Unknown opcode: teleport"),
        (text(body="t = f32[8] add(k, missing)"), "missing"),
        (text(body="t = f32[8] call(k), to_apply=nothing"), "nothing"),
    ],
)
def test_what_cannot_be_repaired_keeps_xlas_message(made: str, message: str) -> None:
    with pytest.raises(DhelixError, match=message):
        repairs.read(made)


@pytest.mark.parametrize(
    "made",
    [
        text().replace("parameter(0)", "parameter(7)"),
        text(body="s = ((), (), s32[]) call-start(), to_apply=double\n"
             "  u = ((f32[8]), f32[8], s32[]) call-update(s, k)\n  t = f32[8] call-done(u)"),
        text(body="t = f32[] dot(k, ), lhs_contracting_dims={0}, rhs_contracting_dims={0}"),
    ],
)  # fmt: skip
def test_text_that_ends_xlas_process_leaves_ours(made: str) -> None:
    with pytest.raises(DhelixError):
        repairs.read(made)
