"""Where the body of a micro-batch loop is cut, what crosses the cut, and when a cut is refused."""

from collections.abc import Iterable, Mapping

import pytest

from dhelix.errors import PassRefusal
from dhelix.passes.hlo import HloModule, Instruction, WhileLoop
from dhelix.passes.strands.forward_backward_cut import Partition, partition
from dhelix.tests.passes import golden

SCAN = "strand_duplication/scan_over_layers.hlo"
UNROLLED = "strand_duplication/unrolled.hlo"


def _partition(name: str, edits: Mapping[str, str] | None = None) -> Partition | None:
    module = HloModule.from_text(golden.read(name, edits))
    (loop,) = [i for i in module.entry.instructions if i.opcode == "while"]
    return partition(WhileLoop(loop))


def _parts(name: str, edits: Mapping[str, str] | None = None) -> Partition:
    parts = _partition(name, edits)
    assert parts is not None
    return parts


def _names(instructions: Iterable[Instruction]) -> set[str]:
    """Names without the numbers that XLA's parser adds to duplicates."""
    return {i.name.split(".")[0] for i in instructions}


def test_the_cut_lies_before_the_backward_layer_loop() -> None:
    parts = _parts(SCAN)
    assert parts.trip_count == 3
    assert _names(parts.backward) == {"backward_start", "backward", "grads", "new_sums"}
    assert {"forward", "value", "total", "dy", "next"} <= _names(parts.forward)
    assert _names(parts.shared) == {"one", "zero", "nothing", "zeros"}
    assert [i.name.split(".")[0] for i in parts.crossing] == ["dy", "residuals"]
    assert parts.written_by_backward == {2}, "sums; loss and counter are forward's"


def test_the_cut_in_unrolled_code_lies_where_one_cotangent_is_alive() -> None:
    parts = _parts(UNROLLED)
    assert _names(parts.backward) == {"dh", "dw1", "new_sums1"}
    assert {"dy", "dw2", "new_sums2"} <= _names(parts.forward)
    assert parts.written_by_backward == {1}


def test_what_is_cheaper_to_compute_again_does_not_cross() -> None:
    parts = _parts(UNROLLED)
    assert _names(parts.recomputed) == {"x_slot", "x"}
    assert _names(parts.crossing) == {"i", "dy"}, "the rows x of the batch follow from their number"


def test_a_product_is_not_computed_twice() -> None:
    parts = _parts(UNROLLED, {"dw1 = f32[2,2] dot(x, dh)": "dw1 = f32[2,2] dot(h, dh)"})
    assert _names(parts.crossing) == {"h", "dy"} and not parts.recomputed


def test_a_step_without_backward_pass_has_no_parts() -> None:
    text = golden.read(SCAN).replace("transpose(jvp())", "jvp()")
    module = HloModule.from_text(text)
    (loop,) = [i for i in module.entry.instructions if i.opcode == "while"]
    assert partition(WhileLoop(loop)) is None


def test_a_loop_that_is_itself_backward_has_no_parts() -> None:
    name = 'body=micro_batch, metadata={op_name="jit(step)/while"}'
    assert _partition(SCAN, {name: name.replace("step)", "step)/transpose(jvp())")}) is None


def test_what_follows_from_gradients_in_later_iterations_is_backward() -> None:
    """A running maximum of the sums reads what backward wrote in the micro-batch before."""
    state = "(s32[], f32[], f32[2,4], f32[3,4], f32[2,4])"
    text = golden.read(
        SCAN,
        {
            "tuple(next, total, new_sums, batches, w)": "tuple(next, total, new_sums, batches, w, larger)",
            "tuple(zero, nothing, zeros, batches, w)": "tuple(zero, nothing, zeros, batches, w, zeros)",
            "value = f32[] reduce(y": "largest = f32[2,4] get-tuple-element(state), index=5\n"
            "  larger = f32[2,4] maximum(largest, sums)\n  value = f32[] reduce(y",
        },
    ).replace(state, state[:-1] + ", f32[2,4])")
    module = HloModule.from_text(text)
    (loop,) = [i for i in module.entry.instructions if i.opcode == "while"]
    parts = partition(WhileLoop(loop))
    assert parts is not None
    assert "larger" in _names(parts.backward) and parts.written_by_backward == {2, 5}


LOAD_X = "x = f32[4] reshape(x_slot)\n  nothing"
COUNT = "microbatches = s32[] constant(3)"


def _scaled_by(value: str) -> dict[str, str]:
    """Edits that multiply the input of forward by `scale`; `value` makes `scale`, of shape f32[4]."""
    return {LOAD_X: f"raw = f32[4] reshape(x_slot)\n  {value}\n  x = f32[4] multiply(raw, scale)\n  nothing"}


REFUSED = {
    "one micro-batch": ({COUNT: "microbatches = s32[] constant(1)"}, "1 micro-batch"),
    "no micro-batch": ({COUNT: "microbatches = s32[] constant(0)"}, "0 micro-batch"),
    "their number is an argument": (
        {
            COUNT: "batches = f32[3,4] get-tuple-element(state), index=3\n"
            "  first = f32[1,1] slice(batches), slice={[0:1], [0:1]}\n  number = f32[] reshape(first)\n"
            "  microbatches = s32[] convert(number)"
        },
        "dynamic",
    ),
    "their number depends on gradients": (
        {
            COUNT: "sums = f32[2,4] get-tuple-element(state), index=2\n"
            "  first = f32[1,1] slice(sums), slice={[0:1], [0:1]}\n  number = f32[] reshape(first)\n"
            "  microbatches = s32[] convert(number)"
        },
        "condition reads element",
    ),
    "forward reads what backward writes": (
        _scaled_by(
            "sum_1 = f32[1,1] slice(sums), slice={[0:1], [0:1]}\n  sum_0 = f32[] reshape(sum_1)\n"
            "  scale = f32[4] broadcast(sum_0), dimensions={}"
        ),
        "parameters updated inside the loop",
    ),
    "random numbers with a state": (
        {
            LOAD_X: "state_of_generator = u64[2] rng-get-and-update-state(), delta=1\n"
            "  x = f32[4] reshape(x_slot)\n  nothing"
        },
        "rng-get-and-update-state",
    ),
    "a custom call with side effects": (
        {
            LOAD_X: 'x = f32[4] custom-call(x_slot), custom_call_target="writes_a_file", '
            "custom_call_has_side_effect=true\n  nothing"
        },
        "writes_a_file",
    ),
    "a callback that takes a token": (
        {
            LOAD_X: "before = token[] after-all()\n"
            '  x = f32[4] custom-call(x_slot, before), custom_call_target="xla_python_cpu_callback", '
            "custom_call_has_side_effect=true\n  nothing"
        },
        "ordered callbacks",
    ),
    "residuals on the host": (
        {
            LOAD_X: 'x = f32[4] custom-call(x_slot), custom_call_target="annotate_device_placement", '
            "custom_call_has_side_effect=true\n  nothing"
        },
        "offloaded to the host",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    edits, reason = REFUSED[case]
    with pytest.raises(PassRefusal, match=reason) as refusal:
        _partition(SCAN, edits)
    assert refusal.value.instruction and "\n" not in str(refusal.value)


def test_an_unordered_callback_may_move() -> None:
    edits = {
        LOAD_X: 'x = f32[4] custom-call(x_slot), custom_call_target="xla_ffi_python_cpu_callback", '
        "custom_call_has_side_effect=true\n  nothing"
    }
    parts = _parts(SCAN, edits)
    assert "x" in _names(parts.forward) and "x" not in _names(parts.recomputed)
