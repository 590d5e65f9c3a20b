"""Finds the collectives of a program that a plan's tuning section names, and the other way round.

    bodies(module, target)[loop_body].describe()       "both strands: 8 collectives, 18 products, 2 attentions"
    identities(module, target)[all_gather.3]           ("5d0c5f7e0c1b7a52", "all-gather 67108864B 2x1 ...", 1)
    settings, missing = settings_of(plan, module)      {all_gather.3: ring simple, 4 channels}, []

Only collectives about which NCCL asks a tuner plugin have an identity (`passes/tuning/launch_order.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from dhelix.passes.analysis.execution import executions
from dhelix.passes.evaluation.operator_keys import OperatorKeys
from dhelix.passes.hlo import Computation, HloModule, Instruction
from dhelix.passes.plans.plan import Plan, PlanTarget
from dhelix.passes.plans.plan_operators import PlanOperators
from dhelix.passes.tuning.collective_settings import TunedCollective
from dhelix.passes.tuning.launch_order import questions
from dhelix.profiles.channels.nccl_setting import NcclSetting
from dhelix.profiles.hardware import describe

type Identity = tuple[str, str, int]
"""Fingerprint of the computation, key of the collective, and its number among those with this key, from 1."""


def bodies(module: HloModule, target: PlanTarget) -> dict[Computation, PlanOperators]:
    """The computations of a scheduled module with collectives that NCCL asks about, in the order of the module."""
    per_node = describe(target.hardware, target.link, target.gpus_per_node).gpus_per_node
    keys = OperatorKeys(per_node, target.implementation)
    running = executions(module)  # the computation in an async pair does not count: the pair is one launch
    asked = (c for c in module.computations if c in running and any(map(questions, module.schedule.get(c, ()))))
    return {computation: PlanOperators(computation, keys) for computation in asked}


def identities(module: HloModule, target: PlanTarget) -> dict[Instruction, Identity]:
    """The identity of each collective of a scheduled module that NCCL asks about, in launch order of each computation.

    If computations have the same fingerprint, their collectives have the same identities, and so the same settings.
    """
    return {
        instruction: (operators.fingerprint, *operators.identities[instruction])
        for computation, operators in bodies(module, target).items()
        for instruction in module.schedule[computation]
        if questions(instruction)
    }


def settings_of(plan: Plan, module: HloModule) -> tuple[dict[Instruction, NcclSetting], Sequence[TunedCollective]]:
    """The settings of the program's collectives, and the collectives of the plan that the program lacks.

    The plan must have a tuning section.
    """
    assert plan.tuning is not None
    wanted = {one.identity: one for one in plan.tuning.collectives}
    settings, seen = {}, set()
    for instruction, identity in identities(module, plan.target).items():
        if identity in wanted:
            settings[instruction] = wanted[identity].setting
            seen.add(identity)
    return settings, [one for identity, one in wanted.items() if identity not in seen]
