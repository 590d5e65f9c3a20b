"""The measurement of contention: its settings, its fit, and the order that its pass gives a program."""

from __future__ import annotations

from typing import Any

from dhelix.benchmarks.collectives import channel_grid
from dhelix.benchmarks.collectives.early_starts import EarlyStarts
from dhelix.passes.framework.manager import PassContext
from dhelix.passes.hlo import HloModule
from dhelix.passes.hlo.verify import verify
from dhelix.profiles.channels.channel_model import Bandwidth, ChannelModel, ChannelSetting, Links, Overlap
from dhelix.profiles.channels.model_fit import columns

OVERLAP = Overlap((3e7, 3e7), (float("inf"),) * 2, 132)
MODEL = ChannelModel(OVERLAP, Links(2e10, 4e9, 2e5, 1e-5, 3e-6), Bandwidth(0.03, 5e5, 0.6), (2e-3, 3e-3), (0.3, 0.7))


def part(chunk: int) -> dict[str, Any]:
    rows = []
    for channels in channel_grid.settings(2):
        x, y = MODEL.times(*columns([tuple(ChannelSetting(c, chunk) for c in channels)]))
        collectives, computations = list(map(float, x[:, 0])), list(map(float, y[:, 0]))
        whole = max(sum(collectives), sum(computations))
        rows.append({"channels": list(channels), "chunk": chunk, "collectives": collectives,
                     "computations": computations, "whole": whole})  # fmt: skip
    return {"overlap": "h plot", "volumes": [3e7, 3e7], "waves": [None, None], "sms": 132, "default": rows[3],
            "rows": rows}  # fmt: skip


def test_held_out_settings_of_a_known_model_are_predicted() -> None:
    found = channel_grid.fitted([part(buffer // 2) for buffer in channel_grid.BUFFERS])
    assert found["settings"] >= 4 * 4 and found["held out"] * 2 == found["settings"]
    assert found["collectives, 90 %"] < 0.02 and found["computation, 90 %"] < 0.02
    assert found["longest over shortest computation"] > 1.1
    assert "h plot" in channel_grid.markdown({"fits": {"h plot": found}})


PROGRAM = """
HloModule step, is_scheduled=true, num_partitions=2

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT sum = f32[] add(a, b)
}

ENTRY main {
  x = f32[64,64] parameter(0)
  y = f32[64,64] parameter(1)
  first = f32[64,64] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  second = f32[64,64] dot(first, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  start = f32[64,64] all-reduce-start(y), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add
  done = f32[64,64] all-reduce-done(start)
  third = f32[64,64] dot(second, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = (f32[64,64], f32[64,64]) tuple(third, done)
}
"""


def test_collectives_start_with_the_computation_and_end_after_it() -> None:
    module = HloModule.from_text(PROGRAM)
    assert EarlyStarts().run(module, PassContext())
    verify(module)
    names = [i.name for i in module.schedule[module.entry] if i.opcode != "parameter"]
    assert names == ["start", "first", "second", "third", "done", "out"]
