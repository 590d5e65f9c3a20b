"""The independent parse of HLO text that counts are compared with, and the stored results."""

import json
from pathlib import Path

import pytest

from dhelix.benchmarks.collectives import public_collectives
from dhelix.passes.hlo import HloModule

TEXT = """HloModule m, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(f32[] %a, f32[] %b)
}

ENTRY %main (p: f32[1024], q: bf16[64]) -> (f32[1024], bf16[64]) {
  %p = f32[1024]{0} parameter(0)
  %q = bf16[64]{0} parameter(1)
  %s = (f32[1024]{0}, f32[1024]{0}) all-reduce-start(%p, %p), GROUPS, to_apply=%add
  %d = (f32[1024]{0}, f32[1024]{0}) all-reduce-done(%s)
  %g = ((f32[1024], bf16[64]), (f32[4096], /*index=1*/bf16[256])) all-gather-start(%p, %q), GROUPS, dimensions={0}
  %h = (f32[4096]{0}, bf16[256]{0}) all-gather-done(%g)
  %k = (bf16[64], bf16[64], u32[], u32[]) collective-permute-start(bf16[64] %q), source_target_pairs={{0,1},{1,0}}, PAIR
  %e = bf16[64]{0} collective-permute-done(%k)
  %r = f32[256]{0} reduce-scatter(f32[1024]{0} %p), GROUPS, dimensions={0}, to_apply=%add
  ROOT %t = (f32[1024]{0}, bf16[64]{0}) tuple(%p, %e)
}
"""
FORMS = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "replica_groups=[2,4]<=[8]": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "replica_groups=[2,4]<=[4,2]T(1,0)": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "replica_groups=mesh['a'=2,'b'=4] {'b'}": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "replica_groups=mesh['a'=4,'b'=2] {'a'}": ((0, 2, 4, 6), (1, 3, 5, 7)),
}


@pytest.mark.parametrize("form", FORMS)
def test_text_and_module_say_the_same(form: str) -> None:
    text = TEXT.replace("PAIR", "channel_id=2").replace("GROUPS", f"channel_id=1, {form}, use_global_device_ids=true")
    found = public_collectives.of_text(text)
    groups = FORMS[form]
    assert found == [
        ("all-gather", 4 * 4096 + 2 * 256, groups),
        ("all-reduce", 2 * 4096, groups),
        ("collective-permute", 128, ((0, 1), (1, 0))),
        ("reduce-scatter", 4096, groups),
    ]
    assert public_collectives.of_module(HloModule.from_text(text)) == found


def test_a_difference_is_said() -> None:
    text = TEXT.replace("PAIR", "channel_id=2").replace(
        "GROUPS", "channel_id=1, replica_groups=[2,4]<=[8], use_global_device_ids=true"
    )
    module = HloModule.from_text(text.replace("[2,4]", "[1,8]"))
    with pytest.raises(SystemExit, match="m.txt: inspect alone counts"):
        public_collectives.compare("m.txt", text, module)


def test_ten_programs_were_compared() -> None:
    results = Path(public_collectives.__file__).parents[1] / "results" / "public_collectives.json"
    rows = json.loads(results.read_text())
    assert len(rows) == 10 and sum(row["collectives"] for row in rows) == 444
    assert all("@" in row["repository"] and row["bytes"] > 0 for row in rows)
