"""Tile assignments are read as shardings over one mesh, and written back."""

from __future__ import annotations

import pytest

from dhelix.errors import PassRefusal
from dhelix.passes.analysis.gspmd_shardings import as_shardy
from dhelix.passes.hlo import Builder, HloModule, Instruction
from dhelix.passes.hlo.constraints import Over, constrained, mesh_size, stated

PLAIN = "{devices=[2,1,1,4]<=[8] last_tile_dim_replicate}"
TURNED = "{devices=[1,2,2,2]<=[2,2,2]T(2,0,1) last_tile_dim_replicate}"


def module(*shardings: str, constraint: str = "") -> HloModule:
    lines = [f"p{k} = f32[8,8,8] parameter({k}), sharding={sharding}" for k, sharding in enumerate(shardings)]
    lines.append(f'ROOT c = f32[8,8,8] custom-call(p0), custom_call_target="Sharding", {constraint}sharding={PLAIN}')
    return HloModule.from_text("HloModule m\nENTRY e {\n" + "\n".join(lines) + "\n}\n")


def over(value: Instruction) -> list[Over]:
    found = stated(value)
    assert found is not None
    return found.over


def test_tiles_are_read_over_the_coarsest_mesh_that_holds_all() -> None:
    read = module(PLAIN, TURNED, "{replicated}", constraint='backend_config="unspecified_dims=[1,2]", ')
    as_shardy(read)
    assert read.proto.frontend_attributes.map["xla.sdy.meshes"].count("=2") == 3
    plain, turned, replicated = (over(parameter) for parameter in read.entry.parameters)
    assert plain == [("axis_0",), (), ()]
    assert turned == [(), ("axis_2",), ("axis_0",)]
    assert replicated == [(), (), ()]
    assert over(read.entry.root) == [("axis_0",), None, None]
    assert mesh_size(module(PLAIN)) == 8


def test_what_is_written_is_read_again() -> None:
    written = module(TURNED, TURNED)
    split = [("axis_2",), None, ("axis_1", "axis_0")]
    axes: dict[str, int] = dict.fromkeys(("axis_0", "axis_1", "axis_2"), 2)
    root = constrained(Builder(written.entry), written.entry.parameters[0], split, "", axes)
    written.entry.root = root
    read = HloModule.from_bytes(written.to_bytes())
    as_shardy(read)
    assert over(read.entry.root) == split


@pytest.mark.parametrize(
    ("shardings", "reason"),
    [
        (["{devices=[2,2,2]0,1,2,3,4,6,5,7}"], "one by one"),
        (["{devices=[2,1,1,2,2]<=[8] last_tile_dims={manual, replicated}}"], "neither tiled"),
        (["{devices=[4,1,1]<=[4]}"], "different numbers of devices"),
    ],
)
def test_tiles_of_no_common_mesh_are_refused(shardings: list[str], reason: str) -> None:
    with pytest.raises(PassRefusal, match=reason):
        as_shardy(module(*shardings))


def test_tiles_that_cut_devices_across_each_other_are_refused() -> None:
    threes, fours = (f"{{devices=[{n},1,1,{12 // n}]<=[12] last_tile_dim_replicate}}" for n in (3, 4))
    read = module(threes, fours)
    read.entry.root.proto.ClearField("sharding")
    with pytest.raises(PassRefusal, match="match no common mesh"):
        as_shardy(read)
