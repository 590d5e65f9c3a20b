"""XLA's formats for measured times. dhelix reads back what it writes, and XLA reads it, too."""

import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.errors import DhelixError
from dhelix.profiles.files import xla_tables
from dhelix.profiles.keys import CollectiveKey
from dhelix.runtime.compiler import deviceless

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")

# --- Cost text.


@given(st.dictionaries(st.text(max_size=20), st.floats(0, 1e3)))
def test_costs_come_back(seconds: dict[str, float]) -> None:
    text = xla_tables.cost_text(seconds)
    assert xla_tables.parse_cost_text(text, "c.pbtxt") == pytest.approx(seconds, rel=1e-5)
    assert xla_tables.cost_text(dict(reversed(seconds.items()))) == text


def test_costs_of_others_are_read() -> None:
    text = """
        # comment
        costs { name: 'fusion.1' cost_us: 2.5 power: 3 }  costs: < name: "f::copy"; cost_us: 1e1 >
        latencies { source: "a" target: "b" latency_us: 1 }
    """
    assert xla_tables.parse_cost_text(text, "c.pbtxt") == {"fusion.1": 2.5e-6, "f::copy": 1e-5}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e-6])
def test_a_cost_is_a_time(bad: float) -> None:
    with pytest.raises(DhelixError, match="the cost of fusion.1 is"):
        xla_tables.cost_text({"fusion.1": bad})
    with pytest.raises(DhelixError, match="c.pbtxt: the cost of 'fusion.1' is"):
        xla_tables.parse_cost_text(f'costs {{ name: "fusion.1" cost_us: {bad} }}', "c.pbtxt")


@pytest.mark.parametrize("text", ["costs {", '{"schema": 1}', "costs { cost_us: 'x' }", "a {" * 10_000])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(DhelixError, match="f: no cost text of XLA"):
        xla_tables.parse_cost_text(text, "f")
    with pytest.raises(DhelixError, match="f: no( entries| collective performance table of XLA)"):
        xla_tables.parse_collective_table(text.replace("cost", "entrie"), "f")


# --- The collective performance table.


def _times(scale: float = 1.0, sizes: range = range(16, 29)) -> dict[CollectiveKey, float]:
    return {
        CollectiveKey(kind, 1 << size, gpus, groups=groups): scale * (1e-5 + (1 << size) / 3e11)
        for kind in KINDS
        for size in sizes
        for gpus, groups in ((2, 1), (2, 2), (4, 1))
    }


def test_times_of_collectives_come_back() -> None:
    times = _times()
    text = xla_tables.collective_table(times)
    assert xla_tables.parse_collective_table(text, "t.pbtxt") == pytest.approx(times, rel=1e-6)
    assert xla_tables.collective_table(dict(reversed(times.items()))) == text


def test_what_xla_has_no_place_for_is_left_out() -> None:
    key = CollectiveKey("all-gather", 1 << 20, 4)
    others = (
        CollectiveKey("collective-broadcast", 1 << 20, 4),
        CollectiveKey("ragged-all-to-all", 1 << 20, 4),
        CollectiveKey("all-gather", 1 << 20, 2, nodes=2),
        CollectiveKey("all-gather", 1 << 31, 4),
        CollectiveKey("all-gather", 1 << 20, 1),
        CollectiveKey("all-gather", 0, 4),
        CollectiveKey("reduce-scatter", 12, 4),
    )
    assert xla_tables.in_table(key) and not any(map(xla_tables.in_table, others))
    other_way = CollectiveKey("all-gather", 1 << 20, 4, implementation="symmetric")
    times = dict.fromkeys((*others, key, other_way), 1e-3)
    assert xla_tables.parse_collective_table(xla_tables.collective_table(times), "t").keys() == {key}
    symmetric = xla_tables.collective_table(times, implementation="symmetric")
    assert xla_tables.parse_collective_table(symmetric, "t").keys() == {key}
    with pytest.raises(DhelixError, match="no time of a collective inside a node was measured with user-buffers"):
        xla_tables.collective_table(times, implementation="user-buffers")


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_throughput_needs_a_time(bad: float) -> None:
    with pytest.raises(DhelixError, match="the time of all-gather 8B 4x1 groups=1 nccl is"):
        xla_tables.collective_table({CollectiveKey("all-gather", 8, 4): bad})


def _entry(opcode: str, rest: str) -> str:
    shape = "shape { element_type: F32 dimensions: 256 is_dynamic_dimension: false }"
    instruction = f'name: "_" opcode: "{opcode}" {shape} metadata {{}} {rest} statistics_viz {{}}'
    return f'entries {{ instruction {{ {instruction} }} fingerprint: "f" network_throughput_bytes_per_sec: 1024000 }}'


def _iota(groups: int, gpus: int) -> str:
    return f"num_replica_groups: {groups} num_devices_per_group: {gpus} iota_reshape_dims: 8 iota_transpose_perm: 0"


def _pairs(*pairs: tuple[int, int]) -> str:
    return " ".join(f"source_target_pairs {{ source: {a} target: {b} }}" for a, b in pairs)


@pytest.mark.parametrize(
    ("opcode", "rest", "key"),
    [
        ("all-gather", f"iota_collective_device_list {{ {_iota(2, 4)} }}", "all-gather 1024B 4x1 groups=2 nccl"),
        (
            "all-reduce",
            f"collective_device_list {{ iota_replica_group_list {{ {_iota(1, 8)} }} }}",
            "all-reduce 1024B 8x1 groups=1 nccl",
        ),
        (
            "reduce-scatter",
            f"iota_collective_device_list {{ {_iota(1, 4)} }}",
            "reduce-scatter 4096B 4x1 groups=1 nccl",
        ),
        ("collective-permute", _pairs((0, 1), (1, 2), (2, 0)), "collective-permute 1024B 3x1 groups=1 nccl"),
        ("collective-permute", _pairs((0, 1), (1, 0), (2, 3), (3, 2)), "collective-permute 1024B 2x1 groups=2 nccl"),
        ("collective-permute", _pairs((0, 2), (1, 3)), None),
        ("collective-permute", _pairs((0, 1), (1, 0), (0, 2), (2, 0)), None),
        ("collective-permute", "", None),
        ("all-gather", "", None),
        ("send", f"iota_collective_device_list {{ {_iota(1, 4)} }}", None),
    ],
)
def test_tables_of_xla_are_read(opcode: str, rest: str, key: str | None) -> None:
    text = f'entries {{ key: "sm_90" value {{ {_entry(opcode, rest)} partition_size: 8 }} }}'
    times = xla_tables.parse_collective_table(text, "t.pbtxt")
    assert [str(k) for k in times] == ([key] if key else [])
    assert list(times.values()) == pytest.approx([4e-3 if opcode == "reduce-scatter" else 1e-3][: len(times)])


def test_a_table_of_other_devices_is_named() -> None:
    text = xla_tables.collective_table(_times(), device="sm_100_B200")
    assert xla_tables.parse_collective_table(text, "t.pbtxt", device="sm_100_B200").keys() == _times().keys()
    with pytest.raises(
        DhelixError, match=r"t.pbtxt: no entries for sm_90: choose one of its devices \('sm_100_B200'\)"
    ):
        xla_tables.parse_collective_table(text, "t.pbtxt")


# --- XLA reads our files: the order of its scheduler follows our times.


@functools.cache
def _lowered() -> jax.stages.Lowered:
    """Five collectives, and three independent products that can hide them."""
    mesh = deviceless.mesh({"tp": 4})

    def step(x: jax.Array, w: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        gathered = jax.lax.all_gather(x, "tp", axis=0, tiled=True) @ w
        scattered = jax.lax.psum_scatter(gathered, "tp", scatter_dimension=0, tiled=True)
        passed = jax.lax.ppermute(w * 2, "tp", [(i, (i + 1) % 4) for i in range(4)])
        exchanged = jax.lax.all_to_all(w * 3, "tp", 0, 0, tiled=True)
        return scattered, jax.lax.psum(w, "tp"), passed, exchanged, ((y @ y) @ y) @ y

    specs = (P("tp"), P(None, "tp"), P())
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(P("tp"), P(), P("tp"), P("tp"), P()), check_vma=False
    )
    shapes = ((8192, 4096), (4096, 8192), (4096, 4096))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return jax.jit(sharded).lower(*arguments)


def _schedule(**options: str) -> list[str]:
    """Names of instructions in the order of the compiled schedule."""
    compiled = deviceless.compile(_lowered(), xla_gpu_enable_latency_hiding_scheduler=True, **options)
    text = compiled.as_text() or ""
    return re.findall(r"^\s+(?:ROOT )?%([\w.-]+) = ", text[text.index("ENTRY") :], re.MULTILINE)


@pytest.mark.deviceless
def test_xla_schedules_by_our_collective_table(tmp_path: Path) -> None:
    orders = []
    for i, scale in enumerate((0.01, 1, 100, 100)):  # one file each, because JAX compiles only once for a path
        path = tmp_path / f"{i}.pbtxt"
        path.write_text(xla_tables.collective_table(_times(scale)))
        orders.append(_schedule(xla_gpu_experimental_collective_perf_table_path=str(path)))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert orders[2] == orders[3]


_PRODUCTS = ("custom-call", "gemm_fusion")  # of cuBLAS and of Triton, whichever the shipped autotuning chose


@pytest.mark.deviceless
def test_xla_schedules_by_our_cost_text(tmp_path: Path) -> None:
    by_default = _schedule()
    orders = []
    for i, product in enumerate((1e-6, 1e-6, 5e-3)):
        path = tmp_path / f"{i}.pbtxt"
        costs = {name: product if name.startswith(_PRODUCTS) else 1e-4 for name in by_default}
        path.write_text(xla_tables.cost_text(costs))
        orders.append(_schedule(xla_gpu_pgle_profile_file_or_directory_path=str(path)))
    assert orders[0] == orders[1] != orders[2]
