"""Forms of fused computations: equal if they run the same kernel, different if they do not."""

import time

from dhelix.passes.evaluation.fusion_form import Form, form_of
from dhelix.passes.hlo import HloModule
from dhelix.tests.machine import slowness

SCALE = """
  x = f32[2048,4096]{1,0} parameter(0)
  w = f32[4096]{0} parameter(1)
  wide = f32[2048,4096]{1,0} broadcast(w), dimensions={1}
  ROOT scaled = f32[2048,4096]{1,0} multiply(x, wide)
"""
TEXT = "0=parameter() f32[d0]; 1=broadcast(0) f32[d1,d0]; 2=parameter() f32[d1,d0]; 3=multiply(1,2) f32[d1,d0]; -> 3"


def form(body: str) -> Form:
    """Form of a fusion of `body`, whose parameters are the operands."""
    lines = [line.strip() for line in body.strip().splitlines()]
    parameters = [line for line in lines if " parameter(" in line]
    root = next(line for line in lines if line.startswith("ROOT"))
    result = root.split("= ")[1].rsplit(")", 1)[0]
    shape = result[: result.index(") ") + 1] if result.startswith("(") else result.split(" ")[0]
    names = [p.split(" = ")[0] for p in parameters]
    calls = f"ROOT fusion = {shape} fusion({', '.join(names)}), kind=kLoop, calls=fused"
    sum_ = "sum {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT c = f32[] add(a, b)\n}"
    entry = "\n".join([*parameters, calls])
    text = f"HloModule m, is_scheduled=true\n{sum_}\nfused {{\n{chr(10).join(lines)}\n}}\nENTRY e {{\n{entry}\n}}"
    return form_of(HloModule.from_text(text).entry.root)


def test_the_text_of_a_form() -> None:
    """Profiles hold digests of this text, so a changed text makes existing profiles useless."""
    found = form(SCALE)
    assert found.text == TEXT
    assert found.sizes == (4096, 2048)
    assert found.digest == "0a619a19e2"
    assert found.label == "multiply"


def test_sizes_do_not_count_even_where_they_are_equal_by_chance() -> None:
    square = form(SCALE.replace("2048", "4096"))
    assert square.text == TEXT
    assert square.sizes == (4096, 4096)


def test_the_order_of_instructions_and_of_commutative_operands_does_not_count() -> None:
    lines = SCALE.strip().splitlines()
    moved = "\n".join([lines[1], lines[2], lines[0], lines[3].replace("(x, wide)", "(wide, x)")])
    moved = moved.replace("parameter(0)", "parameter(2)").replace("parameter(1)", "parameter(0)")
    assert form(moved.replace("parameter(2)", "parameter(1)")) == form(SCALE)


def test_operations_types_and_dimensions_count() -> None:
    others = [
        SCALE.replace("multiply(", "add("),
        SCALE.replace("f32", "bf16"),
        SCALE.replace("f32[4096]{0}", "f32[2048]{0}").replace("dimensions={1}", "dimensions={0}"),
        SCALE.replace("multiply(x, wide)", "multiply(wide, wide)"),
    ]
    assert len({form(other).text for other in [SCALE, *others]}) == 5


def test_dimensions_of_one_do_not_count() -> None:
    padded = SCALE.replace("[2048,4096]{1,0}", "[1,2048,4096]{2,1,0}").replace("dimensions={1}", "dimensions={2}")
    assert form(padded) == form(SCALE)


def test_constants_count_by_their_type_alone() -> None:
    body = """
      x = f32[64,32]{1,0} parameter(0)
      c = f32[] constant(VALUE)
      wide = f32[64,32]{1,0} broadcast(c), dimensions={}
      ROOT y = f32[64,32]{1,0} subtract(x, wide)
    """
    assert form(body.replace("VALUE", "1")) == form(body.replace("VALUE", "2"))


def test_what_is_elementwise_is_flat() -> None:
    body = "x = f32[SHAPE]{LAYOUT} parameter(0)\n ROOT y = bf16[SHAPE]{LAYOUT} convert(x)"
    forms = [
        form(body.replace("SHAPE", shape).replace("LAYOUT", layout))
        for shape, layout in (("64,32", "1,0"), ("32,64", "0,1"), ("4,8,64", "2,1,0"), ("2048", "0"))
    ]
    assert forms[0].sizes == (2048,)
    assert all(f == forms[0] for f in forms)


def test_transpositions_are_not_flat() -> None:
    turned = form("x = f32[64,64]{1,0} parameter(0)\n ROOT y = f32[64,64]{1,0} transpose(x), dimensions={1,0}")
    assert turned.sizes == (64, 64)
    assert turned.label == "transpose"
    renamed = form("x = f32[64,32]{1,0} parameter(0)\n ROOT y = f32[32,64]{0,1} transpose(x), dimensions={1,0}")
    assert renamed.sizes == (2048,), "the memory stays as it is"


SLICED = """
  stack = f32[8,1024,512]{2,1,0} parameter(0)
  layer = s32[] parameter(1)
  zero = s32[] constant(0)
  slot = f32[1,1024,512]{2,1,0} dynamic-slice(stack, layer, zero, zero), dynamic_slice_sizes={1,1024,512}
  ROOT twice = f32[1,1024,512]{2,1,0} add(slot, slot)
"""
WHOLE = "slot = f32[1024,512]{1,0} parameter(0)\n ROOT twice = f32[1024,512]{1,0} add(slot, slot)"


def test_a_slice_of_a_parameter_is_a_parameter_whatever_its_index() -> None:
    assert form(SLICED) == form(WHOLE)
    backwards = SLICED.replace(
        "zero = s32[] constant(0)", "zero = s32[] constant(0)\n last = s32[] subtract(zero, layer)"
    )
    assert form(backwards.replace("(stack, layer,", "(stack, last,")) == form(WHOLE)


def test_parts_of_rows_are_not_contiguous() -> None:
    body = "x = f32[1024,512]{1,0} parameter(0)\n ROOT y = f32[SHAPE]{1,0} slice(x), slice={BOUNDS}"
    rows = form(body.replace("SHAPE", "16,512").replace("BOUNDS", "[0:16],[0:512]"))
    columns = form(body.replace("SHAPE", "1024,16").replace("BOUNDS", "[0:1024],[0:16]"))
    assert rows.sizes == (16 * 512,)
    assert columns.sizes == (1024, 16)
    assert rows.text != columns.text
    assert rows.label == columns.label == "read"


def test_an_update_in_place_counts_by_what_is_written() -> None:
    body = """
      stack = f32[LAYERS,1024,512]{2,1,0} parameter(0)
      value = f32[1024,512]{1,0} parameter(1)
      layer = s32[] parameter(2)
      zero = s32[] constant(0)
      slot = f32[1,1024,512]{2,1,0} bitcast(value)
      ROOT saved = f32[LAYERS,1024,512]{2,1,0} dynamic-update-slice(stack, slot, layer, zero, zero)
    """
    four, eight = (form(body.replace("LAYERS", n)) for n in ("4", "8"))
    assert four == eight
    assert (four.label, four.sizes) == ("update", (1024 * 512,))
    assert four.text != form(WHOLE).text


def test_a_buffer_made_in_the_fusion_is_written_whole() -> None:
    body = """
      value = f32[1,1024]{1,0} parameter(0)
      layer = s32[] parameter(1)
      zero = s32[] constant(0)
      nothing = f32[] constant(0)
      stack = f32[LAYERS,1024]{1,0} broadcast(nothing), dimensions={}
      ROOT saved = f32[LAYERS,1024]{1,0} dynamic-update-slice(stack, value, layer, zero)
    """
    assert form(body.replace("LAYERS", "4")).sizes != form(body.replace("LAYERS", "8")).sizes


def test_reductions_name_their_function_and_keep_their_dimensions() -> None:
    body = """
      x = f32[64,32]{1,0} parameter(0)
      zero = f32[] constant(0)
      ROOT y = f32[LEFT]{0} reduce(x, zero), dimensions={GONE}, to_apply=sum
    """
    rows = form(body.replace("LEFT", "64").replace("GONE", "1"))
    columns = form(body.replace("LEFT", "32").replace("GONE", "0"))
    assert "reduce[add]" in rows.text
    assert rows.sizes == columns.sizes == (64, 32)
    assert rows.text != columns.text


def test_sizes_that_follow_from_others_are_left_out() -> None:
    body = """
      x = f32[64,32]{1,0} parameter(0)
      w = f32[32]{0} parameter(1)
      y = f32[64,4,8]{2,1,0} bitcast(x)
      zero = f32[] constant(0)
      ROOT z = f32[64,4]{1,0} reduce(y, zero), dimensions={2}, to_apply=sum
    """
    assert form(body).sizes == (64, 4, 8)


def test_deep_fusions_are_read_in_no_time() -> None:
    lines = ["x0 = f32[64]{0} parameter(0)"]
    lines += [f"x{n} = f32[64]{{0}} add(x{n - 1}, x{n // 2})" for n in range(1, 3000)]
    lines[-1] = f"ROOT {lines[-1]}"
    started = time.process_time()
    assert form("\n".join(lines)).sizes == (64,)
    assert time.process_time() - started < 2.0 * slowness()
