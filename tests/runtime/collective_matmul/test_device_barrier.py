"""Rendezvous of devices inside a kernel: the order of its messages, simulated with devices that begin at any time.

The test on GPUs is in `test_on_gpus.py`, because the interpreter has no remote memory.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dhelix.profiles.collective_matmul.sites import Site
from dhelix.runtime.collective_matmul.kernels import device_barrier, matmul_reduce_scatter
from dhelix.runtime.compiler import deviceless

deviceless.prepare_environment()


@dataclasses.dataclass
class Device:
    """A device that calls kernels one after the other. Each call finds `words` as the previous call left them."""

    me: int
    words: list[int]
    call: int = 0  # number of the current call, from 1 on
    met: int = 0
    got: set[int] = dataclasses.field(default_factory=set)


def kernel(devices: list[Device], me: int, clock: Iterator[int], chance: random.Random) -> Iterator[None]:
    """Simulates `meeting` message by message, then sends something to all peers, and ends when all have sent."""
    it, n = devices[me], len(devices)
    peers = [(place, devices[(me + place) % n]) for place in range(1, n)]
    it.call += 1
    it.got = set()
    stamp = it.words[0] = next(clock)
    yield
    unseen = True
    while unseen:
        found, unseen = [], False
        for _, peer in peers:
            found.append(peer.words[0])
            yield
        for place, peer in peers:
            unseen |= peer.words[n - place] != stamp
            yield
        for (place, _), seen in zip(peers, found, strict=True):
            it.words[place] = seen
            yield
    for place, peer in peers:
        seen = peer.words[0]
        yield
        it.words[place] = seen
        yield
    assert all(peer.call >= it.call for _, peer in peers), "a peer has not begun"
    it.met = it.call
    for _, peer in chance.sample(peers, len(peers)):
        assert peer.call == it.call, "a peer has left"
        peer.got.add(me)
        yield
    while len(it.got) < n - 1:
        yield


@pytest.mark.parametrize("seed", range(40))
def test_nobody_goes_on_before_all_have_begun_and_all_go_on(seed):
    chance = random.Random(seed)
    n, calls = chance.randint(2, 5), 4
    clock = iter(range(1, 1 << 30))
    # At first, the memory may hold anything except a stamp of this run.
    devices = [Device(me, [chance.randint(-(1 << 40), 0) for _ in range(n)]) for me in range(n)]
    running = {it.me: kernel(devices, it.me, clock, chance) for it in devices}
    speeds = [chance.choice([1, 1, 5, 40]) for _ in range(n)]
    for _ in range(200_000):
        if not running:
            break
        me = chance.choices(list(running), [speeds[it] for it in running])[0]
        if next(running[me], "done") == "done":
            del running[me]
            if devices[me].call < calls:
                # Other operations of this device may use the memory in between, but they leave no current stamp there.
                if chance.random() < 0.5:
                    devices[me].words = [chance.randint(-(1 << 40), 0) for _ in range(n)]
                running[me] = kernel(devices, me, clock, chance)
    assert not running and [it.met for it in devices] == [calls] * n


@pytest.mark.deviceless
def test_kernels_meet_without_xla():
    """XLA's own barrier is off, and the kernel has words for all devices."""
    mesh = deviceless.mesh({"tp": 2})  # with more devices, LLVM takes longer
    site = Site("matmul_reduce_scatter", 1024, 512, 512, "bfloat16", 2)
    assert matmul_reduce_scatter.supported(site) is None
    call = functools.partial(matmul_reduce_scatter.matmul_reduce_scatter_kernel, axis_name="tp")
    specs = P(None, "tp"), P("tp")
    step = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=False)
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(((1024, 1024), (1024, 512)), specs, strict=True)
    )
    text = deviceless.compile(jax.jit(step).lower(x, w)).as_text() or ""
    (line,) = (it for it in text.splitlines() if 'custom_call_target="mosaic_gpu_v2"' in it)
    assert "skip_device_barrier = true" in line and "s32[2,2]" in line
    assert device_barrier.words(4).shape == (4, 2)
