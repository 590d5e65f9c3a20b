"""The tuning section of plans: as a file, and in a program."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dhelix.passes.hlo import HloModule
from dhelix.passes.plans import plan_files
from dhelix.passes.plans.plan import CollectivesSection, Plan, PlanError, PlanTarget
from dhelix.passes.plans.tuned_collectives import identities, settings_of
from dhelix.passes.tuning.collective_settings import CollectiveSettings, TunedCollective
from dhelix.profiles.channels.nccl_setting import NcclSetting

KEY = "all-gather 512B 2x1 groups=1 nccl"
FEW, MANY = NcclSetting("ring", "simple", 4), NcclSetting("", "", 16, 1 << 17)
SECTION = CollectiveSettings(
    "2.28",
    2,
    (
        TunedCollective("0123456789abcdef", KEY, 1, FEW, 1210.5, 980.0, 0.4),
        TunedCollective("0123456789abcdef", KEY, 2, MANY),
    ),
    550_500.0,
    518_400.0,
)
PLAN = Plan("a step", PlanTarget.of("H100", "no-p2p", "connections1", 2), tuning=SECTION)

PROGRAM = """
HloModule step, is_scheduled=true, num_partitions=2

ENTRY main {
  x = f32[64] parameter(0)
  y = f32[64] parameter(1)
  first = f32[128] all-gather(x), channel_id=1, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true
  second = f32[128] all-gather(y), channel_id=2, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true
  ROOT sum = f32[128] add(first, second)
}
"""


def edited(**changes: Any) -> str:
    read = json.loads(plan_files.dumps(PLAN))
    read["tuning"] |= changes
    return json.dumps(read)


def test_a_written_section_is_read_again() -> None:
    text = plan_files.dumps(PLAN)
    assert plan_files.loads(text, "here") == PLAN
    assert plan_files.dumps(plan_files.loads(text, "here")) == text


def test_a_plan_of_settings_alone_leaves_the_program() -> None:
    assert PLAN.leaves_program and not Plan("a step").leaves_program
    assert not replace(PLAN, collectives=CollectivesSection(row_parts=2)).leaves_program


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nccl": "new"}, "is no version of NCCL"),
        ({"devices": 1}, "1 devices have no collectives"),
        (
            {"collectives": [{"body": "no", "key": KEY, "occurrence": 1}]},
            "collectives.0: expected 16 hexadecimal digits",
        ),
        ({"collectives": [{"body": "0" * 16, "key": KEY, "occurrence": 1, "channels": 65}]}, "65 channels are imposs"),
        ({"collectives": [{"body": "0" * 16, "key": KEY, "occurrence": 1, "chunk": 5}]}, "5 bytes are too small"),
        ({"collectives": [{"body": "0" * 16, "key": KEY, "occurrence": 1, "algorithm": "ring"}]}, "given together"),
        (
            {"collectives": [{"body": "0" * 16, "key": KEY, "occurrence": 1, "algorithm": "star", "protocol": "ll"}]},
            "algorithm 'star' is unknown",
        ),
        ({"collectives": [{"body": "0" * 16, "key": KEY, "occurrence": 1}] * 2}, "has two settings"),
        ({"collectives": [{"body": "0" * 16, "key": KEY, "occurrence": 1, "us": 5}]}, "or neither"),
        ({"collectives": [{"body": "0" * 16, "key": KEY, "occurrence": 1, "threads": 2}]}, "threads"),
    ],
)
def test_a_wrong_section_is_one_clear_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_files.loads(edited(**changes), "plan.json")


def test_equal_collectives_of_a_program_have_their_own_settings() -> None:
    module = HloModule.from_text(PROGRAM)
    found = identities(module, PLAN.target)
    body = next(iter(found.values()))[0]
    assert {i.name: identity for i, identity in found.items()} == {"first": (body, KEY, 1), "second": (body, KEY, 2)}
    rows = tuple(replace(one, body=body) for one in SECTION.collectives)
    elsewhere = TunedCollective("f" * 16, KEY, 1, FEW)
    plan = replace(PLAN, tuning=replace(SECTION, collectives=(*rows, elsewhere)))
    settings, missing = settings_of(plan, module)
    assert {i.name: setting for i, setting in settings.items()} == {"first": FEW, "second": MANY}
    assert list(missing) == [elsewhere]
