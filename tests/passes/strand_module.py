"""A small scheduled program of two strands, as XLA would schedule it: gathers, products, a sum without fixed place.

`text(turned=True)` is the same program in another schedule and with other names.
"""

_BIG, _PART = "bf16[4096,4096]{1,0}", "bf16[1024,4096]{1,0}"
_NAME = 'metadata={{op_name="jit(step)/strand_{}/while/body/{}"}}'


def _strand(strand: str, backward: bool) -> list[str]:
    inside = "transpose(jvp())/dot_general" if backward else "jvp()/dot_general"
    of_gather, of_product = (_NAME.format(strand, what) for what in ("all_gather", inside))
    start = f"(({_PART}), {_BIG}) async-start"
    product = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    lines = [
        f"{strand}_x = {_BIG} dot({strand}, w), {product}, {of_product}",
        f"{strand}_mine = {_PART} slice({strand}_x), slice={{[0:1024], [0:4096]}}",
        f"{strand}_gather = {start}({strand}_mine), calls={strand}_called, {of_gather}",
        f"{strand}_gathered = {_BIG} async-done({strand}_gather)",
        f"{strand}_y = {_BIG} dot({strand}_gathered, w), {product}, {of_product}",
    ]
    if backward:
        lines.append(f"{strand}_w = {_BIG} dot({strand}_x, {strand}), {product}, {of_product}")
    return lines


def text(turned: bool = False) -> str:
    strands = [_strand("beta", backward=False), _strand("alpha", backward=True)]
    lines = [line for strand in (reversed(strands) if turned else strands) for line in strand]
    how = "replica_groups={{0,1,2,3}}, dimensions={0}"
    called = "\n".join(
        f"{s}_called {{\n  {s}_p = {_PART} parameter(0)\n"
        f"  ROOT {s}_ag = {_BIG} all-gather({s}_p), channel_id={n}, {how}\n}}\n"
        for n, s in enumerate(("alpha", "beta"), 1)
    )
    body = "\n".join(f"  {line}" for line in lines)
    parameters = "\n".join(f"  {name} = {_BIG} parameter({n})" for n, name in enumerate(("w", "alpha", "beta")))
    result = f"  ROOT out = ({_BIG}, {_BIG}, {_BIG}) tuple(alpha_y, alpha_w, beta_y)"
    found = f"HloModule jit_step, is_scheduled=true\n\n{called}\nENTRY main {{\n{parameters}\n{body}\n{result}\n}}\n"
    return found.replace("alpha_", "a_").replace("beta_", "b_") if turned else found
