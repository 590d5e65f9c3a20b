"""Manual computations (shard_maps): chains of three are read and made, how arrays are split, which devices sum."""

import pytest

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import HloModule, verify
from dhelix.passes.hlo.manual_computation import (
    Split,
    elements,
    groups_over,
    make_manual,
    manual_computations,
    mesh_axes,
    splits,
)

AXES = 'xla.sdy.manual_axes="#sdy<manual_axes{\\"dp\\", \\"tp\\"}>"'
IN = r'xla.sdy.in_shardings="#sdy.sharding_per_value<[<@mesh, [{\"dp\"}, {}]>, <@mesh, [{}, {\"tp\"}]>]>"'
OUT = r'xla.sdy.out_shardings="#sdy.sharding_per_value<[<@mesh, [{\"dp\"}, {\"tp\"}]>]>"'
TEXT = f"""HloModule m, frontend_attributes={{xla.sdy.meshes={{mesh = #sdy.mesh<["dp"=2, "tp"=3]>,
  back = #sdy.mesh<["a"=2, "b"=2], device_ids=[3, 2, 1, 0]>}}}}
xla.sdy.manual_computation_body {{ x = f32[2,8] parameter(0)
  w = f32[8,5] parameter(1)
  y = f32[2,5] dot(x, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT results = (f32[2,5]) tuple(y) }}
ENTRY main {{ x = f32[4,8] parameter(0)
  w = f32[8,15] parameter(1)
  local = (f32[2,8], f32[8,5]) custom-call(x, w), custom_call_target="xla.sdy.GlobalToLocalShape",
    custom_call_has_side_effect=true, frontend_attributes={{{IN},{AXES}}}
  x_local = f32[2,8] get-tuple-element(local), index=0
  w_local = f32[8,5] get-tuple-element(local), index=1
  run = (f32[2,5]) call(x_local, w_local), to_apply=xla.sdy.manual_computation_body
  y_local = f32[2,5] get-tuple-element(run), index=0
  global = (f32[4,15]) custom-call(y_local), custom_call_target="xla.sdy.LocalToGlobalShape",
    custom_call_has_side_effect=true, frontend_attributes={{{OUT},{AXES}}}
  ROOT y = f32[4,15] get-tuple-element(global), index=0 }}
"""


def test_a_chain_is_read_and_made_again() -> None:
    module = HloModule.from_text(TEXT)
    (one,) = manual_computations(module.entry)
    assert [(value.name.split(".")[0], split.axes) for value, split in one.operands] == [
        ("x", (('"dp"',), ())),
        ("w", ((), ('"tp"',))),
    ]
    assert [(n, split.axes) for n, split in one.results] == [(0, (('"dp"',), ('"tp"',)))]
    assert one.axis_names == ('"dp"', '"tp"') and not one.is_partial
    users = module.entry.users()
    assert one.to_global is not None
    ((y, _),) = elements(one.to_global, users)
    again, (made,) = make_manual(module.entry, one, one.operands, one.body, [(y.shape, one.results[0][1])])
    assert again.operands == one.operands and again.results == one.results and again.axes == one.axes
    module.entry.root = made
    verify(module)


@pytest.mark.parametrize("text", ['<@mesh, [{"dp", "tp"}, {?}, {"a":(1)2, ?}, {}]>', "<@mesh, []>"])
def test_splits_are_read_as_they_are_written(text: str) -> None:
    (split,) = splits(f"#sdy.sharding_per_value<[{text}]>")
    assert split.text == text and not split.more


def test_sums_that_are_open_say_more() -> None:
    assert splits('<@m, [{}], unreduced={"dp"}>') == [Split("m", ((),), (False,), more='unreduced={"dp"}')]


def test_who_sums_with_whom() -> None:
    module = HloModule.from_text(TEXT)
    assert mesh_axes(module, "mesh") == {'"dp"': 2, '"tp"': 3}
    assert groups_over(module, "mesh", ('"tp"',)) == [[0, 1, 2], [3, 4, 5]]
    assert groups_over(module, "mesh", ('"dp"',)) == [[0, 3], [1, 4], [2, 5]]
    assert groups_over(module, "back", ('"b"',)) == [[3, 2], [1, 0]]
    with pytest.raises(PassRefusal, match="does not declare axes"):
        groups_over(module, "other", ('"dp"',))
