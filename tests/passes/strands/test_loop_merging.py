"""Several layer loops per direction: which of them merge, why others stay apart, and equal results.

Each step is real JAX with one update of its parameters. It goes through the passes that `strand_interleave` runs before
XLA. After five updates, its results must equal the plain step's bit by bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata

from dhelix.passes.framework.manager import PassManager, Stage
from dhelix.passes.framework.report import CHANGED, PassReport
from dhelix.passes.hlo import HloModule, Instruction, graph
from dhelix.passes.strands.strand_duplication import StrandDuplication
from dhelix.runtime.compiler.lowering import hlo_bytes, with_hlo
from dhelix.runtime.step.pass_lists import default_passes, strand_passes
from dhelix.tests.passes import golden

MICROBATCHES, ROWS, WIDTH, STEPS = 3, 2, 4, 5
UNROLL = "_xla_loop_unroll_strategy"
SCAN = "strand_duplication/scan_over_layers.hlo"
Weights = dict[str, jax.Array]
Loss = Callable[[Weights, jax.Array], jax.Array]
Step = Callable[[Weights, jax.Array], tuple[Weights, jax.Array]]


def layers(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def weights(**sizes: int) -> Weights:
    random = np.random.default_rng(0)
    return {
        name: jnp.asarray(random.standard_normal((count, WIDTH, WIDTH)) / 2, jnp.float32)
        for name, count in sizes.items()
    }


def step_of(loss: Loss, frozen: tuple[str, ...] = ()) -> Step:
    """A step that sums losses and gradients over micro-batches, and updates all parameters except `frozen`."""

    def step(w: Weights, batch: jax.Array) -> tuple[Weights, jax.Array]:
        trained = {name: value for name, value in w.items() if name not in frozen}

        def micro_batch(sums: tuple[jax.Array, Weights], x: jax.Array) -> tuple[tuple[jax.Array, Weights], None]:
            new = jax.value_and_grad(lambda t: loss({**w, **t}, x))(trained)
            return jax.tree.map(jnp.add, sums, new), None

        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, trained)
        (total, sums), _ = jax.lax.scan(micro_batch, zeros, batch)
        return {**w, **jax.tree.map(lambda p, g: p - 0.1 * g, trained, sums)}, total

    return step


def check(step: Step, w: Weights) -> PassReport:
    """The report of strand duplication. Checks that five steps of both programs give the same results."""
    batch = jnp.asarray(np.random.default_rng(1).standard_normal((MICROBATCHES, ROWS, WIDTH)), jnp.float32)
    lowered = jax.jit(step).lower(w, batch)
    after, report = PassManager(default_passes(), strict=True).run(Stage.LOWERED, hlo_bytes(lowered))
    duplication = report.passes[0]
    assert after is not None and (duplication.name, duplication.outcome) == ("strand-duplication", CHANGED)
    plain, strands = lowered.compile(), with_hlo(lowered, after).compile()
    one = other = w
    for _ in range(STEPS):
        (one, loss), (other, same) = plain(one, batch), strands(other, batch)
        np.testing.assert_array_equal(loss, same)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    return duplication


def merged(report: PassReport) -> list[tuple[int, int]]:
    """For each merged loop of the strand loop: how many loops it merges, and its trip count."""
    (facts,) = [note.facts for note in report.notes if note.message == "two strands"]
    return [(text.count(" + ") + 1, int(text.rpartition(" x ")[2])) for text in facts["merged_loops"]]


def apart(report: PassReport) -> list[str]:
    return [n.message.partition(": ")[2] for n in report.notes if n.message.startswith("layer loop not merged")]


def split(report: PassReport) -> list[str]:
    return [note.message for note in report.notes if note.message.startswith("layer loop split")]


def policy_and_reference(w: Weights, x: jax.Array) -> jax.Array:
    return jnp.sum((layers(x, w["policy"]) - jax.lax.stop_gradient(layers(x, w["reference"]))) ** 2)


def actor_and_critic(w: Weights, x: jax.Array) -> jax.Array:
    return jnp.sum(layers(x, w["actor"]) ** 2) + jnp.sum(layers(x, w["critic"]) ** 3)


def encoder_and_decoder(w: Weights, x: jax.Array) -> jax.Array:
    encoded = layers(x, w["encoder"])
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w + encoded), None), x, w["decoder"])[0])


def deep(w: Weights, x: jax.Array) -> jax.Array:
    return jnp.sum(layers(x, w["deep"]) ** 2)


def test_a_reference_runs_in_the_loop_of_the_policys_backward_pass() -> None:
    report = check(step_of(policy_and_reference, ("reference",)), weights(policy=4, reference=4))
    assert merged(report) == [(3, 4)] and apart(report) == []
    (ends,) = [note.facts["loops"] for note in report.notes if "runs alone" in note.message]
    assert len(ends) == 1 and ends[0].endswith(" x 4"), "both forward passes of the first micro-batch"


def test_actor_and_critic_of_one_depth_are_one_loop_of_four() -> None:
    report = check(step_of(actor_and_critic), weights(actor=4, critic=4))
    assert merged(report) == [(4, 4)] and apart(report) == []


@pytest.mark.parametrize("actor, critic", [(4, 2), (2, 4)])
def test_actor_and_critic_of_other_depth_are_two_pairs(actor: int, critic: int) -> None:
    report = check(step_of(actor_and_critic), weights(actor=actor, critic=critic))
    assert sorted(merged(report)) == [(2, 2), (2, 4)] and apart(report) == []


def test_encoder_and_decoder_pair_crosswise() -> None:
    report = check(step_of(encoder_and_decoder), weights(encoder=3, decoder=3))
    assert merged(report) == [(2, 3), (2, 3)] and apart(report) == []


def test_encoder_and_decoder_of_other_depth_would_wait_for_each_other() -> None:
    report = check(step_of(encoder_and_decoder), weights(encoder=2, decoder=3))
    assert merged(report) == [(2, 3)]
    reason = r"while\.\d+, the other strand's loop with the same trip count, must run {} it, because (.*) are one loop"
    for when, text in zip(("after", "before"), apart(report), strict=True):
        found = re.fullmatch(reason.format(when), text)
        assert found and found[1].count(" + ") == 1, text


def test_a_deeper_reference_is_split() -> None:
    report = check(step_of(policy_and_reference, ("reference",)), weights(policy=2, reference=5))
    assert merged(report) == [(3, 2)]
    assert [text.partition(" merged ")[0] for text in split(report)] == ["layer loop split: 2 of 5 iterations"]
    assert apart(report) == ["it has 3 iterations; the other strand's loops have 2"]


def test_a_deeper_policy_is_not_split_since_it_stacks_residuals() -> None:
    report = check(step_of(policy_and_reference, ("reference",)), weights(policy=4, reference=3))
    assert merged(report) == [(2, 4)] and split(report) == []
    assert apart(report) == ["it has 3 iterations; the other strand's loops have 4"]


def test_a_loop_that_runs_until_it_is_done_is_named_as_that() -> None:
    def loss(w: Weights, x: jax.Array) -> jax.Array:
        def more(state: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (state[0] < 9) & (jnp.sum(state[1]) < 50)

        def layer(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return state[0] + 1, jnp.tanh(state[1] @ w["frozen"][0])

        start = jnp.int32(0), jax.lax.stop_gradient(x)
        return jnp.sum(layers(x, w["deep"]) * jax.lax.while_loop(more, layer, start)[1])

    report = check(step_of(loss, ("frozen",)), weights(deep=2, frozen=1))
    assert merged(report) == [(2, 2)] and apart(report) == ["its trip count is not proved"]


def test_one_loop_that_reads_the_other_one_stays_apart() -> None:
    """The reference scores the policy's output, so only one of the two loops can merge."""

    def loss(w: Weights, x: jax.Array) -> jax.Array:
        ours = layers(x, w["policy"])
        return jnp.sum((ours - layers(jax.lax.stop_gradient(ours), w["reference"])) ** 2)

    report = check(step_of(loss, ("reference",)), weights(policy=4, reference=4))
    assert merged(report) == [(2, 4)] and len(apart(report)) == 1
    assert re.search(r"the same trip count, must run (before|after) it, because .* are one loop$", apart(report)[0])


@pytest.mark.parametrize("whole", [True, False])
def test_what_makes_gradients_merges_and_what_computes_again_does_not(whole: bool) -> None:
    """With `jax.checkpoint`, backward has two loops: one recomputes forward, the other one makes gradients."""

    def inner(w: Weights, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.checkpoint(layers)(x, w["deep"]) ** 2)

    step = step_of(jax.checkpoint(deep) if whole else inner)
    report = check(step, weights(deep=4))
    assert merged(report) == [(2, 4)] and len(apart(report)) == 1
    module = transformed(step, weights(deep=4))
    (loop,) = [i for i in loops(module) if i.name.startswith("strand_layers")]
    names = {i.op_name for i in graph.walk(loop.called[0]) if i.opcode == "dot"}
    backward = [name for name in names if "transpose(" in name]
    assert backward and not any("rematted" in name for name in backward)
    (facts,) = [note.facts for note in report.notes if note.message == "two strands"]
    assert facts["crossing_bytes"] < 4 * WIDTH * WIDTH * 4, "weights stay where they are"


def test_both_backward_loops_of_a_checkpoint_pair_where_there_are_two_forward_loops() -> None:
    loss = jax.checkpoint(policy_and_reference)
    report = check(step_of(loss, ("reference",)), weights(policy=4, reference=4))
    assert sum(count for count, _ in merged(report)) >= 4 and apart(report) == []


@pytest.mark.parametrize("again", [False, True])
def test_groups_of_layers_merge_with_the_layers_in_them(again: bool) -> None:
    """Groups are checkpointed, and with `again` the layers, too."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    body = jax.checkpoint(layer, prevent_cse=False) if again else layer

    def group(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.scan(body, x, w)[0], None

    def loss(w: Weights, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(jax.checkpoint(group, prevent_cse=False), x, w["deep"])[0] ** 2)

    w = {"deep": weights(deep=6)["deep"].reshape(2, 3, WIDTH, WIDTH)}
    report = check(step_of(loss), w)
    assert merged(report) == [(2, 2), (2, 3)] and len(apart(report)) == 1


def test_the_same_step_gives_the_same_bytes() -> None:
    batch = jnp.zeros((MICROBATCHES, ROWS, WIDTH))
    program = hlo_bytes(jax.jit(step_of(actor_and_critic)).lower(weights(actor=3, critic=3), batch))
    first, again = (PassManager(default_passes()).run(Stage.LOWERED, program)[0] for _ in range(2))
    assert first is not None and first == again


# Attributes of loops.


def transformed(step: Step, w: Weights, skew: int = 0) -> HloModule:
    batch = jnp.zeros((MICROBATCHES, ROWS, WIDTH))
    passes = strand_passes(skew)
    after, _ = PassManager(passes, strict=True).run(Stage.LOWERED, hlo_bytes(jax.jit(step).lower(w, batch)))
    assert after is not None
    return HloModule.from_bytes(after)


def loops(module: HloModule) -> list[Instruction]:
    return [i for i in graph.walk(module.entry) if i.opcode == "while"]


@pytest.mark.parametrize("skew", [0, 1, 2])
def test_all_loops_keep_their_attribute(skew: int) -> None:
    """The strand loop, merged loops and split loops keep it."""

    def step(w: Weights, batch: jax.Array) -> tuple[Weights, jax.Array]:
        with set_xla_metadata(**{UNROLL: "double-buffer"}):
            return step_of(deep)(w, batch)

    found = loops(transformed(step, weights(deep=4), skew))
    assert len(found) >= 4
    assert {loop.proto.frontend_attributes.map[UNROLL] for loop in found} == {"double-buffer"}


def test_the_note_says_which_of_two_attributes_is_kept() -> None:
    forward, backward = ('op_name="jit(step)/jvp()/while"}', 'op_name="jit(step)/transpose(jvp())/while"}')
    edits = {
        forward: forward + f', frontend_attributes={{{UNROLL}="full",_scheduling_group_id="4"}}',
        backward: backward + f', frontend_attributes={{{UNROLL}="double-buffer",other="1"}}',
    }
    before, after, report = golden.run(golden.read(SCAN, edits), StrandDuplication())
    (loop,) = [i for i in loops(after) if i.name.startswith("strand_layers")]
    kept = {UNROLL: "full", "_scheduling_group_id": "4", "other": "1"}
    assert dict(loop.proto.frontend_attributes.map) == kept
    (note,) = [note.message for note in report.notes if UNROLL in note.message]
    assert note == f'merged loop has {UNROLL}="full" of forward.1; backward.1 had "double-buffer"'
    golden.assert_same_results(before, after)
