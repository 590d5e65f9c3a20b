"""The cost of a spliced collective-matmul kernel: found by its name, alone on the GPU, and part of a step's time."""

import dataclasses

import pytest

from dhelix.passes.evaluation.collective_matmul_kernels import kernel_key, kernel_of, named
from dhelix.passes.evaluation.costs import CostModel, Costs, Kernel
from dhelix.passes.evaluation.operator_keys import OperatorKeys, key_of
from dhelix.passes.evaluation.roofline_costs import Lane
from dhelix.passes.evaluation.step_time import predict
from dhelix.passes.evaluation.timeline import evaluate
from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.plans.plan_operators import PlanOperators, is_work, operator_text
from dhelix.profiles.collective_matmul.estimates import collective_key, gemm_key
from dhelix.profiles.collective_matmul.sites import MONOLITHIC, Form, Site, SiteTimes, Tiles, Times
from dhelix.profiles.estimates.contention import MIN_RATE
from dhelix.profiles.estimates.estimator import Source
from dhelix.profiles.hardware import H200
from dhelix.profiles.keys import CollectiveKey, OperatorKey
from dhelix.profiles.profile import Profile, Section, Timing

SITE = Site("all_gather_matmul", 8192, 4096, 3072, "bfloat16", 2)
FORM = Form("mosaic", tiles=Tiles(128, 256, 64, 4, "M", 8))
KERNEL = """custom-call(x, w), custom_call_target="mosaic_gpu_v2",
    metadata={op_name="NAME"}, backend_config="{uses_xla_collective_metadata = true}\""""
# Two collectives, one of them in flight when the kernel begins; the kernel, alone or fused with a slice; a product.
TEXT = """HloModule m, is_scheduled=true
gather {
  q = bf16[4096,4096] parameter(0)
  ROOT g = bf16[8192,4096] all-gather(q), dimensions={0}, replica_groups={{0,1}}, channel_id=1, use_global_device_ids=true
}
sliced {
  x = bf16[4096,4096] parameter(0)
  w = bf16[4096,3072] parameter(1)
  ROOT inside = bf16[8192,3072] KERNEL
}
ENTRY e {
  x = bf16[4096,4096] parameter(0)
  w = bf16[4096,3072] parameter(1)
  start = ((bf16[4096,4096]), bf16[8192,4096]) async-start(x), calls=gather
  kernel = bf16[8192,3072] BODY
  done = bf16[8192,4096] async-done(start)
  ROOT result = (bf16[8192,3072], bf16[8192,4096]) tuple(kernel, done)
}"""  # noqa: E501


def module(fused: bool = False, name: str = named("jit(step)/all_gather", SITE, FORM)) -> HloModule:
    kernel = KERNEL.replace("NAME", f"{name}/mpmd_map")
    body = "fusion(x, w), kind=kCustom, calls=sliced" if fused else kernel
    return HloModule.from_text(TEXT.replace("KERNEL", kernel).replace("BODY", body))


def instruction(module: HloModule, name: str) -> Instruction:
    return next(i for i in module.entry.instructions if i.name == name)


def model(matmuls: bool = True) -> CostModel:
    """A GEMM of 1 ms and a gather of 0.4 ms; a kernel that takes 1.1 times its GEMM, measured at another clock."""
    gemm, gather = gemm_key(SITE), collective_key(SITE)
    assert isinstance(gemm, OperatorKey) and isinstance(gather, CollectiveKey)
    section = Section("default", {gemm: Timing(1e-3)}, {gather: Timing(4e-4)})
    forms = {MONOLITHIC: Timing(3e-3), FORM: Timing(2.2e-3)}
    times = Times("H200", "nvlink", sites={SITE: SiteTimes(Timing(2e-3), Timing(8e-4), forms)})
    return CostModel(Profile("H200", "nvlink").with_section(section), matmuls=times if matmuls else None)


@pytest.mark.parametrize("fused", [False, True])
def test_a_kernel_costs_what_was_measured_of_its_site_and_form(fused: bool) -> None:
    kernel = instruction(module(fused), "kernel")
    assert kernel_of(kernel) == (SITE, FORM)
    costs = model().costs()
    cost = costs[kernel]
    assert (cost.lane, cost.source) == (Lane.COMPUTE, Source.MEASURED)
    assert cost.seconds == pytest.approx(1.1e-3 + costs.in_step.wait), "it waits for its peers as a collective does"
    assert key_of(kernel) is None, "it cannot be measured alone"


def test_without_times_or_a_name_it_counts_as_its_product() -> None:
    unnamed = instruction(module(name="jit(step)/all_gather/collective_matmul"), "kernel")
    assert kernel_of(unnamed) is None
    for costs, kernel in ((model().costs(), unnamed), (model(matmuls=False).costs(), instruction(module(), "kernel"))):
        assert costs[kernel] == Costs(H200)[kernel] and costs[kernel].source is Source.GUESS


def test_nothing_runs_beside_it() -> None:
    """A collective in flight ends first, and then the kernel begins."""
    program, costs = module(), model().costs()
    kernel, start = instruction(program, "kernel"), instruction(program, "start")
    assert costs.rates(kernel, start, True) == (MIN_RATE, 1.0)
    timeline = evaluate(program.schedule[program.entry], costs)
    in_turn = costs[kernel].seconds + costs[start].seconds + costs.in_step.wait
    assert timeline.seconds == pytest.approx(in_turn, rel=0.01)


def test_it_follows_the_clock_and_loads_the_gpu_by_what_it_sends_too() -> None:
    kernel, costs = instruction(module(), "kernel"), model().costs()
    assert costs.at_clock(1.25)[kernel].seconds == pytest.approx(1.25 * 1.1e-3 + costs.in_step.wait)
    assert costs[kernel].communication == 4e-4 and costs[kernel].flops > 0.0


def test_other_instructions_may_count_as_kernels() -> None:
    program = module()
    kernel, start = instruction(program, "kernel"), instruction(program, "start")
    costs = model().costs().with_kernels({kernel: Kernel(0.0), start: Kernel(2.0, source=Source.GUESS)})
    assert costs[kernel].seconds == 0.0 < costs[kernel].flops, "what it computes still loads the GPU"
    assert costs[start].lane is Lane.COMPUTE and costs[start].seconds > 2.0
    assert costs.at_clock(1.25)[start].seconds > 2.5


def test_kernels_count_in_the_sum_of_a_step() -> None:
    time = predict(module(), model().costs())
    assert kernel_key(instruction(module(), "kernel")) in [operator.key for operator in time.operators]
    assert time.shares[Source.GUESS] == 0.0
    assert predict(module(), model(matmuls=False).costs()).shares[Source.GUESS] > 0.0


def test_a_name_is_read_back_whatever_stands_around_it() -> None:
    strange = dataclasses.replace(SITE, kind="matmul_all_reduce", axis_size=8)
    for form in (FORM, Form("mosaic"), Form("hybrid", 4)):
        found = instruction(module(name=named("a/collective_matmul/b", strange, form)), "kernel")
        assert kernel_of(found) == (strange, form)


def test_a_plan_has_names_for_kernels() -> None:
    """Plans name kernels and count them as work, so a kernel of another form has another fingerprint."""
    with_kernel, fused = (PlanOperators(module(fused).entry, OperatorKeys()) for fused in (False, True))
    kernel = instruction(with_kernel.computation.module, "kernel")
    assert with_kernel.names([kernel]) == {kernel: "collective matmul"}
    assert is_work(operator_text(kernel, OperatorKeys()))
    other = PlanOperators(module(name=named("", SITE, Form("mosaic"))).entry, OperatorKeys())
    assert with_kernel.fingerprint == fused.fingerprint != other.fingerprint
