"""Plans for a user's own step: real bytes of states, measured memory, factors that the mesh carries out."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import dhelix
from dhelix.benchmarks.sharding.compiled import collective_bytes
from dhelix.passes.hlo import HloModule
from dhelix.passes.sharding.factors import Factor, Factors, ShardingError
from dhelix.passes.sharding.overlap import NOTHING, Overlap
from dhelix.passes.sharding.planner import evaluate
from dhelix.passes.sharding.states.updates import find_states
from dhelix.runtime.compiler import lowering, memory_need, tuned
from dhelix.runtime.pipeline.fold import Fold
from dhelix.runtime.planning.live_plan import PlannedStates, overlap_of
from dhelix.runtime.planning.step_sizes import StepSizes
from dhelix.runtime.sharding.placed_states import state_shardings
from dhelix.runtime.step.strand_interleave import strand_interleave
from dhelix.tests.runtime.sharding.training import mesh

LAYERS, WIDTH, WORDS, ROWS = 4, 256, 512, 64
WHOLE = P()
PHI = LAYERS * WIDTH * WIDTH + 2 * WORDS * WIDTH


def loss(params: Any, words: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w.astype(x.dtype)), None

    x = jax.lax.scan(layer, params["table"].astype(jnp.bfloat16)[words], params["layers"])[0]
    return jnp.mean(jnp.square(x @ params["head"].astype(x.dtype)).astype(jnp.float32))


def step_of(optimizer: optax.GradientTransformation) -> Any:
    def step(state: Any, words: jax.Array) -> Any:
        params, opt_state = state
        value, gradients = dhelix.value_and_grad(loss)(params, words)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def arguments(optimizer: optax.GradientTransformation, on: Mesh, spec: P = WHOLE) -> tuple[Any, Any]:
    def place(leaf: Any, spec: P = WHOLE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(on, spec))

    shapes = {"table": (WORDS, WIDTH), "layers": (LAYERS, WIDTH, WIDTH), "head": (WIDTH, WORDS)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.tree.map(place, (params, jax.eval_shape(optimizer.init, params)))
    state[0]["table"] = place(params["table"], spec)
    return state, place(jax.ShapeDtypeStruct((ROWS, 8), jnp.int32), P("dp"))


def sizes(optimizer: optax.GradientTransformation, step: Any = None, **options: Any) -> StepSizes:
    args = arguments(optimizer, mesh(dp=4, tp=2), **options)
    return StepSizes.of(jax.jit(step or step_of(optimizer)).lower(*args), args, ("dp",), "mine")


def test_a_random_key_in_the_state_is_counted() -> None:
    optimizer = optax.adamw(1e-3)

    def step(state: Any, words: jax.Array) -> Any:
        inner, value = step_of(optimizer)(state[:2], words)
        return (*inner, state[2]), value

    state, words = arguments(optimizer, mesh(dp=4, tp=2))
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = ((*state, key), words)
    found = StepSizes.of(jax.jit(step).lower(*args), args, ("dp",), "mine")
    assert found.kept.optimizer == pytest.approx(8.0, rel=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "held"),
    [
        (optax.sgd(1e-3), 0.0),
        (optax.sgd(1e-3, momentum=0.9), 4.0),
        (optax.lion(1e-3, mu_dtype=jnp.bfloat16), 2.0),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 8.0),
        (optax.adamw(1e-3, mu_dtype=jnp.bfloat16), 6.0),
    ],
)
def test_bytes_of_states_are_those_of_the_optimizer(optimizer: optax.GradientTransformation, held: float) -> None:
    found = sizes(optimizer)
    assert (found.kept.parameter, found.kept.optimizer) == (4.0, held)
    assert found.kept.gradient == 2.0, "one micro-batch adds nothing up, and products are of bfloat16"
    assert found.kept.moved_parameter == 2.0 and found.kept.copied, "products are of bfloat16"
    assert found.sizes.parameters == PHI and found.sizes.layers == LAYERS
    assert found.sizes.layer_parameters == WIDTH * WIDTH and not found.split


def test_masters_of_another_type_are_optimizer_states() -> None:
    def step(params: jax.Array, master: jax.Array, x: jax.Array) -> Any:
        gradients = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(params)
        master = master - 0.1 * gradients.astype(jnp.float32)
        return master.astype(jnp.bfloat16), master

    wide, narrow = jnp.ones((8, 8)), jnp.ones((8, 8), jnp.bfloat16)
    found = find_states(HloModule.from_bytes(lowering.hlo_bytes(jax.jit(step).lower(narrow, wide, narrow))))
    assert (found.parameters, found.optimizer, found.gradient, found.computed) == ((0,), (1,), 2, 2)


def test_a_device_holds_its_part_of_other_axes() -> None:
    """Data-parallel axes are what is planned, so they do not count."""
    assert sizes(optax.adam(1e-3), spec=P("tp")).sizes.parameters == PHI - WORDS * WIDTH // 2
    found = sizes(optax.adam(1e-3), spec=P("dp"))
    assert found.split and found.sizes.parameters == PHI


def plan_of(microbatches: int) -> PlannedStates:
    optimizer = optax.adamw(1e-3)
    state, words = arguments(optimizer, dhelix.deviceless.mesh({"dp": 8}))
    step = strand_interleave(step_of(optimizer), microbatches=microbatches, donate_argnums=0)
    return dhelix.plan_sharding(step, state, words, memory=10**9, compare=False)


@pytest.fixture(scope="module")
def planned() -> PlannedStates:
    return plan_of(2)


@pytest.mark.deviceless
def test_memory_is_that_of_the_compiler() -> None:
    """Of the plain step exactly, and of a step with sharded states nearly."""
    planned = plan_of(1)
    optimizer = optax.adamw(1e-3)
    state, words = arguments(optimizer, dhelix.deviceless.mesh({"dp": 8}))
    of_name = {c.factors.strategy: c.memory.total for c in planned.planned.candidates}
    for name, near in (("dp", 0.001), ("zero1", 0.05)):
        placed = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state,
            state_shardings(state, name),
        )
        step = strand_interleave(step_of(optimizer), microbatches=1, donate_argnums=0, sharding=name, passes=())
        needed = memory_need.of_compiled(tuned.compile(step.lower(placed, words))).total
        assert of_name[name] == pytest.approx(needed, rel=near)


@pytest.mark.deviceless
@pytest.mark.parametrize(("dtype", "width"), [(jnp.bfloat16, 2.0), (jnp.float32, 4.0)])
def test_gradients_are_summed_in_the_type_that_the_compiler_chose(dtype: Any, width: float) -> None:
    def step(state: Any, words: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            x = params["table"].astype(dtype)[words]
            return jnp.mean(jnp.square(x @ params["head"].astype(dtype)).astype(jnp.float32))

        value, gradients = jax.value_and_grad(loss)(state[0])
        return (jax.tree.map(lambda p, g: p - 0.1 * g, state[0], gradients),), value

    on = dhelix.deviceless.mesh({"dp": 4, "tp": 1}, "h200")
    args = arguments(optax.sgd(1e-3), on)
    found = dhelix.plan_sharding(step, *((args[0][0],), args[1]), compare=False)
    assert found.at_hand.job.kept.moved_gradient == width


@pytest.mark.deviceless
def test_a_plan_is_taken_everywhere(planned: PlannedStates, tmp_path: Path) -> None:
    planned.save(tmp_path / "plan.json")
    plan = dhelix.sharding_plan(planned)
    assert plan == dhelix.sharding_plan(tmp_path / "plan.json") and plan.axes == ("dp",)
    assert strand_interleave(lambda x: x, sharding=planned).options.sharding is planned
    assert planned.at_hand.job.kept.gradient == 4.0, "micro-batches add up in float32"
    assert planned.at_hand.mesh == Factor(8) and planned.at_hand.job.batch.microbatches == 2
    assert all(part in (Factor(1), Factor(8)) for f in planned.at_hand.choices for _, part in f.states())
    for words in ("over dp", "by memory_analysis(), compiled for H200 without a GPU", "% of it guessed"):
        assert words in str(planned)


@pytest.mark.deviceless
def test_a_step_with_a_shard_map_is_planned() -> None:
    optimizer, on = optax.adamw(1e-3), dhelix.deviceless.mesh({"dp": 8})

    def step(state: Any, words: jax.Array) -> Any:
        def local(params: Any, words: jax.Array) -> Any:
            return jax.tree.map(lambda g: jax.lax.pmean(g, "dp"), jax.grad(loss)(params, words))

        body = jax.shard_map(local, mesh=on, in_specs=(P(), P("dp")), out_specs=P(), check_vma=False)
        gradients = body(state[0], words)
        updates, opt_state = optimizer.update(gradients, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    found = dhelix.plan_sharding(step, *arguments(optimizer, on), compare=False)
    assert {factors.strategy for factors in found.at_hand.choices} == {"dp", "zero1", "zero2", "fsdp"}


def adapted(optimizer: optax.GradientTransformation) -> Any:
    """A step that trains the head, and keeps everything else as it is."""

    def step(state: Any, words: jax.Array) -> Any:
        base, params, opt_state = state
        value, gradients = dhelix.value_and_grad(lambda p, words: loss(base | p, words))(params, words)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (base, optax.apply_updates(params, updates), opt_state), value

    return step


def adapted_arguments(optimizer: optax.GradientTransformation, on: Mesh) -> tuple[Any, Any]:
    (params, _), words = arguments(optimizer, on)
    whole = NamedSharding(on, WHOLE)
    head = {"head": params.pop("head")}
    states = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), jax.eval_shape(optimizer.init, head)
    )
    return (params, head, states), words


def test_groups_have_their_own_bytes_and_frozen_ones_no_gradients() -> None:
    optimizer = optax.adamw(1e-3)
    args = adapted_arguments(optimizer, mesh(dp=4, tp=2))
    lowered = jax.jit(adapted(optimizer)).lower(*args)
    found = StepSizes.of(lowered, args, ("dp",), "mine", ["table", "head"])
    bytes_of = {sizes.name: (kept.parameter, kept.gradient, kept.optimizer) for sizes, kept in found.parts}
    head, others = (4.0, 2.0, pytest.approx(8.0, rel=1e-3)), (4.0, 0.0, 0.0)
    assert bytes_of == {"table": others, "head": head, "the others": others}
    assert [sizes.parameters for sizes, _ in found.parts] == [WORDS * WIDTH, WORDS * WIDTH, LAYERS * WIDTH * WIDTH]
    assert found.trained == WORDS * WIDTH / PHI and found.kept.optimizer == pytest.approx(8.0 * found.trained, rel=1e-3)


@pytest.mark.deviceless
def test_groups_of_a_step_choose_their_factors() -> None:
    optimizer, on = optax.adamw(1e-3), dhelix.deviceless.mesh({"dp": 8})
    state, words = adapted_arguments(optimizer, on)
    step = adapted(optimizer)
    planned = dhelix.plan_sharding(step, state, words, groups=("layers", "table"), profile=None)
    assert planned.groups and list(planned.groups.of_group) == ["layers", "table", "the others"]
    frozen, table, trained = (found.factors.strategy for found in planned.groups.of_group.values())
    assert frozen == table == "dp" and trained == "zero1", "frozen parameters are whole, where memory allows it"
    assert "for all, a step takes" in str(planned) and "  layers: dp" in str(planned)
    made = dhelix.sharding_plan(planned)
    assert [name for name, _ in made.groups] == ["layers", "table"]
    base, params, _ = state_shardings(state, made, on)
    assert not any(base["layers"].spec) and "dp" in params["head"].spec[0]
    with pytest.raises(ShardingError, match="group 'lora' matches no path of a parameter: "):
        dhelix.plan_sharding(step, state, words, groups="lora")
    with pytest.raises(ShardingError, match=r"give their keys alone, such as groups=\('table',\)"):
        dhelix.plan_sharding(step, state, words, groups={"table": "zero1"})  # type: ignore[arg-type]


@pytest.mark.deviceless
def test_a_pipeline_hides_no_collective_of_its_states() -> None:
    """Its ticks wait for them (docs/design/sharding.md)."""

    def train_step(state: Any, x: Any) -> Any:
        return state, x

    piped = strand_interleave(train_step, pipeline=Fold(2, 4), microbatches=4)
    assert overlap_of(piped) is NOTHING and overlap_of(strand_interleave(train_step)) == Overlap() == overlap_of(
        train_step
    )


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.embed(words)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.head(x)


def changes_objects(model: Net, optimizer: nnx.Optimizer, words: jax.Array) -> jax.Array:
    value, gradients = nnx.value_and_grad(lambda model: jnp.mean(jnp.square(model(words))))(model)
    optimizer.update(model, gradients)
    return value


@pytest.mark.deviceless
@pytest.mark.parametrize("form", [lambda step: step, nnx.jit, strand_interleave])
def test_a_step_of_nnx_objects_is_planned(form: Any) -> None:
    """The objects are changed in place, so the step returns no state by itself."""
    on = dhelix.deviceless.mesh({"dp": 8})

    def made() -> Any:
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    def place(leaf: Any, spec: P = WHOLE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(on, spec))

    definition, state = nnx.split(nnx.eval_shape(made))
    objects = nnx.merge(definition, jax.tree.map(place, state))
    words = place(jax.ShapeDtypeStruct((ROWS, 8), jnp.int32), P("dp"))
    found = dhelix.plan_sharding(form(changes_objects), *objects, words, compare=False)
    biases = LAYERS * WIDTH + WORDS
    assert found.at_hand.job.sizes.parameters == PHI + biases
    assert found.at_hand.job.kept.optimizer == pytest.approx(8.0, rel=0.01)


def test_what_does_not_fit_is_one_error() -> None:
    optimizer = optax.adamw(1e-3)
    state, words = arguments(optimizer, dhelix.deviceless.mesh({"dp": 8}))
    with pytest.raises(ShardingError, match=r"nothing fits into .* MB: .*use .*micro-batch"):
        dhelix.plan_sharding(step_of(optimizer), state, words, memory="1MiB")


def test_steps_that_cannot_be_planned() -> None:
    optimizer, on = optax.adamw(1e-3), mesh(dp=8)
    state, words = arguments(optimizer, on)
    step, moments = step_of(optimizer), arguments(optax.adam(1e-3), on)[0][1]

    def update(state: Any, gradients: Any) -> Any:
        return optax.adam(1e-3).update(gradients, state)[1]

    for args, made, said in (
        ((state, words), step, "the step's arguments are not on GPUs; without a GPU, give jax.ShapeDtypeStructs"),
        ((moments, state[0]), update, "optimizer states and no parameters"),
        ((state[0], words), loss, "the step returns no new state"),
        (({"w": jnp.ones(8)},), step, "the step's arguments are on no mesh"),
    ):
        with pytest.raises(ShardingError, match=re.escape(said)):
            dhelix.plan_sharding(made, *args)
    with pytest.raises(ShardingError, match="the mesh has no axis 'data'"):
        dhelix.plan_sharding(step, state, words, axes="data")


def test_a_table_that_is_only_looked_up_may_exchange_rows() -> None:
    """`arguments` has 64 sequences of 8 words on 4 data-parallel devices."""
    found = sizes(optax.adamw(1e-3))
    assert found.rows == ROWS * 8 // 4
    assert [(module.parameters, module.rows) for module in found.sizes.outside] == [
        (WORDS * WIDTH, WORDS),
        (WORDS * WIDTH, 0),
    ]
    assert not any(module.rows for module in sizes(optax.adamw(1e-3), spec=P("tp")).sizes.outside), "split otherwise"


@pytest.mark.deviceless
@pytest.mark.parametrize("microbatches", [1, 2])
def test_bytes_of_a_split_table_are_those_of_the_compiler(microbatches: int) -> None:
    """Two devices read 256 or 128 of 512 rows in a micro-batch, so XLA exchanges rows."""
    optimizer, on = optax.adamw(1e-3), dhelix.deviceless.mesh({"dp": 2})
    state, words = arguments(optimizer, on)
    words = jax.ShapeDtypeStruct((32, 8), jnp.int32, sharding=words.sharding)
    step = strand_interleave(step_of(optimizer), microbatches=microbatches, donate_argnums=0)
    here = dhelix.plan_sharding(step, state, words, groups="table", profile=None).at_hand
    assert here.job.batch.tokens == 32 * 8 // 2 // microbatches
    expected = Counter[str]()
    for group, strategy in zip(here.groups, ("zero3", "zero1"), strict=True):
        expected.update(evaluate(group.job, Factors.named(strategy, here.mesh), here.times).times.moved)
    plan = dhelix.sharding_plan("zero1", groups={"table": "zero3"})
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        state_shardings(state, plan),
    )
    schedule = "dp" if microbatches > 1 else "intra_batch"
    step = strand_interleave(
        step_of(optimizer), microbatches=microbatches, donate_argnums=0, sharding=plan, schedule=schedule
    )
    compiled = tuned.compile(step.lower(placed, words))
    found = collective_bytes(HloModule.from_text(compiled.as_text() or ""))
    indices = 4 * 32 * 8  # bytes, which devices gather in forward, and perhaps again in backward
    assert 0 <= found["all-gather"] - expected["all-gather"] <= 2 * indices
    assert found["reduce-scatter"] + found.get("all-reduce", 0) == expected["reduce-scatter"]
