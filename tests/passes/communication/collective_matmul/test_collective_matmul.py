"""Collective matmuls put into HLO: golden output, and notes with the reason for every collective that is left alone."""

import re

import pytest

from dhelix.errors import DhelixError
from dhelix.passes.communication.collective_matmul.collective_matmul import PARTLY_MANUAL, CollectiveMatmul
from dhelix.passes.framework.manager import PassContext, PassManager, Stage
from dhelix.passes.hlo import HloModule
from dhelix.profiles.collective_matmul.sites import Form
from dhelix.tests.passes import golden
from dhelix.tests.passes.communication.collective_matmul.forms import Seen, TextForms

FORWARD, BACKWARD = "collective_matmul/forward_layer.hlo", "collective_matmul/backward_layer.hlo"


def lowered(forms: TextForms | Seen | None = None) -> CollectiveMatmul:
    return CollectiveMatmul(forms or TextForms(), Stage.LOWERED)


def notes(text: str, forms: TextForms | Seen | None = None) -> list[str]:
    context = PassContext()
    lowered(forms).run(HloModule.from_text(text), context)
    return [str(note) for note in context.notes]


@pytest.mark.parametrize("name", golden.files("collective_matmul"))
def test_golden(name: str) -> None:
    _, after, report = golden.run(golden.read(name), lowered())
    golden.filecheck(golden.printed(after), name)
    assert [note.message for note in report.notes] == ["a collective matmul"] * 2


def test_it_runs_once() -> None:
    """The spliced-in form is again a gather and a product, but the pass does not take it a second time."""
    _, after, _ = golden.run(golden.read(FORWARD), lowered())
    again, report = PassManager((lowered(),), strict=True).run(Stage.LOWERED, after.to_bytes())
    assert again is None and not report.passes[0].notes


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("jit(step)/collective_matmul/all_gather", 1),
        ("jit(step)/transpose(jvp(collective_matmul))/all_gather", 1),
        ("jit(collective_matmul)/all_gather", 2),
        ("jit(step)/my_collective_matmul/all_gather", 2),
    ],
)
def test_what_the_user_wrote_as_one_is_left(name: str, taken: int) -> None:
    _, _, report = golden.run(golden.read(BACKWARD).replace("jit(step)/all_gather", name), lowered())
    assert sum(note.facts["count"] for note in report.notes if note.message == "a collective matmul") == taken


def test_whatever_is_made_has_a_layout() -> None:
    """XLA's analysis of collectives runs before layouts are assigned, and aborts the process if one is missing."""
    for name in golden.files("collective_matmul"):
        _, after, _ = golden.run(golden.read(name), lowered())
        shapes = [i.shape for c in after.computations for i in c.instructions if not i.shape.tuple_shapes]
        assert all(len(s.layout.minor_to_major) == len(s.dimensions) for s in shapes)


@pytest.mark.parametrize(
    ("names", "co_executed"),
    [("alpha alpha", False), ("beta beta", False), ("alpha beta", True), ("beta alpha", True)],
)
def test_sites_are_told_apart_by_whether_both_strands_multiply_beside_them(names: str, co_executed: bool) -> None:
    """The site itself needs no strand name. The pass looks at all products of the computation."""
    text = golden.read(FORWARD)
    products = "up = bf16[16,8] dot(rows, w_up)", "down = bf16[16,16] dot(both, w_down)"
    for product, strand in zip(products, names.split(), strict=True):
        line = f"{product}, lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
        assert line in text
        text = text.replace(line, f'{line}, metadata={{op_name="strand_{strand}/jit(step)/dot"}}')
    found = notes(text)
    assert len(found) == 2 and all((" over 4, co-executed)" in note) is co_executed for note in found)
    assert (notes(text, TextForms(paired=True)) == ["left alone: paired (count=2)"]) is co_executed


def test_equal_input_gives_equal_bytes() -> None:
    source = HloModule.from_text(golden.read(BACKWARD)).to_bytes()
    first, second = (PassManager((lowered(),)).run(Stage.LOWERED, source)[0] for _ in range(2))
    assert first == second and first is not None


def test_below_the_threshold_nothing_changes() -> None:
    text = golden.read(FORWARD)
    module = HloModule.from_text(text)
    source = module.to_bytes()
    assert not lowered(TextForms(least_rows=17)).run(module, PassContext())
    assert module.to_bytes() == source
    assert notes(text, TextForms(least_rows=17)) == ["left alone: no collective matmul is known to be faster (count=2)"]


def test_the_choice_is_asked_about_sites() -> None:
    seen = Seen()
    notes(golden.read(BACKWARD), seen)
    assert [pattern.site.key for pattern in seen.patterns] == [
        "all_gather_matmul bfloat16 16x16x8 over 4",
        "matmul_reduce_scatter bfloat16 16x16x16 over 4",
    ]
    assert seen.patterns[1].contractions == (8, 8) and seen.patterns[0].gathered


def test_a_form_that_cannot_be_had_is_left_and_said_once() -> None:
    refusing = TextForms(refuse="4 chunks do not divide 6 rows")
    assert notes(golden.read(FORWARD), refusing) == ["left alone: 4 chunks do not divide 6 rows (count=2)"]
    with pytest.raises(DhelixError, match="4 chunks do not divide"):
        golden.run(golden.read(FORWARD), lowered(refusing))


def test_a_scheduled_module_is_left_alone() -> None:
    text = golden.read(BACKWARD).replace("HloModule step,", "HloModule step, is_scheduled=true,")
    assert notes(text) == ["left alone: the module is scheduled"]


def test_what_the_compiler_still_has_to_partition_is_left_alone() -> None:
    """The groups of a shard_map over tp alone do not show that dp is partitioned later."""
    meshes = 'frontend_attributes={xla.sdy.meshes={mesh = #sdy.mesh<["dp"=2, "tp"=4]>}}'
    text = golden.read(BACKWARD).replace("num_partitions=4", f"num_partitions=8, {meshes}")
    call = 'w_up = bf16[16,8] custom-call(up_parameter), custom_call_target="xla.sdy.GlobalToLocalShape"'
    manual = 'frontend_attributes={xla.sdy.manual_axes="#sdy<manual_axes{\\"AXES\\"}>"}'
    text = text.replace("w_up = bf16[16,8] parameter(3)", f"up_parameter = bf16[16,8] parameter(3)\n  {call}, {manual}")
    assert notes(text.replace('\\"AXES\\"', '\\"tp\\"')) == [f"left alone: {PARTLY_MANUAL}"]
    assert "a collective matmul" in notes(text.replace('\\"AXES\\"', '\\"dp\\", \\"tp\\"'))[0]


def test_inside_a_fusion_nothing_is_looked_at() -> None:
    text = """HloModule m
fused { x = bf16[4,32] parameter(0)
  w = bf16[32,8] parameter(1)
  g = bf16[16,32] all-gather(x), dimensions={0}, channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true
  ROOT y = bf16[16,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0} }
ENTRY e { x = bf16[4,32] parameter(0)
  w = bf16[32,8] parameter(1)
  ROOT f = bf16[16,8] fusion(x, w), kind=kCustom, calls=fused }"""
    seen = Seen()
    assert not notes(text, seen) and not seen.patterns


def test_one_product_between_gather_and_scatter_belongs_to_the_gather() -> None:
    text = """HloModule m
add { a = bf16[] parameter(0)
  b = bf16[] parameter(1)
  ROOT c = bf16[] add(a, b) }
ENTRY e { x = bf16[4,32] parameter(0)
  w = bf16[32,8] parameter(1)
  g = bf16[16,32] all-gather(x), dimensions={0}, channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true
  y = bf16[16,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT r = bf16[4,8] reduce-scatter(y), dimensions={0}, to_apply=add, channel_id=2, replica_groups={{0,1,2,3}},
    use_global_device_ids=true }"""
    assert notes(text) == [
        "left alone: another collective already uses its product (count=1)",
        "a collective matmul (count=1, form=ring, site=all_gather_matmul bfloat16 16x32x8 over 4)",
    ]


def test_control_dependencies_and_names_of_the_rest_stay() -> None:
    text = golden.read(
        BACKWARD, {"d_up = bf16[16,8] add(da, a)": 'd_up = bf16[16,8] add(da, a), control-predecessors={da}, '
                   'metadata={op_name="jit(step)/up"}'},
    )  # fmt: skip
    _, after, report = golden.run(text, lowered())
    printed = golden.printed(after)
    assert re.search(r'%d_up = .* add\(.*control-predecessors=\{%\S+\}, metadata=\{op_name="jit\(step\)/up"', printed)
    assert report.notes[-1].facts["count"] == 1


def test_a_product_that_the_program_orders_is_left_alone() -> None:
    text = golden.read(
        BACKWARD, {"da = bf16[16,8] dot(rows, w_down),": "da = bf16[16,8] dot(rows, w_down), control-predecessors={a},"}
    )
    assert "left alone: no product reads it and contracts another dimension than the gathered one (count=1)" in notes(
        text
    )


def test_a_gather_that_something_has_to_wait_for_is_left_alone() -> None:
    text = golden.read(
        BACKWARD,
        {"d_up = bf16[16,8] add(da, a)": "d_up = bf16[16,8] add(da, a), control-predecessors={all_gather}"},
    )
    assert "left alone: it has control dependencies (count=1)" in notes(text)


def test_the_stage_is_an_option() -> None:
    assert CollectiveMatmul(TextForms()).stage is Stage.PRE_SCHEDULER
    manager = PassManager((CollectiveMatmul(TextForms()),))
    assert manager.fingerprint() != PassManager((CollectiveMatmul(TextForms(Form("hybrid", 2))),)).fingerprint()
