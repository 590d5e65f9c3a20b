"""A rendezvous of the devices inside a kernel. It runs while the kernel multiplies its first tiles, not before launch.

A kernel owns its memory only while it runs. Before that, another operation of the device may use the memory. So no
device may write to a peer, or read a peer's results, before the peer's kernel has begun. XLA ensures this by an
additional kernel before each launch, which all devices leave together. That kernel takes longer than this rendezvous
(docs/research_log.md).

    words of a device (only this device writes them, and all devices read them):    stamp | seen[1] | seen[2] | ...
    seen[i]: the last stamp that this device has read from the device i places further on

    1  stamp = the current time
    2  repeat: read every peer's stamp, and the stamp of this device that the peer has seen; copy the peers' stamps into
       `seen`; until all peers have seen this device's stamp
    3  copy the stamps once more, then let this device's blocks go on

Legality:
- Before a peer has begun, its words hold arbitrary data, and reading them does no harm. A word counts as an answer only
  if its 8 bytes equal this device's current stamp. Words of earlier calls hold earlier stamps. So a peer that has seen
  this stamp has begun this call, and all earlier work of the peer is done.
- In step 2, a device may copy a word before the peer has written its stamp there. In step 3, this is impossible,
  because all peers have written their stamps.
- A device's kernel must not exit before its peers have read which stamps it has seen. Kernels exit only after they have
  received everything that every peer sends. Some of this data comes from blocks that have waited for the rendezvous.
  (In `summed_matmul` these are all blocks except blocks whose first tile belongs to their own device.)
- Stamps of one device do not repeat for hours. Stamps of two devices are equal if their timers and clocks are equal.
  Equal stamps could be confused only if calls over two axes use one address. By estimate, this happens in less than
  1e-8 of such calls.

A kernel with this rendezvous needs a counter that is zeroed before the kernel begins, such as a counter of
`pl.get_global`. It also needs `compiler_params=PARAMS`.

Cost: none if the first tile takes longer than two round trips over the link.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

WARP = 2  # the warp of one block's memory warpgroup that runs `Meeting.meet`; other warps load
PARAMS = plgpu.CompilerParams(skip_device_barrier=True)  # for kernels with a `Meeting`


def words(devices: int) -> jax.ShapeDtypeStruct:
    """The type of the additional result that holds a device's words. A word has 64 bits, as two int32."""
    return jax.ShapeDtypeStruct((devices, 2), jnp.int32)


@dataclass(frozen=True)
class Meeting:
    """The rendezvous of the devices of an axis.

    Attributes:
      axis: the axis's name.
      words: this device's words in global memory, of the type that the function `words` returns.
      begun: counter of this device. It becomes 1 when all other devices have begun.
    """

    axis: str
    words: Any
    begun: Any

    def meet(self) -> None:
        """Runs the rendezvous. Only one warp of one block may call it. Afterwards, `wait` returns in all blocks."""
        devices, me = lax.axis_size(self.axis), lax.axis_index(self.axis)
        peers: list[Any] = [{self.axis: lax.rem(me + step, jnp.int32(devices))} for step in range(1, devices)]
        _meet(self.words, [plgpu.remote_ref(self.words, peer) for peer in peers])
        plgpu.semaphore_signal(self.begun, memory_scope="gpu")

    def wait(self) -> None:
        """Waits until all devices have begun. A warp or a warpgroup may call this function."""
        plgpu.semaphore_wait(self.begun, 1, decrement=False, memory_scope="gpu")


def _meet(own: Any, others: list[Any]) -> None:
    """Runs steps 1 to 3 of the module's docstring. `others[i]` has the words of the device i + 1 places further on."""
    refs = tuple(plgpu.RefType() for _ in range(1 + len(others)))

    @plgpu.inline_mgpu(arg_types=refs)
    def meet(_: Any, *refs: Any) -> None:
        with utils.single_thread(scope=utils.ThreadSubset.WARP):
            own, *others = map(utils.memref_ptr, refs)
            # 1. The stamp of this device.
            stamp = _now()
            _store(own, 0, stamp)
            _fence()  # a peer that finds its own stamp in `seen` also finds this stamp

            def stamps() -> list[Any]:
                return [_load(other, 0) for other in others]

            def copy(stamps: list[Any]) -> None:
                for place, seen in enumerate(stamps, 1):
                    _store(own, place, seen)

            # 2. Copy the peers' stamps until all peers have seen this device's stamp.
            again = scf.WhileOp([], [])
            with ir.InsertionPoint(again.before.blocks.append()):
                # All loads at once: each takes a round trip over the link.
                found = stamps()
                seen = [_load(other, len(others) + 1 - place) for place, other in enumerate(others, 1)]
                copy(found)
                unseen = [arith.cmpi(arith.CmpIPredicate.ne, one, stamp) for one in seen]
                scf.condition(functools.reduce(arith.ori, unseen), [])
            with ir.InsertionPoint(again.after.blocks.append()):
                scf.yield_([])
            # 3. Copy the stamps once more.
            _fence()
            copy(stamps())

    meet(own, *others)


def _now() -> Any:
    """The time in nanoseconds. The SM's clock is mixed into the highest bits, in case the timer does not advance."""
    i64 = ir.IntegerType.get_signless(64)
    cycles = arith.shli(arith.extui(i64, utils.clock()), utils.c(44, i64))
    return arith.xori(utils.globaltimer(), cycles)


def _load(words: Any, place: int) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    return utils.inline_ptx(
        f"ld.relaxed.sys.global.u64 $0, [$1 + {8 * place}];", words, result_types=i64, has_side_effects=True
    )


def _store(words: Any, place: int, word: Any) -> None:
    utils.inline_ptx(f"st.relaxed.sys.global.u64 [$0 + {8 * place}], $1;", words, word, has_side_effects=True)


def _fence() -> None:
    utils.inline_ptx("fence.acq_rel.sys;", has_side_effects=True)
