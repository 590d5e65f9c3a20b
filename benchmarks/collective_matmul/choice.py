"""Predicts step times with strands, and with collective matmuls at no site, at all sites and at chosen sites.

    python benchmarks/collective_matmul/choice.py --profile my-h200-nvlink.json

A site is a collective next to the matrix product that it belongs to. No GPU is needed: the step is lowered for H200s,
and compiled up to XLA's schedule, under this process's launch setting. Times are simulated with the costs of a profile
that contains the step's operators (`dhelix profile`).
"""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

    from dhelix.passes.framework.manager import PassManager
    from dhelix.runtime.step.options import StepOptions
    from dhelix.runtime.step.target import Target

FORM = "auto"


def lowered_step(options: argparse.Namespace) -> "jax.stages.Lowered":
    from dhelix.runtime.compiler import deviceless

    deviceless.prepare_environment()
    import jax
    import optax

    from dhelix.models import make_train_step, preset

    config = preset(options.preset, layers=options.layers, seq=options.seq, vocab=options.vocab)
    mesh = deviceless.mesh({"dp": 1, "tp": options.tp})
    training = make_train_step(config, mesh, optax.adamw(1e-4), options.microbatches)
    batch = training.abstract_batch(options.microbatches)
    return jax.jit(training.train_step, donate_argnums=0).lower(training.abstract_state(), batch)


def rows(
    lowered: "jax.stages.Lowered", options: "StepOptions", target: "Target"
) -> Iterator[tuple[str, "PassManager"]]:
    """Names of the compared programs, and the passes that make them."""
    from dhelix.passes import jax_compat
    from dhelix.passes.framework.manager import PassManager
    from dhelix.runtime.step.collective_matmuls.jax_forms import collective_matmul_passes
    from dhelix.runtime.step.step_passes import pass_manager, weighed

    matmuls = collective_matmul_passes(jax_compat.devices(lowered), FORM, options=options.xla)
    yield "plain", PassManager(())
    yield "plain, collective matmuls", PassManager(matmuls)
    yield "strands, dp", pass_manager(options.but(collective_matmul="off"), target, lowered)
    yield "strands, dp, collective matmuls at all sites", pass_manager(options, target, lowered)
    paired = weighed(options, target, lowered, None)
    yield (
        f"strands, dp, chosen: all but {len(paired)} patterns at a place",
        pass_manager(options, target, lowered, paired=paired),
    )
    for placed in paired:
        print(f"stays: {placed.key}")


def target_of(lowered: "jax.stages.Lowered", options: "StepOptions") -> "Target":
    """The step's `Target`: GPUs and launch setting, with measured costs. Raises DhelixError if there are no costs."""
    from dhelix.errors import DhelixError
    from dhelix.runtime.step.target import Target

    target = Target.of(lowered, options)
    if target is None or target.model is None:
        raise DhelixError("no profile of these GPUs under this launch setting: give --profile")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 8), ("seq", 8192), ("tp", 2), ("microbatches", 4), ("vocab", 32000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--preset", default="llama-8b")
    parser.add_argument("--profile", default="auto", help="file with measured costs (default: the shipped one)")
    options = parser.parse_args()
    lowered = lowered_step(options)

    from dhelix.profiles.files import storage
    from dhelix.runtime.processes.launch_settings import NO_GRAPHS
    from dhelix.runtime.step.collective_matmuls.weighing import predicted
    from dhelix.runtime.step.options import AUTO, StepOptions

    profile = options.profile if options.profile == AUTO else storage.load(options.profile)
    chosen = StepOptions(profile=profile, compiler_options=dict(NO_GRAPHS), collective_matmul=FORM)
    target = target_of(lowered, chosen)
    model = target.model
    assert model is not None  # `target_of` ensures it
    print(f"launch setting {model.setting}, {model.profile.hardware} with link {model.profile.link}; predicted ms")
    for name, manager in rows(lowered, chosen, target):
        print(f"{1e3 * predicted(lowered, manager, model):8.1f}  {name}", flush=True)


if __name__ == "__main__":
    main()
