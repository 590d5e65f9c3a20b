"""When all-to-alls replace other collectives: alone, and where compute is to hide them."""

from dataclasses import replace

import pytest

from dhelix.passes.communication import exchange
from dhelix.passes.communication.all_gather_decomposition import AllGatherDecomposition
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule
from dhelix.profiles.keys import CollectiveKey

GATHER = CollectiveKey("all-gather", 64 << 20, 4)
LOOP = """
HloModule m, num_partitions=4
body { state = (s32[], bf16[8192,4096], bf16[4096,4096]) parameter(0)
  n = s32[] get-tuple-element(state), index=0
  x = bf16[8192,4096] get-tuple-element(state), index=1
  w = bf16[4096,4096] get-tuple-element(state), index=2
  one = s32[] constant(1)
  next = s32[] add(n, one)
  part = bf16[2048,4096] slice(x), slice={[0:2048], [0:4096]}
  y = bf16[8192,4096] all-gather(part), channel_id=1, use_global_device_ids=true, replica_groups={{0,1,2,3}},
    dimensions={0}
  z = bf16[8192,4096] dot(y, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT result = (s32[], bf16[8192,4096], bf16[4096,4096]) tuple(next, z, w) }
condition { state = (s32[], bf16[8192,4096], bf16[4096,4096]) parameter(0)
  n = s32[] get-tuple-element(state), index=0
  ten = s32[] constant(10)
  ROOT more = pred[] compare(n, ten), direction=LT }
ENTRY e { x = bf16[8192,4096] parameter(0)
  w = bf16[4096,4096] parameter(1)
  zero = s32[] constant(0)
  state = (s32[], bf16[8192,4096], bf16[4096,4096]) tuple(zero, x, w)
  ROOT loop = (s32[], bf16[8192,4096], bf16[4096,4096]) while(state), condition=condition, body=body }
"""


@pytest.mark.parametrize(("link", "bound"), [("nvlink", False), ("no-p2p", True)])
def test_communication_bound(link: str, bound: bool) -> None:
    """Ten times a product and a gather of 64 MiB, which takes longer than the product only without NVLink."""
    assert exchange.is_communication_bound(HloModule.from_text(LOOP), CostModel.find("H200", link)) == bound


def test_under_compute_collectives_are_left_whole_unless_they_are_the_bound() -> None:
    nvlink, host = CostModel.find("H200", "nvlink"), CostModel.find("H200", "no-p2p")
    context = PassContext()
    assert AllGatherDecomposition(host, overlapped=True).run(HloModule.from_text(LOOP), context)
    assert not AllGatherDecomposition(nvlink, overlapped=True).run(HloModule.from_text(LOOP), context)
    assert context.notes[-1].message == "left alone: compute takes longer than communication"


def test_without_costs_collectives_under_compute_are_left_whole() -> None:
    context = PassContext()
    assert not AllGatherDecomposition(overlapped=True).run(HloModule.from_text(LOOP), context)
    assert context.notes[-1].message == "left alone: no measured costs say whether it pays"


@pytest.mark.parametrize(("link", "found"), [("nvlink", ()), ("no-p2p", (GATHER,))])
def test_which_are_faster(link: str, found: tuple[CollectiveKey, ...]) -> None:
    assert exchange.faster(HloModule.from_text(LOOP), CostModel.find("H200", link)) == found


@pytest.mark.parametrize(
    ("only", "done"),
    [
        ((GATHER,), True),
        # equal bytes and group size are enough
        ((replace(GATHER, gpus_per_node=2, nodes=2, implementation="symmetric"),), True),
        ((replace(GATHER, bytes=GATHER.bytes // 2), replace(GATHER, kind="reduce-scatter")), False),
        ((replace(GATHER, gpus_per_node=2, groups=2),), False),
    ],
)
def test_a_plan_names_those_that_go(only: tuple[CollectiveKey, ...], done: bool) -> None:
    assert AllGatherDecomposition(only=only).run(HloModule.from_text(LOOP), PassContext()) == done


def test_keys_in_words() -> None:
    assert exchange.in_words(()) == ""
    assert exchange.in_words((GATHER, replace(GATHER, bytes=1), replace(GATHER, kind="reduce-scatter"))) == (
        "all-gathers and reduce-scatters"
    )
