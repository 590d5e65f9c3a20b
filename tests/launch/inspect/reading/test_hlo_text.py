"""Modules in text: where they begin and end, which one is chosen, and the notes about the others."""

from __future__ import annotations

import pytest

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading.hlo_text import choose, find_modules


def module(name: str, body: str = "ROOT n = f32[8]{0} parameter(0)", header: str = ", is_scheduled=true") -> str:
    return f"HloModule {name}{header}\n\nENTRY %main (n: f32[8]{{0}}) -> f32[8]{{0}} {{\n  {body}\n}}\n"


ONE = module("one")


@pytest.mark.parametrize(
    "text",
    [
        ONE,
        f"I1125 10:00:00.123456    7426 dump.cc:456] what follows is a module\nwarning: HloModule of three\n{ONE}",
        "".join(f"I1125 10:00:00.123456    7426 hlo_pass.cc:33] {line}\n" for line in ONE.splitlines()),
        ONE.replace("HloModule", "   HloModule").replace("}\n", '}, execution_thread="main"\n'),
        f"{ONE}// the end }} of it\n\n/* and a\n   comment */\n",
        ONE.replace("\n", "\r\n"),
    ],
)
def test_a_module_and_what_may_stand_around_it(text: str) -> None:
    (found,) = find_modules(text)
    assert (found.name, found.is_scheduled, found.is_whole, found.after) == ("one", True, True, 0)
    assert found.text.lstrip().startswith("HloModule one") and "parameter(0)" in found.text
    assert choose([found]) == (found, [])


@pytest.mark.parametrize(
    "text",
    [
        "// copied\nfusion {\n  p = f32[8]{0} parameter(0)\n  ROOT n = f32[8]{0} negate(p)\n}\n// the end\n",
        "%inner (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n\n"
        "ENTRY main {\n  ROOT p = f32[8] parameter(0)\n}\n",
    ],
)
def test_computations_without_a_header_are_one_module(text: str) -> None:
    (found,) = find_modules(text)
    assert found.name == "fragment" and found.is_whole and text.count("parameter") == found.text.count("parameter")
    assert choose([found])[1][0].startswith("the text has no HloModule line")


def test_text_behind_the_entry_is_said_and_left_out() -> None:
    best, notes = choose(find_modules(f"{ONE}\nreal 0m3.2s\n"))
    assert notes == ["the text from line 7 on is not part of the module"]
    assert "real" not in best.text


@pytest.mark.parametrize("damage", [-2, -20, 30])
def test_a_module_that_does_not_end(damage: int) -> None:
    (found,) = find_modules(ONE[:damage])
    assert not found.is_whole
    assert found.last_line == ONE[:damage].rstrip().count("\n") + 1


def test_braces_in_strings_and_comments_do_not_count() -> None:
    body = 'ROOT n = f32[8]{0} parameter(0), metadata={op_name="}} \\" {"} /* } */ // }'
    (found,) = find_modules(module("strings", body))
    assert found.is_whole and found.after == 0 and found.text.endswith("\n}")


def test_of_several_modules_the_largest_scheduled_one() -> None:
    large = module("large", "p = f32[8] parameter(0)\n  ROOT n = f32[8] negate(p)")
    before = module("before", "q = f32[8] parameter(0)\n  r = f32[8] sine(q)\n  ROOT n = f32[8] negate(r)", "")
    cut = module("cut", "q = f32[8] parameter(0)\n  r = f32[8] sine(q)\n  ROOT n = f32[8] negate(r)")[:-3]
    best, notes = choose(find_modules(f"{ONE}\n{large}{before}{cut}"))
    assert best.name == "large" and best.line == 7
    assert notes == [
        "the file holds 4 modules, and this is large (line 7), the largest; left out: one (line 1), before (line 13),"
        " cut (line 20). Put each module into its own file to see it"
    ]


def test_a_module_inside_of_a_header_is_none_of_the_steps() -> None:
    inner = "\n".join(f"    {line}" for line in module("recovery").splitlines())
    header = f', origin_recovery_table={{\n  {{"a"}} : {{"b"}},\n  "\n{inner}\n  "\n}}\n'
    (found,) = find_modules(module("outer", header=header))
    assert found.name == "outer" and "recovery" not in found.text and found.is_whole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" \n", "is empty"),
        ("module @jit_step {\n  func.func public @main()\n}\n", "is MLIR"),
        ('%0 = "stablehlo.add"(%a, %b)', "is MLIR"),
        ("To whom it may concern: HloModule x", "no line starts with `HloModule`"),
    ],
)
def test_text_that_is_something_else(text: str, message: str) -> None:
    with pytest.raises(DhelixError, match=message):
        find_modules(text)
