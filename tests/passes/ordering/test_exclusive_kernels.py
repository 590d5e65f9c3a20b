"""No collective is in flight next to a kernel that waits for its peers: what moves, where to, and what cannot move."""

import pytest

from dhelix.errors import DhelixError
from dhelix.passes.analysis.collectives import is_done
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule, verify
from dhelix.passes.ordering.collective_schedule import CollectiveSchedule
from dhelix.passes.ordering.exclusive_kernels import ExclusiveKernels
from dhelix.profiles.hardware import H200_NO_P2P

KERNEL = (
    'custom_call_target="mosaic_gpu_v2", backend_config={uses_xla_collective_metadata = PEERS, xla_replica_ids = "0,1"}'
)
GEMM = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
HEAD = """HloModule m, is_scheduled=true
gather { part = bf16[2048,4096] parameter(0)
  ROOT whole = bf16[4096,4096] all-gather(part), dimensions={0}, replica_groups={{0,1}}, channel_id=1,
    use_global_device_ids=true }
"""
PARAMETERS = """x = bf16[2048,4096] parameter(0)
w = bf16[4096,4096] parameter(1)"""
START = "s = ((bf16[2048,4096]), bf16[4096,4096]) async-start(x), calls=gather"
DONE = "g = bf16[4096,4096] async-done(s)"


def module(*lines: str, root: str, peers: str = "true", before: str = "") -> HloModule:
    """A scheduled entry. In the lines, `KERNEL` stands for a kernel that waits for its peers, `GEMM` for a product."""
    body = "\n".join(line.replace("KERNEL", KERNEL.replace("PEERS", peers)).replace("GEMM", GEMM) for line in lines)
    return HloModule.from_text(f"{HEAD}{before}ENTRY e {{\n{PARAMETERS}\n{body}\nROOT r = {root}\n}}")


def product(name: str, of: str = "w") -> str:
    return f"{name} = bf16[4096,4096] dot({of}, w), GEMM"


def kernel(name: str, of: str = "w") -> str:
    return f"{name} = bf16[4096,4096] custom-call({of}), KERNEL"


def order(found: HloModule) -> list[str]:
    """Names of the entry's schedule without parameters and tuples."""
    return [i.name for i in found.schedule[found.entry] if i.opcode not in ("parameter", "tuple")]


def tied(found: HloModule) -> set[tuple[str, str]]:
    return {(p.name, i.name) for i in found.entry.instructions for p in i.control_predecessors}


def guarded(found: HloModule) -> list[str]:
    """Runs the pass, and returns the names of the instructions that it moved."""
    context = PassContext()
    assert ExclusiveKernels().run(found, context)
    verify(HloModule.from_bytes(found.to_bytes()))
    return [note.instruction for note in context.notes if note.instruction is not None]


FOUR = "(bf16[4096,4096], bf16[4096,4096], bf16[4096,4096], bf16[4096,4096]) tuple(a, k, b, g)"
FIVE = "(bf16[4096,4096], bf16[4096,4096], bf16[4096,4096], bf16[4096,4096], bf16[4096,4096]) tuple(a, k, b, c, g)"


def test_an_end_is_moved_up() -> None:
    """Two products run before the kernel and one after it, so the done moves up to the kernel."""
    found = module(START, product("a"), product("b"), kernel("k"), product("c"), DONE, root=FIVE)
    assert guarded(found) == ["s"]
    assert order(found) == ["s", "a", "b", "g", "k", "c"]
    assert tied(found) == {("g", "k")}


def test_a_start_is_moved_down() -> None:
    found = module(START, product("a"), kernel("k"), product("b"), product("c"), DONE, root=FIVE)
    assert guarded(found) == ["s"]
    assert order(found) == ["a", "k", "s", "b", "c", "g"]
    assert tied(found) == {("k", "s")}


def test_between_two_kernels() -> None:
    found = module(START, kernel("a"), product("b"), kernel("k"), DONE, root=FOUR)
    assert guarded(found) == ["s"]
    assert order(found) == ["a", "s", "b", "g", "k"]
    assert tied(found) == {("a", "s"), ("g", "k"), ("a", "k")}


def test_data_decides_where_there_is_no_choice() -> None:
    """Data dependencies fix the order a, k, b, c. So the gather starts after the kernel and overlaps with b and c."""
    found = module(START, product("a"), kernel("k", "a"), product("b", "k"), product("c", "b"), DONE, root=FIVE)
    assert guarded(found) == ["s"]
    assert order(found) == ["a", "k", "s", "b", "c", "g"]


def test_a_loop_that_holds_a_kernel_counts_as_one() -> None:
    loop = f"""body {{ t = (s32[], bf16[4096,4096]) parameter(0)
  n = s32[] get-tuple-element(t), index=0
  v = bf16[4096,4096] get-tuple-element(t), index=1
  one = s32[] constant(1)
  next = s32[] add(n, one)
  c = bf16[4096,4096] custom-call(v), {KERNEL.replace("PEERS", "true")}
  ROOT u = (s32[], bf16[4096,4096]) tuple(next, c) }}
condition {{ t = (s32[], bf16[4096,4096]) parameter(0)
  n = s32[] get-tuple-element(t), index=0
  two = s32[] constant(2)
  ROOT more = pred[] compare(n, two), direction=LT }}
"""
    found = module(
        "zero = s32[] constant(0)", "i = (s32[], bf16[4096,4096]) tuple(zero, w)", START, product("a"),
        "k = (s32[], bf16[4096,4096]) while(i), condition=condition, body=body", DONE,
        root="(bf16[4096,4096], bf16[4096,4096], (s32[], bf16[4096,4096])) tuple(a, g, k)", before=loop,
    )  # fmt: skip
    assert guarded(found) == ["s"]
    assert order(found)[-4:] == ["s", "a", "g", "k"]


def test_a_kernel_on_another_stream_is_waited_for_at_once() -> None:
    wrapped = f"""kernel {{ q = bf16[4096,4096] parameter(0)
  ROOT c = bf16[4096,4096] custom-call(q), {KERNEL.replace("PEERS", "true")} }}
"""
    found = module(
        "ks = ((bf16[4096,4096]), bf16[4096,4096]) async-start(w), calls=kernel", product("a"), product("b"),
        "k = bf16[4096,4096] async-done(ks)", START, DONE, root=FOUR, before=wrapped,
    )  # fmt: skip
    assert guarded(found) == ["ks"]
    assert order(found) == ["ks", "k", "a", "b", "s", "g"]


def test_nothing_is_moved_where_nothing_is_in_flight() -> None:
    found = module(START, product("a"), DONE, kernel("k"), product("b"), root=FOUR)
    before = order(found)
    assert guarded(found) == [] and order(found) == before
    assert tied(found) == {("g", "k")}, "orders that are made later keep to it"


@pytest.mark.parametrize("peers", ["false", "true"])
def test_a_kernel_that_waits_for_nobody_may_run_beside_it(peers: str) -> None:
    found = module(START, product("a"), kernel("k"), product("b"), DONE, root=FOUR, peers=peers)
    assert ExclusiveKernels().run(found, PassContext()) == (peers == "true")


def test_what_the_program_orders_otherwise_is_refused() -> None:
    lines = START, product("a"), kernel("k"), product("b"), DONE
    after_start = "control-predecessors={s}"
    tied_up = [line + f", {after_start}" if line.startswith("k =") else line for line in lines]
    tied_up[-1] += ", control-predecessors={b}"
    tied_up[3] = product("b", "k")
    found = module(*tied_up, root=FOUR)
    before = order(found)
    with pytest.raises(DhelixError, match="must be in flight"):
        ExclusiveKernels().run(found, PassContext())
    assert order(found) == before


def test_a_schedule_that_is_made_later_keeps_to_it() -> None:
    """Without the pass, the list schedule overlaps the gather with all products and with the kernel."""
    lines = START, DONE, product("a"), kernel("k", "a"), product("b", "k")
    free, bound = module(*lines, root=FOUR), module(*lines, root=FOUR)
    schedule = CollectiveSchedule(H200_NO_P2P, memory_limit=1 << 40, min_gain=0.0)
    schedule.run(free, PassContext())
    assert order(free).index("g") > order(free).index("k")
    ExclusiveKernels().run(bound, PassContext())
    schedule.run(bound, PassContext())
    names = order(bound)
    assert not names.index("s") < names.index("k") < names.index("g")
    assert any(is_done(i) for i in bound.entry.instructions)
