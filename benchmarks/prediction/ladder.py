"""What each kind of overlap gains in a step with tensor and context parallelism, predicted: figure 15 of DHelix.

    python benchmarks/prediction/ladder.py --out DIR         # compiles for GPUs that this machine need not have

The tensor-parallel groups are nodes, so context parallelism uses the network. The rungs, each with the one before:

    nothing         the plain step in XLA's order; compute waits for every collective
    TP              strands; collectives in a node may overlap with compute
    CP              those between nodes may, too; all on one stream; weight gradients run where they become ready
    TP with CP      collectives in a node and between nodes run at the same time, on two streams
    weight gradients    may run anywhere until their strand ends

Compute that waits for a collective is modelled by costs: beside such a collective, it advances at the lowest rate that
the evaluator has. Orders are searched with the costs of the rung, for a step of few layers. Paper: arXiv 2411.15871,
section 6.4, Llama-39B on A40s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dhelix.benchmarks.strands.pinned_weight_gradients import PinnedWeightGradients
from dhelix.passes.communication.stream_assignment import StreamAssignment
from dhelix.passes.evaluation.costs import CostModel, Costs
from dhelix.passes.evaluation.intervals import Timeline
from dhelix.passes.evaluation.timeline import simulate_module
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.strand_pairing import StrandPairing
from dhelix.profiles.estimates.contention import MIN_RATE
from dhelix.profiles.estimates.estimator import Estimator, PairEstimate, Source
from dhelix.profiles.keys import CollectiveKey, Key
from dhelix.runtime.compiler import deviceless
from dhelix.runtime.compiler.lowering import compiled_module
from dhelix.runtime.step.pass_lists import strand_passes

NODE, NETWORK = "in a node", "between nodes"


@dataclass(frozen=True)
class System:
    """GPUs, as mesh axes and GPUs per node, and the sequence length that they train on."""

    axes: Mapping[str, int]
    per_node: int
    seq: int

    @property
    def gpus(self) -> int:
        return self.axes["dp"] * self.axes["cp"] * self.axes["tp"]

    @property
    def words(self) -> str:
        return " x ".join(f"{axis.upper()} {size}" for axis, size in self.axes.items() if size > 1) + f", S {self.seq}"


SYSTEMS = (
    System({"dp": 1, "cp": 2, "tp": 2}, 2, 16384),
    System({"dp": 1, "cp": 2, "tp": 4}, 4, 16384),
    System({"dp": 2, "cp": 4, "tp": 8}, 8, 32768),
)


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: where collectives may overlap with compute, and what else may happen."""

    name: str
    hidden: tuple[str, ...] = ()
    strands: bool = True
    streams: bool = False
    moving: bool = False


RUNGS = (
    Rung("nothing", strands=False),
    Rung("TP", (NODE,)),
    Rung("CP", (NODE, NETWORK)),
    Rung("TP with CP", (NODE, NETWORK), streams=True),
    Rung("weight gradients", (NODE, NETWORK), streams=True, moving=True),
    Rung("weight gradients, one stream", (NODE, NETWORK), moving=True),
)


class Waiting(Estimator):
    """An estimator with which compute waits for all collectives but those at the places `hidden`."""

    hidden: tuple[str, ...] = ()

    def _waits(self, *keys: Key) -> bool:
        collectives = [key for key in keys if isinstance(key, CollectiveKey)]
        return any((NETWORK if key.nodes > 1 else NODE) not in self.hidden for key in collectives)

    def pair(self, first: Key, second: Key) -> PairEstimate:
        found = super().pair(first, second)
        return dataclasses.replace(found, source=Source.MEASURED) if self._waits(first, second) else found

    @property
    def running(self) -> None:  # rates of the pairs of one launch setting suffice here
        return None

    def rates(self, first: Key, second: Key) -> tuple[float, float]:
        if not self._waits(first, second):
            return super().rates(first, second)
        first_rate, second_rate = (1.0 if isinstance(key, CollectiveKey) else MIN_RATE for key in (first, second))
        return first_rate, second_rate


@dataclass(frozen=True)
class WaitingModel(CostModel):
    """Costs with which compute waits for all collectives but those at the places `hidden`."""

    hidden: tuple[str, ...] = ()

    @cached_property
    def estimator(self) -> Estimator:
        made = Waiting(self.profile, self.hardware, self.setting)
        made.hidden = self.hidden
        return made


def compiled(system: System, rung: Rung, model: CostModel, preset_name: str, layers: int, gpu: str) -> HloModule:
    """The step of a rung."""
    import jax
    import optax

    from dhelix import strand_interleave
    from dhelix.models import make_train_step, preset

    shape = f"1x{system.gpus // system.per_node}x{system.per_node}"
    mesh = deviceless.mesh(dict(system.axes), gpu.lower(), shape)
    config = preset(preset_name, layers, seq=system.seq, vocab=32000)
    training = make_train_step(config, mesh, optax.adamw(1e-4), 4)
    arguments = training.abstract_state(), training.abstract_batch(4 * system.axes["dp"])
    if not rung.strands:
        lowered = jax.jit(training.train_step, donate_argnums=0).lower(*arguments)
    else:
        streams = (StreamAssignment(model.hardware),) if rung.streams else ()
        pinned = () if rung.moving else (PinnedWeightGradients(model.hardware, model),)
        passes = (*strand_passes(), *streams, *pinned, StrandPairing(model.hardware, model=model))
        step = strand_interleave(training.train_step, passes=passes, strict=True, donate_argnums=0)
        lowered = step.lower(*arguments)
    return compiled_module(deviceless.compile(lowered))


def shares(module: HloModule, step: Timeline, costs: Costs) -> dict[str, float]:
    """Shares of communication in the time of a step without any overlap, as in figure 3 of DHelix."""
    network = {i.name for computation in module.schedule for i in computation.instructions if costs[i].between_nodes}
    alone = {NODE: 0.0, NETWORK: 0.0}
    for collective in step.collectives:
        alone[NETWORK if collective.instruction in network else NODE] += collective.alone
    whole = step.compute_alone + sum(alone.values())
    return {place: round(seconds / whole, 3) for place, seconds in alone.items()}


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--preset", default="llama-25b")
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--gpu", default="H100")
    made.add_argument("--out", type=Path, default=Path("benchmark-output"))
    options = made.parse_args()
    deviceless.prepare_environment()
    ladders: dict[str, dict[str, Any]] = {}
    time_of: dict[str, dict[str, float]] = {}
    for system in SYSTEMS:
        name, base, found = f"{system.gpus} GPUs: {system.words}", 0.0, CostModel.find(options.gpu, "nvlink", "default")
        ladders[name] = {}
        for rung in RUNGS:
            model = WaitingModel(found.profile, found.setting, gpus_per_node=system.per_node, hidden=rung.hidden)
            module = compiled(system, rung, model, options.preset, options.layers, options.gpu)
            costs = model.costs()
            step = simulate_module(module, model.hardware, costs)
            if not rung.strands:
                base, time_of[name] = step.seconds, shares(module, step, costs)
            ladders[name][rung.name] = {
                "predicted ms": round(1e3 * step.seconds, 1),
                "times as fast as nothing": round(base / step.seconds, 3),
            }
        print(json.dumps({name: ladders[name], "share": time_of[name]}, indent=1), flush=True)
    report = {
        "on": {"gpu": f"{options.gpu}, on paper", "preset": options.preset, "layers": options.layers},
        "share of communication without overlap": time_of,
        "what may overlap, each with the one before": ladders,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    Path(options.out, "ladder.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
