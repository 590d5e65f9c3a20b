"""`dhelix inspect` on collectives, messages, host transfers and kernels that are hard to count."""

import json
from pathlib import Path

import pytest

from dhelix.launch import cli
from dhelix.launch.inspect import picture
from dhelix.launch.inspect.command import inspect_dump
from dhelix.launch.inspect.inspection import Inspection, inspect_module, unknown_text
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.hlo import HloModule
from dhelix.profiles.hardware import H200

MIB = 2**20
BIG = "f32[16777216]"  # 64 MiB
GROUPS = "replica_groups=[1,8]<=[8], channel_id=1, use_global_device_ids=true"
ADD = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT c = f32[] add(a, b)\n}\n"
REDUCE = f"{BIG} all-reduce(p), to_apply=add, {GROUPS}"


def text(body: str, before: str = "", header: str = "num_partitions=8") -> str:
    return f"HloModule m, is_scheduled=true, {header}\n\n{ADD}\n{before}\nENTRY main {{\n{body}\n}}\n"


def inspected(body: str, before: str = "", header: str = "num_partitions=8") -> Inspection:
    return inspect_module(HloModule.from_text(text(body, before, header)), Costs(H200))


def test_a_combined_start_takes_as_long_as_the_plain_form() -> None:
    shape = f"({BIG}, {BIG})"
    parameters = f"  p = {BIG} parameter(0)\n  q = {BIG} parameter(1)\n"
    plain = inspected(f"{parameters}  ROOT r = {shape} all-reduce(p, q), to_apply=add, {GROUPS}")
    start = f"s = {shape} all-reduce-start(p, q), to_apply=add, {GROUPS}"
    pair = inspected(f"{parameters}  {start}\n  ROOT d = {shape} all-reduce-done(s)")
    (one,), (other,) = plain.collectives, pair.collectives
    assert one.bytes == other.bytes == 128 * MIB
    assert (one.devices, one.groups, one.notes) == (other.devices, other.groups, other.notes) == (8, 1, ())
    assert plain.step_ms == pair.step_ms


def test_no_groups_are_all_devices_of_the_module() -> None:
    body = f"  p = {BIG} parameter(0)\n  ROOT r = {REDUCE.replace('[1,8]<=[8]', '{}')}"
    (found,) = inspected(body, header="num_partitions=64").collectives
    assert (found.devices, found.groups, found.notes) == (64, 1, ())
    (found,) = inspected(body, header="allow_spmd_sharding_propagation_to_output={true}").collectives
    assert found.devices == 8 and "does not say how many devices" in found.notes[0]


BRANCHES = f"""yes {{
  p = {BIG} parameter(0)
  ROOT r = {REDUCE}
}}

no {{
  p = {BIG} parameter(0)
  ROOT small = {BIG} all-gather(p), dimensions={{0}}, {GROUPS.replace("[1,8]", "[8,1]")}
}}
"""
CHOICE = f"  which = pred[] parameter(0)\n  q = {BIG} parameter(1)\n  ROOT x = {BIG} conditional(which, q, q), \
true_computation=yes, false_computation=no"


def test_collectives_of_all_branches_are_there_and_the_longest_branch_counts() -> None:
    found = inspected(CHOICE, BRANCHES)
    counted, other = found.collectives
    assert (counted.instruction, counted.executions) == ("r", 1)
    assert (other.instruction, other.executions, other.alone_ms) == ("small", 0, 0.0)
    assert counted.notes == ("it runs in one of 2 branches of x",)
    assert other.notes == (*counted.notes, "not in the estimate: the other branch takes longer")
    assert found.exposed_ms == pytest.approx(counted.exposed_ms)
    assert found.notes == ("in every execution of x the longest branch counts",)


LOOP = f"""body {{
  s = (s32[], s32[], {BIG}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] get-tuple-element(s), index=1
  p = {BIG} get-tuple-element(s), index=2
  one = s32[] constant(1)
  j = s32[] add(i, one)
  r = {REDUCE}
  ROOT t = (s32[], s32[], {BIG}) tuple(j, n, r)
}}

cond {{
  s = (s32[], s32[], {BIG}) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  n = s32[] get-tuple-element(s), index=1
  ROOT c = pred[] compare(i, n), direction=LT
}}
"""
WHILE = f"""  n = s32[] parameter(0)
  p = {BIG} parameter(1)
  z = s32[] constant(0)
  t = (s32[], s32[], {BIG}) tuple(z, n, p)
  ROOT w = (s32[], s32[], {BIG}) while(t), condition=cond, body=body"""


def test_a_loop_of_unknown_length_counts_once_and_says_so() -> None:
    found = inspected(WHILE, LOOP)
    (reduce,) = found.collectives
    assert (reduce.executions, reduce.loops) == (1, ("w",))
    assert reduce.notes == ("the number of runs of w is unknown: it counts once",)
    assert found.notes == ("the trip count of w depends on data: each body counts once",)
    known = inspected(f'{WHILE}, backend_config={{"known_trip_count":{{"n":"5"}}}}', LOOP)
    assert known.notes == () and known.collectives[0].executions == 5


def test_a_loop_that_never_runs_costs_nothing(tmp_path: Path) -> None:
    """This also holds with a profile. Its clock estimate divides load by time, and both are zero here."""
    never = WHILE.replace("n = s32[] parameter(0)", "n = s32[] constant(0)").replace("parameter(1)", "parameter(0)")
    (tmp_path / "step.hlo").write_text(text(never, LOOP))
    found = inspect_dump(tmp_path / "step.hlo", "H200", profile="auto")
    assert (found.step_ms, found.communication_alone_ms) == (0.0, 0.0)
    (reduce,) = found.collectives
    assert (reduce.executions, reduce.notes) == (0, ("not in the estimate: its loop does not run",))


def test_what_does_not_run_and_what_conditions_say_is_noted() -> None:
    never = inspected(f'{WHILE}, backend_config={{"known_trip_count":{{"n":"0"}}}}', LOOP)
    assert never.collectives[0].notes == ("not in the estimate: its loop does not run",)
    asks = LOOP.replace(
        "  ROOT c = pred[]", f"  p = {BIG} get-tuple-element(s), index=2\n  r = {REDUCE}\n  ROOT c = pred[]"
    )
    assert "the conditions of w communicate, which is not counted" in inspected(WHILE, asks).notes


CALLS = f"""  p = {BIG} parameter(0)
  a = {BIG} custom-call(p), custom_call_target="flash_mla"
  b = {BIG} custom-call(a), custom_call_target="flash_mla"
  c = {BIG} custom-call(b), custom_call_target="triton_kernel_call"
  ROOT d = {BIG} custom-call(c), custom_call_target="te_norm_forward_ffi"
"""


def test_unknown_kernels_are_counted_and_named() -> None:
    found = inspected(CALLS)
    assert [(u.target, u.family, u.instructions, u.executions) for u in found.unknown] == [
        ("flash_mla", "unknown", 2, 2),
        ("triton_kernel_call", "Triton kernel", 1, 1),
    ]
    assert found.unknown[0].bytes == 4 * 64 * MIB
    words = "3 kernels are unknown custom calls, counted by the bytes they move"
    assert unknown_text(found) == words and words in picture.of(found).summary
    assert found.to_dict()["unknown_kernels"] == 3
    assert unknown_text(inspected(WHILE, LOOP)) == ""


def test_nothing_is_hidden_under_a_pair_that_xla_made_synchronous() -> None:
    """In dumps of 2024 and earlier, compute may still stand between the start and the done of such a pair."""
    body = f"""  p = {BIG} parameter(0)
  a = bf16[8192,8192] parameter(1)
  s = {BIG} all-reduce-start(p), to_apply=add, {GROUPS}, \
backend_config={{"collective_backend_config":{{"is_sync":SYNC}}}}
  d = bf16[8192,8192] dot(a, a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  r = {BIG} all-reduce-done(s)
  ROOT t = ({BIG}, bf16[8192,8192]) tuple(r, d)"""
    beside, alone = (inspected(body.replace("SYNC", word)) for word in ("false", "true"))
    assert beside.hidden_ms > 0.0 and beside.collectives[0].notes == ()
    assert (alone.hidden_ms, alone.exposed_ms) == (0.0, alone.communication_alone_ms)
    assert "made it synchronous" in alone.collectives[0].notes[0]


OFFLOAD = f"""  p = {BIG} parameter(0)
  a = bf16[8192,8192] parameter(1)
  cs = ({BIG}{{0:S(5)}}, {BIG}, u32[]) copy-start(p)
  d = bf16[8192,8192] dot(a, a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  cd = {BIG}{{0:S(5)}} copy-done(cs)
  ROOT t = ({BIG}{{0:S(5)}}, bf16[8192,8192]) tuple(cd, d)
"""


def test_host_transfers_have_a_row_a_lane_and_a_total() -> None:
    found = inspected(OFFLOAD)
    (copy,) = found.collectives
    assert (copy.kind, copy.bytes, copy.devices, copy.groups, copy.notes) == ("copy to host", 64 * MIB, 1, 1, ())
    assert [u.what for u in copy.under] == ["GEMM"]
    assert found.host_ms == pytest.approx(copy.alone_ms) and found.host_ms > 64 * MIB / 63e6
    assert "communication with the host" in picture.of(found).lanes


def test_plan_and_profile_count_host_transfers_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` lists a host transfer as a collective. `profile` lists it as an operator, with the same time."""
    monkeypatch.setenv("DHELIX_PROFILES", str(tmp_path))
    path = tmp_path / "m.hlo"
    path.write_text(text(OFFLOAD))
    outputs = []
    for command in ("plan", "profile"):
        with pytest.raises(SystemExit) as stopped:
            cli.main([command, str(path), "--hardware=H200", "--json"])
        assert not stopped.value.code
        outputs.append(json.loads(capsys.readouterr().out))
    (copy,) = outputs[0]["collectives"]
    assert (copy["kind"], copy["bytes"]) == ("copy to host", 64 * MIB)
    (row,) = (r for r in outputs[1]["settings"]["default"]["operators"] if "copy-to-host" in r["key"])
    assert row["seconds"] == pytest.approx(1e-6 * copy["alone_us"])


def test_a_file_keeps_what_its_first_line_says(tmp_path: Path) -> None:
    path = tmp_path / "m.hlo"
    body = f"  p = {BIG} parameter(0)\n  ROOT r = {REDUCE.replace('[1,8]<=[8]', '{}')}"
    path.write_text(text(body, header="num_partitions=64"))
    (found,) = inspect_dump(path, "H200").collectives
    assert found.devices == 64


def test_tables_say_what_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.hlo"
    path.write_text(text(CALLS.replace("ROOT d =", "d =") + CHOICE.replace("parameter(0)", "parameter(2)"), BRANCHES))
    for flags in ([], ["--json"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(["inspect", str(path), *flags])
        assert not stopped.value.code
        shown = capsys.readouterr().out
        assert "it runs in one of 2 branches of x" in shown
        if flags:
            found = json.loads(shown)["inspection"]
            assert found["unknown_kernels"] == 3 and found["unknown"][0]["target"] == "flash_mla"
            assert {c["groups"] for c in found["collectives"]} == {1, 8}
        else:
            assert (
                "3 kernels are unknown custom calls, counted by the bytes they move: flash_mla (unknown), 2 x" in shown
            )
            assert "8 x 1" in shown
