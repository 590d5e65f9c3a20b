"""The measurement of contention: its settings, its fit, and the order that its pass gives a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dhelix.benchmarks.collectives import channel_fits, channel_grid, channel_picture
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
    found = channel_fits.fitted([part(buffer // 2) for buffer in channel_grid.BUFFERS], left_out=False)
    held_out = found["held out"]["every other"]
    assert found["settings"] >= 4 * 4 and held_out["settings"] * 2 == found["settings"]
    assert held_out["collectives, 90 %"] < 0.02 and held_out["computation, 90 %"] < 0.02
    assert found["longest over shortest computation"] > 1.1
    assert "h plot" in channel_fits.markdown({"fits": {"h plot": found}})


def row(channels: int, chunk: int, *computations: float) -> dict[str, Any]:
    return {"channels": [channels], "chunk": chunk, "collectives": [0.01], "computations": computations, "whole": 0.02}


def test_pieces_are_joined_until_all_processes_cut_at_the_same_places() -> None:
    """Four products: one process has the first two in a piece, the other the two in the middle."""
    names = [["", "all-gather 1B 2x1 groups=1 nccl", 1]]
    shared = {"volumes": [1e6], "waves": [None] * 3, "sms": 132, "collectives": names}
    parts = [
        {**shared, "rows": [row(1, 65536, 0.2, 0.1, 0.1), row(2, 65536, 0.4, 0.2, 0.1)]},
        {**shared, "rows": [row(1, 131072, 0.1, 0.2, 0.1)]},
    ]
    overlap, measured = channel_fits.measurements(parts)
    assert overlap.kinds == ("all-gather",) and len(overlap.waves) == 2
    for one, wanted in zip(measured, [(0.3, 0.1), (0.6, 0.1), (0.3, 0.1)], strict=True):
        assert one.computations == pytest.approx(wanted)


def test_a_file_is_fitted_again_without_gpus_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [part(chunk) for chunk in (65536, 1048576)]
    path = tmp_path / "grid.json"
    path.write_text(json.dumps({"on": {}, "parts": {"h plot": parts, "ffn": parts}}))
    monkeypatch.setattr(channel_grid, "fitted", lambda parts: channel_fits.fitted(parts, left_out=False))
    channel_grid.main(["--refit", "--out", str(path)])
    found = json.loads(path.read_text())
    assert found["parts"]["ffn"] == parts and set(found["fits"]) == {"ffn", "h plot"}
    pictures = [tmp_path / "one.png", tmp_path / "two.png"]
    for picture in pictures:
        channel_picture.main([str(path), str(picture)])
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


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
