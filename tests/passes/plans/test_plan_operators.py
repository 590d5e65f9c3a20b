"""Operators of a plan: the same in every schedule of a program, with readable names."""

from dhelix.passes.evaluation.operator_keys import OperatorKeys
from dhelix.passes.hlo import HloModule
from dhelix.passes.plans.plan_operators import PlanOperators
from dhelix.tests.passes import golden, strand_module


def operators(text: str) -> PlanOperators:
    return PlanOperators(HloModule.from_text(text).entry, OperatorKeys())


HERE, TURNED = operators(strand_module.text()), operators(strand_module.text(turned=True))


def names(found: PlanOperators) -> dict[str, str]:
    return {i.name: name for i, name in found.names(list(found.identities)).items()}


def test_names_say_strand_and_what_it_does() -> None:
    assert names(HERE) == {
        "beta_x": "beta gemm 1",
        "beta_mine": "beta other",
        "beta_gather": "beta all-gather",
        "beta_y": "beta gemm 2",
        "alpha_x": "alpha dgrad",
        "beta_gathered": "beta end of all-gather",
        "alpha_gathered": "alpha end of all-gather",
        "alpha_mine": "alpha other",
        "alpha_gather": "alpha all-gather",
        "alpha_w": "alpha wgrad 1",
        "alpha_y": "alpha wgrad 2",  # a wgrad, because nothing here reads it; in a layer, the next operator does
    }


def test_operators_are_the_same_in_another_schedule_with_other_names() -> None:
    def renamed(name: str) -> str:
        return name.replace("alpha_", "a_").replace("beta_", "b_")

    assert {renamed(i.name): n for i, n in HERE.identities.items()} == {i.name: n for i, n in TURNED.identities.items()}
    assert {renamed(i): n for i, n in names(HERE).items()} == names(TURNED)


def test_occurrences_count_from_one() -> None:
    counts: dict[str, list[int]] = {}
    for key, occurrence in HERE.instructions:
        counts.setdefault(key, []).append(occurrence)
    assert all(sorted(found) == list(range(1, len(found) + 1)) for found in counts.values())
    assert sorted(map(len, counts.values())) == [2, 2, 2, 5]


def test_the_fingerprint_is_of_collectives_and_products_alone() -> None:
    assert HERE.fingerprint == TURNED.fingerprint
    without_product = (
        strand_module.text().replace("a_w = ", "a_w = ").replace(" tuple(alpha_y, alpha_w,", " tuple(alpha_y, w,")
    )
    lines = [line for line in without_product.splitlines() if not line.startswith("  alpha_w = ")]
    assert operators("\n".join(lines)).fingerprint != HERE.fingerprint
    with_copy = strand_module.text().replace("  ROOT out", "  more = bf16[4096,4096]{1,0} copy(w)\n  ROOT out")
    assert operators(with_copy).fingerprint == HERE.fingerprint


def test_a_description_in_words() -> None:
    assert HERE.describe() == "both strands: 2 collectives, 5 products"


def test_who_computes_a_product_does_not_count() -> None:
    calls = PlanOperators(HloModule.from_text(golden.read("operator_keys/calls.hlo")).entry, OperatorKeys())
    text = {i.name: key for i, (key, _) in calls.identities.items()}
    products = ("nn", "triton", "triton_scaled", "cudnn_product", "adding", "activated", "precise")
    assert {text[name] for name in products} == {"gemm bf16,bf16:nn 64x256x512"}
    assert text["wgrad"] == "gemm bf16,bf16:tn 512x256x64"
    assert text["grouped"] != text["grouped_wgrad"]
    assert text["attention"].endswith(":cudnn 2x8x2x1024x2048x64")


LOOP = """HloModule m, is_scheduled=true
condition { c = (s32[]) parameter(0) g = s32[] get-tuple-element(c), index=0 n = s32[] constant(COUNT)
  ROOT r = pred[] compare(g, n), direction=LT }
body { b = (s32[]) parameter(0) i = s32[] get-tuple-element(b), index=0 ROOT t = (s32[]) tuple(INNER) }
ENTRY e { z = s32[] constant(0) s = (s32[]) tuple(z) ROOT w = (s32[]) while(s), condition=condition, body=body }
"""


def test_a_loop_is_called_by_what_is_inside_and_not_by_how_often_it_runs() -> None:
    def loop(count: int, inner: str) -> list[str]:
        text = LOOP.replace("COUNT", str(count)).replace("INNER)", inner)
        return [key for key, _ in operators(text).instructions]

    assert loop(4, "i)") == []  # nothing takes time
    text = LOOP.replace("ROOT t = (s32[]) tuple(INNER)", "j = s32[] copy(i) ROOT t = (s32[]) tuple(j)")
    few, many = (operators(text.replace("COUNT", n)) for n in ("4", "40"))
    assert list(few.instructions) == list(many.instructions)
    assert [key.partition(":")[0] for key, _ in few.instructions] == ["while"]
    assert list(names(few).values()) == ["loop"]
