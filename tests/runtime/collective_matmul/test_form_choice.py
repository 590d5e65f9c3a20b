"""Choices of "auto", refusals of explicit forms, and messages to users."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec

from dhelix.errors import DhelixError
from dhelix.profiles.collective_matmul import times as collective_matmul_times
from dhelix.profiles.collective_matmul.sites import MONOLITHIC, Form, Site, SiteTimes, Tiles, Times
from dhelix.profiles.profile import Timing
from dhelix.runtime.collective_matmul import all_gather_matmul, form_choice, matmul_all_reduce, matmul_reduce_scatter
from dhelix.runtime.compiler import deviceless
from dhelix.tests.runtime.collective_matmul.programs import COLLECTIVE, mesh, normal, specs


def traced(kind: str, form: Any, rows: int, axis: Any = "tp", k: int = 8, columns: int = 8, **axes: int) -> str:
    """StableHLO of an operation on operands of these global sizes."""
    on = mesh(**(axes or {"tp": 4}))
    spec_x, spec_w, spec_y = specs(kind, (), axis)
    mapped = jax.shard_map(
        lambda x, w: COLLECTIVE[kind](x, w, axis, form), mesh=on, in_specs=(spec_x, spec_w), out_specs=spec_y
    )
    return jax.jit(mapped).lower(normal(0, rows, k), normal(1, k, columns)).as_text()


@pytest.mark.parametrize(
    ("kind", "form", "rows", "message"),
    [
        ("all_gather_matmul", "spiral", 16, "form .* is .*spiral.*: must be one of monolithic"),
        ("all_gather_matmul", None, 16, 'form=None is unknown: use "auto"'),
        ("all_gather_matmul", "hybrid:3", 16, "chunks of at least 2 that divides 4 rows: choose another"),
        ("all_gather_matmul", "hybrid", 20, "chunks of at least 2 that divides 5 rows"),
        ("matmul_reduce_scatter", Form("hybrid", chunks=8), 16, "chunks of at least 2 that divides 4 rows"),
        ("matmul_all_reduce", "hybrid:4", 18, "chunks of at least 2 that divides 18 rows"),
        ("matmul_all_reduce", "ring", 18, "18 rows do not divide by 4 devices: pad them"),
        ("all_gather_matmul", "bidirectional_ring", 4, "at least 2 rows per device, not 1"),
        ("matmul_all_reduce", "bidirectional_ring", 4, "at least 2 rows per device, not 1"),
        (
            "all_gather_matmul",
            "mosaic",
            16,
            r"no kernel here \(it needs NVIDIA Hopper GPUs, but this is cpu\): use another form",
        ),
        ("matmul_reduce_scatter", "auto", 18, "18 rows do not divide by the 4 devices of 'tp': pad the rows"),
    ],
)
def test_explicit_forms_that_cannot_be_had_say_what_to_do(kind: str, form: Any, rows: int, message: str) -> None:
    with pytest.raises(DhelixError, match=message) as error:
        traced(kind, form, rows)
    assert "\n" not in str(error.value)


def test_weights_in_a_dict_are_refused() -> None:
    with pytest.raises(DhelixError, match="dict is not an array: give x, and one w or a tuple of them"):
        jax.jit(
            jax.shard_map(
                lambda x: all_gather_matmul(x, {"gate": x}, "tp"),  # type: ignore
                mesh=mesh(tp=2),
                in_specs=specs("x")[1],
                out_specs=specs("x")[1],
            )
        ).lower(normal(0, 4, 2))


@pytest.mark.parametrize("kind", list(COLLECTIVE))
def test_one_axis_may_be_written_as_a_tuple_or_a_list(kind: str) -> None:
    by_name = traced(kind, "ring", 16)
    assert traced(kind, "ring", 16, axis=("tp",)) == by_name
    on, (spec_x, spec_w, spec_y) = mesh(tp=4), specs(kind)
    mapped = jax.shard_map(
        lambda x, w: COLLECTIVE[kind](x, w, ["tp"], "ring"), mesh=on, in_specs=(spec_x, spec_w), out_specs=spec_y
    )
    assert jax.jit(mapped).lower(normal(0, 16, 8), normal(1, 8, 8)).as_text() == by_name


def test_only_the_monolithic_form_takes_several_axes() -> None:
    with pytest.raises(DhelixError, match="works on one mesh axis, not on .*'dp', 'tp'"):
        traced("all_gather_matmul", "ring", 16, axis=("dp", "tp"), dp=2, tp=2)


@pytest.mark.parametrize("form", ["auto", "ring"])
def test_an_axis_must_be_one_of_a_surrounding_shard_map(form: str) -> None:
    with pytest.raises(
        DhelixError, match=r"'model' is not a mesh axis of a surrounding shard_map \(its axes: \('tp',\)\)"
    ):
        jax.jit(
            jax.shard_map(
                lambda x: all_gather_matmul(x, x, "model", form),
                mesh=mesh(tp=2),
                in_specs=specs("x")[1],
                out_specs=specs("x")[1],
            )
        ).lower(jnp.ones((4, 4)))
    with pytest.raises(DhelixError, match="call it inside a shard_map"):
        matmul_all_reduce(jnp.ones((4, 4)), jnp.ones((4, 4)), "tp", form)


@pytest.mark.parametrize(
    ("operation", "operands", "message"),
    [
        (all_gather_matmul, (jnp.ones((4, 4)), jnp.ones((3, 4))), r"x \[4, 4\] and w \[3, 4\] do not multiply"),
        (matmul_all_reduce, (jnp.ones(4), jnp.ones((4, 4))), r"give \[..., rows, k\] and \[k, columns\]"),
        (
            matmul_reduce_scatter,
            (jnp.ones((4, 4)), jnp.ones((4, 4), "bfloat16")),
            "x is float32, but w is bfloat16: cast",
        ),
        (all_gather_matmul, (jnp.ones((4, 4)), ()), "no weights: give at least one"),
    ],
)
def test_operands_that_do_not_fit(operation: Callable[..., Any], operands: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DhelixError, match=message):
        jax.make_jaxpr(lambda: operation(*operands, "tp"), axis_env=[("tp", 2)])()


def test_other_types_are_monolithic_and_an_error_for_who_asks_for_a_form(lines: list[str]) -> None:
    for number, kind in enumerate((jnp.int8, jnp.float8_e4m3fn, jnp.complex64)):
        x = jnp.ones((4, 4), kind)

        def step(form: str, x: jax.Array = x) -> jax.Array:
            columns, rows = PartitionSpec(None, "tp"), PartitionSpec("tp", None)
            multiply = partial(matmul_all_reduce, axis_name="tp", form=form)
            over = jax.shard_map(multiply, mesh=mesh(tp=2), in_specs=(columns, rows), out_specs=PartitionSpec())
            return jax.jit(over)(x, x)

        result = step("auto")
        assert result.dtype == kind and (result.astype(complex) == 4.0).all()
        assert f"monolithic, because no other form multiplies {x.dtype.name}" in lines[number]
        assert len(lines) == number + 1
        with pytest.raises(DhelixError, match=f'form "ring" multiplies bfloat16, .*, not {x.dtype.name}: cast both'):
            step("ring")


def test_auto_on_cpu_is_monolithic_whatever_the_shape() -> None:
    for kind, collective in (("all_gather_matmul", "all_gather"), ("matmul_all_reduce", "all_reduce")):
        for rows in (4, 12):
            text = traced(kind, "auto", rows)
            assert text.count(f"stablehlo.{collective}") == 1 and "collective_permute" not in text


def on_gpus(kind: str, rows: int) -> str:
    """StableHLO of "auto" for four H200s, which need not exist: bfloat16, K = N = 64 per device."""
    on = deviceless.mesh({"tp": 4})
    k, columns = (64, 256) if kind == "all_gather_matmul" else (256, 64)
    spec_x, spec_w, spec_y = specs(kind)
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(on, spec))
        for shape, spec in (((rows, k), spec_x), ((k, columns), spec_w))
    )
    mapped = jax.shard_map(
        lambda x, w: COLLECTIVE[kind](x, w, "tp"), mesh=on, in_specs=(spec_x, spec_w), out_specs=spec_y
    )
    return jax.jit(mapped).lower(x, w).as_text()


def measured(kind: str, rows: int, **microseconds: float) -> Times:
    site = Site(kind, rows, 64, 64, "bfloat16", 4)
    forms = {Form.parse(key.replace("_of_", ":")): Timing(t / 1e6, 0.0, 8) for key, t in microseconds.items()}
    return Times("H200", "nvlink", sites={site: SiteTimes(Timing(5e-6), Timing(5e-6), forms)})


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the logged warnings."""
    found: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: found.append(text % args))
    form_choice._log_once.cache_clear()
    return found


@pytest.mark.deviceless
def test_auto_takes_what_was_measured_to_be_fastest_on_the_gpus_of_the_mesh(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    asked = []

    def find(hardware: str, link: str) -> Times:
        asked.append((hardware, link))
        return measured("all_gather_matmul", 64, monolithic=20.0, ring=10.0, hybrid_of_2=15.0)

    monkeypatch.setattr(collective_matmul_times, "find", find)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert on_gpus("all_gather_matmul", 64).count("stablehlo.collective_permute") == 3
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    on_gpus("all_gather_matmul", 64)
    assert asked == [("H200", "nvlink"), ("H200", "no-p2p")] and not lines


@pytest.mark.deviceless
def test_auto_falls_back_to_the_next_fastest_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    times = measured("matmul_all_reduce", 66, monolithic=20.0, ring=10.0, hybrid_of_3=15.0)
    monkeypatch.setattr(collective_matmul_times, "find", lambda *_: times)
    for _ in range(2):
        assert on_gpus("matmul_all_reduce", 66).count("stablehlo.all_reduce") == 3
    assert len(lines) == 1
    assert lines[0].startswith("dhelix: matmul_all_reduce bfloat16 66x64x64 over 4: hybrid:3 instead of ring, which ")


@pytest.mark.deviceless
def test_kernels_that_cannot_run_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    place = form_choice.Place(Site("all_gather_matmul", 64, 64, 64, "float32", 4), "tp", 16)
    form = Form("mosaic", tiles=Tiles(64, 64, 64, 2, "M", 1))
    with jax.sharding.use_abstract_mesh(deviceless.mesh({"tp": 4}).abstract_mesh):
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        assert "a CUDA graph would keep its peers' old addresses" in str(form_choice.refusal(form, place))
        assert "has no kernel here (" in str(form_choice.refusal(form, place, graphs=False))
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert "needs all GPUs of the axis in one process" in str(form_choice.refusal(form, place))
        monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
        assert "NCCL_P2P_DISABLE is set" in str(form_choice.refusal(form, place))


@pytest.mark.deviceless
def test_a_gpu_must_have_room_for_all_blocks_of_a_kernel_at_a_time() -> None:
    place = form_choice.Place(Site("matmul_reduce_scatter", 4096, 4096, 4096, "bfloat16", 4), "tp", 4096)
    mesh = deviceless.mesh({"tp": 4}).abstract_mesh
    smaller = dataclasses.replace(mesh.abstract_device, device_kind="NVIDIA H100 PCIe", num_cores=114)
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=smaller)):
        reason = form_choice.refusal(Form("mosaic"), place, graphs=False)
        assert "needs 132 multiprocessors, but this NVIDIA H100 PCIe has 114: give tiles with sms=114" in str(reason)
        fitting = Form("mosaic", tiles=Tiles(128, 256, 64, 4, "M", 8, sms=114))
        assert form_choice.refusal(fitting, place, graphs=False) is None


def test_derivatives_of_an_explicit_form_fall_back_where_it_cannot_be_had(lines: list[str]) -> None:
    place = form_choice.Place(Site("matmul_reduce_scatter", 24, 8, 8, "float32", 4), "tp", 6)
    assert form_choice.resolve(Form("hybrid", chunks=3), place) == Form("hybrid", chunks=3) and not lines
    assert form_choice.resolve(Form("hybrid", chunks=4), place) == MONOLITHIC
    assert (
        "monolithic instead of hybrid:4, which needs a number of chunks of at least 2 that divides 6 rows" in lines[0]
    )
