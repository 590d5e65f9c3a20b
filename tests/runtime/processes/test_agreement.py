"""Two processes that would run different programs stop with the same message, and equal ones go on."""

from __future__ import annotations

import json
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dhelix.passes.fingerprint import collective_order
from dhelix.passes.hlo import HloModule
from dhelix.runtime import agreement
from dhelix.tests.runtime import job

PROCESS = """
import json, sys
import jax
process, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from dhelix.errors import DhelixError, HostsDisagreeError
from dhelix.runtime import agreement
from tests.runtime.test_agreement import compiled_step

def outcome(check):
    try:
        return check()
    except (DhelixError, HostsDisagreeError) as error:
        return str(error)

def fails_in(*processes):
    if process in processes:
        raise ValueError(f"no room in {process}")
    return process

print(json.dumps([
    outcome(lambda: agreement.check_agreement({"inputs": "same", "order": "same"})),
    outcome(lambda: agreement.check_agreement({"inputs": "same", "order": f"of {process}"})),
    outcome(lambda: agreement.check_compiled(compiled_step(True), "marker")),
    outcome(lambda: agreement.check_compiled(compiled_step(process == 0), "marker")),
    outcome(lambda: agreement.check_compiled(compiled_step(True), f"marker {process}")),
    agreement.largest(process << 40), agreement.largest(7),
    agreement.gathered("größer " * 1000 if process else ""), agreement.gathered("x"),
    outcome(lambda: agreement.together(lambda: fails_in(1), (ValueError,))),
    outcome(lambda: agreement.together(lambda: fails_in(0, 1), (ValueError,))),
    agreement.together(lambda: fails_in(), (ValueError,)) == process,
]))
"""


def compiled_step(gather_first: bool) -> jax.stages.Compiled:
    """Two collectives in a loop, in one order or the other."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def gather(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, "x", tiled=True).sum() + x

    def rotate(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "x", [(0, 1), (1, 0)])

    def body(_: int, x: jax.Array) -> jax.Array:
        return rotate(gather(x)) if gather_first else gather(rotate(x))

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, body, x)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()


def test_a_single_process_agrees_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "compiled_fingerprint", lambda _: pytest.fail("not needed"))
    assert agreement.check_compiled(compiled_step(True), "marker") is None
    agreement.check_agreement({"inputs": "x"})
    assert agreement.largest(5) == 5
    assert agreement.gathered("what it says") == ["what it says"]
    with pytest.raises(ZeroDivisionError):
        agreement.together(lambda: 1 / 0, (ValueError,))


def test_order_of_a_compiled_step() -> None:
    first, second = compiled_step(True), compiled_step(False)
    order = collective_order(HloModule.from_text(first.as_text() or ""))
    assert [line.split()[0] for line in order] == ["all-gather", "collective-permute"]
    assert agreement.compiled_fingerprint(first) == agreement.compiled_fingerprint(compiled_step(True))
    assert agreement.compiled_fingerprint(first) != agreement.compiled_fingerprint(second)


def test_two_processes() -> None:
    outcomes = [json.loads(output.splitlines()[-1]) for output in job.outputs(PROCESS)]
    same, order, compiled, compiled_order, marker, largest, equal, *said = outcomes[0]
    assert outcomes[0] == outcomes[1]
    assert same is None
    assert order.startswith("hosts disagree on the order: ")
    assert f"on process 0 ({socket.gethostname()}); " in order and "on process 1 (" in order
    assert len(compiled) == 16
    assert "hosts disagree on the order of collectives" in compiled_order
    assert "hosts disagree on the program, options, profile or versions" in marker
    assert (largest, equal) == (1 << 40, 7)
    assert said == [["", "größer " * 1000], ["x", "x"], "no room in 1", "no room in 0", True]
