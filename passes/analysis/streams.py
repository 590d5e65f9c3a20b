"""The communication stream on which XLA runs an asynchronous collective.

    start = async-start(x), frontend_attributes={_xla_stream_annotation="1"}

Collectives on one stream run one after the other, in launch order. Collectives on different streams may run at the same
time. XLA uses stream 0 for all collectives without the attribute. (With the option
`xla_gpu_experimental_enable_collective_multi_streaming`, XLA assigns the streams in turn. It does not consider
which links the collectives use.)
"""

from dhelix.passes.hlo import Instruction

_STREAM = "_xla_stream_annotation"
STREAMS = 2
"""Number of streams that dhelix uses: one for the links in a node, one for the network between nodes."""


def stream_of(start: Instruction) -> int:
    """The number of the stream on which the collective of `start` runs."""
    said = start.proto.frontend_attributes.map.get(_STREAM, "")
    return int(said) if said.isdecimal() else 0


def put_on_stream(start: Instruction, stream: int) -> None:
    start.proto.frontend_attributes.map[_STREAM] = str(stream)
