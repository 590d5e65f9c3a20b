"""Which collectives the pass finds next to products, through moves and conversions, and which it leaves alone."""

import pytest

from dhelix.passes.communication.collective_matmul.pattern import Match, row_major_axis
from dhelix.passes.communication.collective_matmul.sites import SCATTERED, WIDER, find
from dhelix.passes.hlo import HloModule

GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"
FUNCTIONS = """
add {{ a = {0}[] parameter(0)
  b = {0}[] parameter(1)
  ROOT c = {0}[] add(a, b) }}
maximum {{ a = {0}[] parameter(0)
  b = {0}[] parameter(1)
  ROOT c = {0}[] maximum(a, b) }}
"""
NO_PRODUCT = "no product reads it and contracts another dimension than the gathered one"
READ = "the product has other readers"


def found(lines: str, kind: str = "bf16") -> list[Match | str]:
    """Result of `find` for an entry of these lines, in which GROUPS stands for one group of four devices."""
    body = lines.replace("GROUPS", GROUPS)
    return list(find(HloModule.from_text(f"HloModule m\n{FUNCTIONS.format(kind)}\nENTRY e {{\n{body}\n}}").entry))


def site(lines: str) -> Match:
    (match,) = found(lines)
    assert isinstance(match, Match), match
    return match


GATHERED = """x = bf16[4,32] parameter(0)
  w = bf16[32,8] parameter(1)
  g = bf16[16,32] all-gather(x), dimensions={0}, GROUPS
"""
SUMMED = """x = bf16[16,32] parameter(0)
  w = bf16[32,8] parameter(1)
  y = bf16[16,8] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""
SCATTER = "ROOT r = bf16[4,8] reduce-scatter(y), dimensions={0}, to_apply=add, GROUPS"

# name -> (lines, key of the site, batch, weights are [columns, K], the gathered array has other users)
SITES = {
    "gather": (GATHERED + "ROOT y = bf16[16,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "all_gather_matmul bfloat16 16x32x8 over 4", 1, False, False),
    "gather, weight the other way round": ("""x = bf16[4,32] parameter(0)
      w = bf16[8,32] parameter(1)
      g = bf16[16,32] all-gather(x), dimensions={0}, GROUPS
      ROOT y = bf16[16,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={1}""",
        "all_gather_matmul bfloat16 16x32x8 over 4", 1, True, False),
    "gather on the right": (GATHERED + "ROOT y = bf16[8,16] dot(w, g), lhs_contracting_dims={0}, "
        "rhs_contracting_dims={1}", "all_gather_matmul bfloat16 16x32x8 over 4", 1, False, False),
    "gather of the second dimension": ("""x = bf16[2,4,32] parameter(0)
      w = bf16[32,8] parameter(1)
      g = bf16[2,16,32] all-gather(x), dimensions={1}, GROUPS
      c = bf16[2,16,32] copy(g)
      rows = bf16[32,32] reshape(c)
      ROOT y = bf16[32,8] dot(rows, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}""",
        "all_gather_matmul bfloat16 32x32x8 over 4", 2, False, False),
    "gather, then narrower": ("""x = f32[4,32] parameter(0)
      w = bf16[32,8] parameter(1)
      g = f32[16,32] all-gather(x), dimensions={0}, GROUPS
      n = bf16[16,32] convert(g)
      ROOT y = bf16[16,8] dot(n, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}""",
        "all_gather_matmul bfloat16 16x32x8 over 4", 1, False, False),
    "gather, product in float32, then narrower": (GATHERED + """p = f32[16,8] dot(g, w), lhs_contracting_dims={1},
        rhs_contracting_dims={0}
      ROOT y = bf16[16,8] convert(p)""", "all_gather_matmul bfloat16 16x32x8 over 4", 1, False, False),
    "gather for two products and more": (GATHERED + """y = bf16[16,8] dot(g, w), lhs_contracting_dims={1},
        rhs_contracting_dims={0}
      v = bf16[32,4,2] parameter(2)
      u = bf16[16,4,2] dot(g, v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      t = bf16[16,32] tanh(g)
      ROOT r = (bf16[16,8], bf16[16,4,2], bf16[16,32]) tuple(y, u, t)""",
        "all_gather_matmul bfloat16 16x32x16 over 4", 1, False, True),
    "gather of heads, contracted one by one": ("""x = bf16[1,4,8,4] parameter(0)
      w = bf16[8,4,6] parameter(1)
      g = bf16[1,16,8,4] all-gather(x), dimensions={1}, GROUPS
      ROOT y = bf16[1,16,6] dot(g, w), lhs_contracting_dims={3,2}, rhs_contracting_dims={1,0}""",
        "all_gather_matmul bfloat16 16x32x6 over 4", 1, False, False),
    "scatter": (SUMMED + SCATTER, "matmul_reduce_scatter bfloat16 16x32x8 over 4", 1, False, False),
    "scatter of a wide product": ("""x = bf16[16,32] parameter(0)
      w = bf16[32,8] parameter(1)
      p = f32[16,8] dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      y = bf16[16,8] convert(p)
      """ + SCATTER, "matmul_reduce_scatter bfloat16 16x32x8 over 4", 1, False, False),
    "scatter of rows on the right": ("""w = bf16[32,8] parameter(0)
      x = bf16[16,32] parameter(1)
      p = bf16[8,16] dot(w, x), lhs_contracting_dims={0}, rhs_contracting_dims={1}
      y = bf16[16,8] transpose(p), dimensions={1,0}
      """ + SCATTER, "matmul_reduce_scatter bfloat16 16x32x8 over 4", 1, False, False),
    "scatter of a sum": (SUMMED.replace("y =", "p =") + """v = bf16[8,4] parameter(2)
      u = bf16[16,4] parameter(3)
      q = bf16[16,8] dot(u, v), lhs_contracting_dims={1}, rhs_contracting_dims={1}
      y = bf16[16,8] add(p, q)
      """ + SCATTER, "matmul_reduce_scatter bfloat16 16x36x8 over 4", 1, False, False),
    "all-reduce": (SUMMED + "ROOT r = bf16[16,8] all-reduce(y), to_apply=add, GROUPS",
        "matmul_all_reduce bfloat16 16x32x8 over 4", 1, False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", SITES)
def test_found(name: str) -> None:
    lines, key, batch, transposed, gathered = SITES[name]
    pattern = site(lines).pattern
    assert (pattern.site.key, pattern.batch, pattern.transposed, pattern.gathered) == (
        key, batch, transposed, gathered,
    )  # fmt: skip


def test_a_sum_of_products_lists_what_each_contracts() -> None:
    assert site(SITES["scatter of a sum"][0]).pattern.contractions == (32, 4)


def test_products_that_share_a_gather_are_one_site() -> None:
    match = site(SITES["gather for two products and more"][0])
    assert match.pattern.columns == (8, 8) and len(match.results) == 3


WIDE = GATHERED + "p = f32[16,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n "
LEFT = {
    "a product in float32": (WIDE.replace("p =", "ROOT p ="), WIDER),
    "a product in float32, narrowed and read as it is": (
        WIDE + "y = bf16[16,8] convert(p)\n t = f32[16,8] tanh(p)\n "
        "ROOT r = (bf16[16,8], f32[16,8]) tuple(y, t)", WIDER),
    "a product in float32, narrowed to another type": (WIDE + "ROOT y = f16[16,8] convert(p)", WIDER),
    "a product in float32 that something runs behind": (
        WIDE + "y = bf16[16,8] convert(p)\n t = bf16[4,32] tanh(x), control-predecessors={p}\n "
        "ROOT r = (bf16[16,8], bf16[4,32]) tuple(y, t)", WIDER),
    "gathered rows are contracted": (
        "x = bf16[4,32] parameter(0)\n w = bf16[16,8] parameter(1)\n g = bf16[16,32] all-gather(x), dimensions={0}, "
        "GROUPS\n ROOT y = bf16[32,8] dot(g, w), lhs_contracting_dims={0}, rhs_contracting_dims={0}", NO_PRODUCT),
    "K is gathered": (
        "x = bf16[16,8] parameter(0)\n w = bf16[32,8] parameter(1)\n g = bf16[16,32] all-gather(x), dimensions={1}, "
        "GROUPS\n ROOT y = bf16[16,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}", NO_PRODUCT),
    "something not linear stands between": (
        GATHERED + "t = bf16[16,32] tanh(g)\n ROOT y = bf16[16,8] dot(t, w), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}", NO_PRODUCT),
    "a batch of products": (
        "x = bf16[4,2,32] parameter(0)\n w = bf16[2,32,8] parameter(1)\n g = bf16[16,2,32] all-gather(x), "
        "dimensions={0}, GROUPS\n ROOT y = bf16[2,16,8] dot(g, w), lhs_batch_dims={1}, rhs_batch_dims={0}, "
        "lhs_contracting_dims={2}, rhs_contracting_dims={1}", NO_PRODUCT),
    "a precision of its own": (
        GATHERED + "ROOT y = bf16[16,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        "operand_precision={highest,highest}", NO_PRODUCT),
    "part of a dimension is contracted": (
        "x = bf16[4,32] parameter(0)\n w = bf16[4,8] parameter(1)\n g = bf16[16,32] all-gather(x), dimensions={0}, "
        "GROUPS\n s = bf16[16,8,4] reshape(g)\n ROOT y = bf16[16,8,8] dot(s, w), lhs_contracting_dims={2}, "
        "rhs_contracting_dims={0}", NO_PRODUCT),
    "the weight depends on what is gathered": (
        "x = bf16[4,16] parameter(0)\n g = bf16[16,16] all-gather(x), dimensions={0}, GROUPS\n "
        "t = bf16[16,16] tanh(g)\n ROOT y = bf16[16,16] dot(g, t), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        NO_PRODUCT),
    "a product with itself": (
        "x = bf16[4,16] parameter(0)\n g = bf16[16,16] all-gather(x), dimensions={0}, GROUPS\n "
        "ROOT y = bf16[16,16] dot(g, g), lhs_contracting_dims={1}, rhs_contracting_dims={0}", NO_PRODUCT),
    "rows stand after K": (
        "x = bf16[32,4] parameter(0)\n w = bf16[32,8] parameter(1)\n g = bf16[32,16] all-gather(x), dimensions={1}, "
        "GROUPS\n ROOT y = bf16[16,8] dot(g, w), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
        "its rows would need a transpose"),
    "a group of one": (
        GATHERED.replace("[16,32] all", "[4,32] all").replace("GROUPS", "channel_id=1, replica_groups={{0},{1}}, "
        "use_global_device_ids=true") + "ROOT y = bf16[4,8] dot(g, w), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={0}", "its groups have one device each"),
    "groups across": (
        GATHERED.replace("GROUPS", "channel_id=1, replica_groups={{0,1,2,4},{3,5,6,7}}, use_global_device_ids=true")
        + "ROOT y = bf16[16,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "its groups are not an axis of a row-major mesh"),
    "replicas": (
        GATHERED.replace("GROUPS", "replica_groups={{0,1,2,3}}") + "ROOT y = bf16[16,8] dot(g, w), "
        "lhs_contracting_dims={1}, rhs_contracting_dims={0}", "it runs over replicas, not partitions"),
    "a bias is added": (
        SUMMED.replace("y =", "p =") + "b = bf16[16,8] parameter(2)\n y = bf16[16,8] add(p, b)\n " + SCATTER,
        "a summed term is not a product"),
    "the product is used elsewhere": (
        SUMMED + SCATTER.replace("ROOT ", "") + "\n ROOT t = (bf16[4,8], bf16[16,8]) tuple(r, y)", READ),
    "columns are scattered with rows": (
        SUMMED.replace("y =", "p =") + "y = bf16[128] reshape(p)\n ROOT r = bf16[32] reduce-scatter(y), "
        "dimensions={0}, to_apply=add, GROUPS", "a reshape mixes rows and columns"),
    "another reduction": (SUMMED + SCATTER.replace("add", "maximum"), "its reduction is not a sum"),
    "summed in float32": (
        "x = bf16[16,32] parameter(0)\n w = bf16[32,8] parameter(1)\n p = bf16[16,8] dot(x, w), "
        "lhs_contracting_dims={1}, rhs_contracting_dims={0}\n y = f32[16,8] convert(p)\n "
        "ROOT r = f32[4,8] reduce-scatter(y), dimensions={0}, to_apply=add, GROUPS", "a summed term is not a product"),
    "sliced afterwards": (
        SUMMED + "r = bf16[16,8] all-reduce(y), to_apply=add, GROUPS\n k = s32[] parameter(2)\n "
        "z = s32[] constant(0)\n n = bf16[16,8] add(r, r)\n "
        "ROOT s = bf16[4,8] dynamic-slice(n, k, z), dynamic_slice_sizes={4,8}", SCATTERED),
    "nothing in it": (
        "x = bf16[0,32] parameter(0)\n w = bf16[32,8] parameter(1)\n g = bf16[0,32] all-gather(x), dimensions={0}, "
        "GROUPS\n ROOT y = bf16[0,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "its array is empty"),
    "ordered by the program": (
        "x = bf16[4,32] parameter(0)\n w = bf16[32,8] parameter(1)\n t = bf16[4,32] tanh(x)\n "
        "g = bf16[16,32] all-gather(x), dimensions={0}, GROUPS, control-predecessors={t}\n "
        "y = bf16[16,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n "
        "ROOT r = (bf16[16,8], bf16[4,32]) tuple(y, t)", "it has control dependencies"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    lines, reason = LEFT[name]
    kind = "f32" if "r = f32" in lines else "bf16"
    assert found(lines, kind) == [reason]


@pytest.mark.parametrize("kind", ["s8", "f64"])
def test_other_types_are_left_alone(kind: str) -> None:
    (reason,) = found(SITES["gather"][0].replace("bf16", kind), kind)
    assert reason == "its type is not a float of 16 or 32 bits"


def test_what_is_asynchronous_is_not_looked_at() -> None:
    lines = """x = bf16[4,32] parameter(0)
  w = bf16[32,8] parameter(1)
  s = (bf16[4,32], bf16[16,32]) all-gather-start(x), dimensions={0}, GROUPS
  g = bf16[16,32] all-gather-done(s)
  ROOT y = bf16[16,8] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"""
    assert found(lines) == []


def test_a_product_that_reads_another_ones_result_stays_outside() -> None:
    """The second product's w depends on the first product. One kernel for both would wait for its own result."""
    match = site("""x = bf16[4,16] parameter(0)
  w = bf16[16,16] parameter(1)
  g = bf16[16,16] all-gather(x), dimensions={0}, GROUPS
  y = bf16[16,16] dot(g, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT z = bf16[16,16] dot(g, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}""")
    assert [p.dot.name for p in match.products] == ["y"] and match.pattern.gathered


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        (((0, 1), (2, 3)), (2, 2, 1)),
        (((0, 2), (1, 3)), (1, 2, 2)),
        (((1, 3), (0, 2)), (1, 2, 2)),
        (((0, 2), (1, 3), (4, 6), (5, 7)), (2, 2, 2)),
        (((0, 1, 2, 3),), (1, 4, 1)),
        (((0, 3), (1, 2)), None),
        (((1, 0),), None),
        (((0, 1), (2,)), None),
        (((0, 2, 1, 3),), None),
    ],
)
def test_axis(groups: tuple[tuple[int, ...], ...], axis: tuple[int, int, int] | None) -> None:
    assert row_major_axis(groups) == axis
