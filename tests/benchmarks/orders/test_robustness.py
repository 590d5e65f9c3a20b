"""Changed times of the instructions of a body, and the table."""

from dhelix.benchmarks.orders.robustness import Change, Row, changed, table
from dhelix.passes.evaluation.costs import Costs
from dhelix.profiles.hardware import H200
from dhelix.tests.passes.schedules import Done, Op, Start, build


def test_collectives_take_longer_and_all_else_what_noise_says() -> None:
    module, given = build([Op("f", 1e-3, ("p",)), Start("g", 4e-3, "f"), Done("g")], ["g_done"])

    def times(change: Change, seed: int = 0) -> dict[str, float]:
        costs = Costs(H200)
        costs.update(given)
        sequence = module.schedule[module.entry]
        found = changed(costs, sequence, change, seed)
        return {i.name: found[i].seconds for i in sequence}

    plain, slower = times(Change()), times(Change(1.5))
    assert (slower["f"], slower["g"]) == (plain["f"], 1.5 * plain["g"])
    noisy = times(Change(noise=0.1))
    assert noisy["f"] != plain["f"] and all(abs(noisy[n] - plain[n]) <= 0.1 * plain[n] for n in plain)
    assert times(Change(noise=0.1)) == noisy != times(Change(noise=0.1), seed=1)


def test_gains_of_a_body_stand_in_a_line() -> None:
    rows = [Row("tiny", "nvlink", "default", change.name, 12.0, 11.0, 10.0) for change in (Change(), Change(1.15, 0.2))]
    assert table(rows).splitlines() == [
        "| body | link, setting | as in the profile | collectives x 1.15, noise 20% |",
        "|---|---|---|---|",
        "| tiny | nvlink, default | 10.0% (20.0%) | 10.0% (20.0%) |",
    ]
