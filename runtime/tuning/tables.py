"""Writes the table of the NCCL tuner plugin: for each communicator, the settings of all its collectives in a step.

    sequence
    1 2 67108864 1 2 4 0          once: all-gather, 64 MiB, ring, Simple, 4 channels, NCCL's chunks
    1 3 67108864 -1 -1 0 0        once: reduce-scatter, 64 MiB, as NCCL has it

`nccl_tuner.c` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from dhelix.passes.hlo import HloModule, Instruction
from dhelix.passes.tuning.launch_order import Question, sequences
from dhelix.profiles.channels.nccl_setting import ALGORITHMS, PROTOCOLS, NcclSetting
from dhelix.runtime.tuning.plugin import FUNCTIONS

_NCCLS = NcclSetting()


def table(module: HloModule, settings: Mapping[Instruction, NcclSetting]) -> str:
    """The table for a scheduled program. Collectives that are not in `settings` run as NCCL has it.

    Communicators whose collectives have no setting are in it, too, so that NCCL's questions about them are recognized.
    """
    parts = []
    for sequence in sequences(module).values():
        lines = (_line(question, settings.get(question.instruction, _NCCLS)) for question in sequence)
        parts.append("\n".join(["sequence", *(f"{len(list(same))} {line}" for line, same in groupby(lines))]))
    return "\n".join(parts)


def _line(question: Question, setting: NcclSetting) -> str:
    algorithm = ALGORITHMS.index(setting.algorithm) if setting.algorithm else -1
    protocol = PROTOCOLS.index(setting.protocol) if setting.protocol else -1
    function = FUNCTIONS.index(question.kind)
    return f"{function} {question.bytes} {algorithm} {protocol} {setting.channels} {setting.chunk}"
