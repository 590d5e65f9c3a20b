"""Buffers of messages: a sent buffer stays where it is, and the `-done` returns the received buffer."""

from dhelix.passes.analysis.buffers import Buffers
from dhelix.passes.hlo import HloModule

TEXT = """HloModule m, is_scheduled=true, num_partitions=2

ENTRY main {
  a = f32[1024] parameter(0)
  n = f32[1024] negate(a)
  tok = token[] after-all()
  s = (f32[1024], u32[], token[]) send(n, tok), channel_id=1
  r = (f32[1024], u32[], token[]) recv(tok), channel_id=1
  rd = (f32[1024], token[]) recv-done(r), channel_id=1
  sd = token[] send-done(s), channel_id=1
  g = f32[1024] get-tuple-element(rd), index=0
  ROOT x = f32[1024] add(g, n)
}
"""


def test_messages_read_what_they_send_and_write_what_they_receive() -> None:
    module = HloModule.from_text(TEXT)
    buffers = Buffers(module.entry)
    by_name = {i.name: i for i in module.entry.instructions}
    (sent,), (received,) = buffers.leaves(by_name["n"]), buffers.leaves(by_name["g"])
    assert buffers.leaves(by_name["s"])[0] == sent
    assert buffers.leaves(by_name["r"])[0] == received != sent
    assert buffers.size(received) == 4096
    sends, receives = buffers.accesses[by_name["s"]], buffers.accesses[by_name["r"]]
    assert sent in sends.reads and sent not in sends.writes
    assert received in receives.writes
    order = buffers.order_edges(module.schedule[module.entry])
    assert (by_name["r"], by_name["rd"]) in order
