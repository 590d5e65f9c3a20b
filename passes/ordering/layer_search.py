"""Orders long bodies, such as unrolled layers, layer by layer.

One table of equation 2 (`pairing_table.py`) for all operators would be too large. So each column has its own table:

    forward     | layer 0     | layer 1     | layer 2     |
    backward    | layer 2     | layer 1     | layer 0     |

1. Each strand is cut where its operators repeat. The layer length is the most common distance between two operators of
   the same kind (same key, lane and seconds). The m-th layer of one strand is paired with the m-th layer of the other
   strand, because the pass `strand-lockstep` ties these two together. A strand without repetition counts as one layer.
   A column may hold several layers or a part of a layer, so that it has a suitable number of operators.
2. Each column is searched like a short body, from idle lanes to idle lanes. Columns whose operators have the same kinds
   and the same needs share a solution.
3. The search then improves windows. A window reaches from the middle of one column to the middle of the next, so the
   cuts between columns do not act as barriers. Windows that look alike share a solution, too.

Cost: linear in the number of operators. A bounded number of columns is searched. The other columns are ordered
greedily.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.roofline_costs import Cost
from dhelix.passes.hlo import Instruction
from dhelix.passes.hlo.graph import CONTROL_FLOW
from dhelix.passes.ordering.order_rules import Limits
from dhelix.passes.ordering.order_search import Order, OrderSearch, needed_of
from dhelix.passes.ordering.strand_sequences import Body, Operator

_SHORTEST, _LONGEST = 24, 72  # least and most operators of both strands in a column
_SEARCHED = 8  # the largest number of searched columns, and of searched windows
_WINDOW_WORK = 2_000  # effort for the improvement of a window (`OrderTiming.work`)

Solver = Callable[[OrderSearch, Sequence[Operator], Sequence[Operator]], Order]


def orders_by_layer(body: Body, costs: Mapping[Instruction, Cost], limits: Limits, solve: Solver) -> list[Order]:
    """Returns two orders of the whole body: the searched columns in a row, and the same with improved windows.

    A window reaches from the middle of one column to the middle of the next.

    Args:
      solve: searches the order of a column, given the column's operators of each strand.
    """
    alike = _Alike(body, costs)
    columns: list[int] = []
    middles: list[int] = []
    # 1. Cut both strands into columns, and 2. search each column.
    for first, second in _columns(body, alike.kinds):
        strands = [[body.operators[n] for n in part] for part in (first, second)]

        def search(numbers: Order, is_new: bool, strands: list[list[Operator]] = strands) -> Order:
            found = OrderSearch(body, costs, limits, numbers)
            return solve(found, *strands) if is_new else found.segment(*strands)[1]

        order = alike.solved((*first, *second), len(first), search)
        middles.append(len(columns) + len(order) // 2)
        columns += order

    def improve(numbers: Order, is_new: bool) -> Order:
        found = OrderSearch(body, costs, limits, numbers)
        return found.improve(found.fitting([numbers])[0], _WINDOW_WORK) if is_new else numbers

    # 3. Improve the windows from middle to middle.
    windows = columns[: middles[0]]
    for begin, end in zip(middles, [*middles[1:], len(columns)], strict=True):
        windows += alike.solved(tuple(columns[begin:end]), -1, improve)
    return [tuple(columns), tuple(windows)]


class _Alike:
    """Solutions of groups of operators. Groups that look alike share a solution."""

    def __init__(self, body: Body, costs: Mapping[Instruction, Cost]) -> None:
        self.body = body
        found: dict[object, int] = {}
        self.kinds: list[int] = []
        for operator, head in zip(body.operators, body.heads, strict=True):
            key = costs.key(head) if isinstance(costs, Costs) else None
            own = operator.number if head.opcode in CONTROL_FLOW else None
            kind = key, own, operator.lane, operator.seconds, operator.light
            self.kinds.append(found.setdefault(kind, len(found)))
        self.known: dict[object, Order] = {}
        self.searched: Counter[int] = Counter()

    def solved(self, numbers: Order, what: int, search: Callable[[Order, bool], Order]) -> Order:
        """The order of the group `numbers`, from `search(numbers, is_new)` or from a group that looks alike.

        `is_new` is False once enough groups of this sort (columns or windows) were searched.

        Args:
          what: for a column, its number of operators of the first strand; -1 for a window.
        """
        place = {n: k for k, n in enumerate(numbers)}
        needs = (tuple(sorted(place[m] for m in self.body.operators[n].needs if m in place)) for n in numbers)
        like = what, tuple((self.kinds[n], need) for n, need in zip(numbers, needs, strict=True))
        if like not in self.known:
            is_window = int(what < 0)
            is_new = self.searched[is_window] < _SEARCHED
            self.searched[is_window] += 1
            self.known[like] = tuple(place[n] for n in search(numbers, is_new))
        return tuple(numbers[k] for k in self.known[like])


def _columns(body: Body, kinds: Sequence[int]) -> list[tuple[Order, Order]]:
    """The operators of both strands in each column. A column needs only operators of its own and of earlier columns."""
    first, second = body.first.operators, body.second.operators
    starts, lengths = zip(*(_layers([kinds[o.number] for o in strand]) for strand in (first, second)), strict=True)
    together = sum(lengths)
    scale = max(-(-_SHORTEST // together), 1) if together < _SHORTEST else 1.0 / -(-together // _LONGEST)
    of_second, of_first = needed_of(first, second), needed_of(second, first)
    columns: list[tuple[Order, Order]] = []
    i = j = m = 0
    while (i, j) != (len(first), len(second)):
        m += 1
        i_end = min(int(starts[0] + m * scale * lengths[0]), len(first))
        j_end = min(int(starts[1] + m * scale * lengths[1]), len(second))
        while (closed := (max(i_end, of_first[j_end]), max(j_end, of_second[i_end]))) != (i_end, j_end):
            i_end, j_end = closed
        i_end, j_end = max(i, i_end), max(j, j_end)
        if (i, j) != (i_end, j_end):
            columns.append((tuple(o.number for o in first[i:i_end]), tuple(o.number for o in second[j:j_end])))
        i, j = i_end, j_end
    return columns


def _layers(kinds: Sequence[int]) -> tuple[int, int]:
    """Returns the index of the first operator that repeats, and the number of operators per layer.

    If too few operators repeat, all of them form one layer.
    """
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for place, kind in enumerate(kinds):
        if kind in last:
            distances[place - last[kind]] += 1
        last[kind] = place
    length = max(distances, key=lambda d: (distances[d], d), default=0)
    same = [n for n in range(len(kinds) - length) if kinds[n] == kinds[n + length]]
    if not length or 2 * len(same) < len(kinds) - length:
        return 0, len(kinds)
    return same[0], length
