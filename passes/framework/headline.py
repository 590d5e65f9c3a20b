"""The outcome of a step in a few lines: the changes, the predicted gain and its certainty, and the compile time.

    jit_train_step: two strands over 8 layers, 4 micro-batches
      predicted step time 294.7 ms -> 271.0 ms (1.09 x as fast), compared with the same micro-batched step without
      passes (DHELIX=off)
      changes: exposed communication -34.7 ms, lower clock +14.3 ms, copies -7.9 ms, slow-down from overlap +6.4 ms
      where the time goes: kernels 214.2 ms, lower clock 31.1 ms, exposed communication 11.7 ms (...)
      peak memory 16.14 GiB -> 15.72 GiB (0.97 x, by live ranges)
      costs from the profile of H200 with link nvlink, launch setting default
      to try: launch setting NCCL_CTA_POLICY=2 CUDA_DEVICE_MAX_CONNECTIONS=1, usually the fastest over nvlink ...
      first step: compiled in 14.9 s, of which dhelix took 5.0 s

If the gain is not predicted, a line says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dhelix.passes.analysis.names import INSIDE
from dhelix.passes.framework import fingerprint
from dhelix.passes.framework.gain import MANY_GUESSES, Gain, guesses
from dhelix.passes.framework.units import milliseconds
from dhelix.profiles.profile import FASTEST, SETTINGS

if TYPE_CHECKING:
    from dhelix.passes.framework.report import Report

# If the collectives of the changed step take more than this many times as long as the plain step's collectives, XLA's
# partitioner must have sharded the strands differently. Each collective counts with the time that it takes alone.
_SENT_MORE = 1.25
_LAYERS = re.compile(r" x (\d+)$")


def headline(found: Report) -> list[str]:
    """The lines of the headline. The first line names the step and its outcome; the other lines give details."""
    name = fingerprint.unmark(found.module)
    if found.left_alone or not found.changed:
        why = found.left_alone or _why_unchanged(found)
        if not found.left_alone and not any(entry.ran for entry in found):
            return [f"{name}: no pass ran: each {why}", *_first_step(found)]
        advice = [] if found.gain is None else _to_try(found.gain, left_alone=True)
        return [f"{name} runs unchanged: {why}", *filter(None, [found.settings]), *advice, *_first_step(found)]
    lines = [f"{name}: {_changed(found)}"]
    if found.gain is not None:
        lines.append(f"{found.gain.time()}, compared with the same micro-batched step without passes (DHELIX=off)")
        lines += [found.gain.why(), found.gain.left(), found.gain.memory(), guesses(found.gain.after)]
        lines += _to_try(found.gain)
    else:
        lines.append(f"gain not predicted: {_why_unknown(found)}")
    return [*lines, *filter(None, [found.settings]), *_first_step(found)]


def text(found: Report) -> str:
    return "\n  ".join(headline(found))


def _changed(found: Report) -> str:
    notes = (note for entry in found for note in entry.notes if note.message == "two strands")
    strands = next((note for note in notes if "merged_loops" in note.facts), None)
    if strands is None:
        return f"changed by {', '.join(entry.name for entry in found if entry.changed)}"
    loops = [str(loop) for loop in strands.facts["merged_loops"]]
    layers = [match[1] for loop in loops if not loop.startswith(INSIDE) and (match := _LAYERS.search(loop))]
    unit = "layer" if set(layers) == {"1"} else "layers"
    over = f" over {' and '.join(dict.fromkeys(layers))} {unit}" if layers else f" ({_why_no_layers(found)})"
    count = strands.facts.get("microbatches")
    return f"two strands{over}, {'an unknown number of' if count is None else count} micro-batches"


def _why_no_layers(found: Report) -> str:
    said = "no layer loops merged"
    messages = (note.message for entry in found for note in entry.notes)
    return next((message for message in messages if message.startswith(f"{said}: ")), said)


def _why_unchanged(found: Report) -> str:
    told = sorted(found, key=lambda entry: entry.unchanged)  # passes that refused, failed or did not run come first
    return next((note.message for entry in told for note in entry.notes), "no pass found anything to do")


def _why_unknown(found: Report) -> str:
    later = [entry for entry in found if entry.stage == "post-scheduler"]
    if not later:
        return "a preview does not compile the step; call report"
    if not any(entry.ran for entry in later):
        return "a prediction needs a compilation for GPUs; docs/guide/your_step.md shows how to compile without GPUs"
    return "the plain step's schedule is unknown"


def _to_try(gain: Gain, left_alone: bool = False) -> Iterator[str]:
    """Yields at most one line of advice. The advice may make the step faster, or its predicted time more certain."""
    before, after, advice = gain.before, gain.after, []
    if before.sent and after.sent > _SENT_MORE * before.sent:
        sent = f"communication alone {milliseconds(before.sent)} -> {milliseconds(after.sent)}"
        advice.append(
            "`jax.lax.with_sharding_constraint` on the input of every layer, because XLA's partitioner shards "
            f"the strands differently ({sent})"
        )
    if 1.0 <= gain.ratio and not left_alone:
        advice.append("DHELIX=off, because no gain is predicted")
    best = SETTINGS.get(FASTEST.get(after.link, ""))
    # Costs are assumed only between nodes. With several nodes, another setting may be faster.
    if best is not None and best.name != after.setting and not after.assumed:
        flags = f" XLA_FLAGS='{' '.join(best.training_flags)}'" if best.training_flags else ""
        start = " ".join(f"{name}={value}" for name, value in best.environment.items())
        advice.append(
            f"launch setting {start}{flags}, usually the fastest over {after.link} (`dhelix plan DUMP` compares them)"
        )
    if after.assumed:
        advice.append("`dhelix profile` over two nodes, to measure the assumed costs")
    if max(after.guessed, after.guessed_overlap) > MANY_GUESSES:
        advice.append("`dhelix profile` of this step, to measure the guessed costs")
    if advice:
        yield f"to try: {'; '.join(advice)}"


def _first_step(found: Report) -> Iterator[str]:
    took = found.plain_seconds + sum(stage.seconds for stage in found.stages if not stage.stored)
    compiled = (stage for stage in found.stages if stage.stage != "lowered")
    stored = " (from the compilation cache)" if any(stage.stored for stage in compiled) else ""
    if found.compile_seconds:
        yield f"first step: compiled in {found.compile_seconds:.1f} s{stored}, of which dhelix took {took:.1f} s"
