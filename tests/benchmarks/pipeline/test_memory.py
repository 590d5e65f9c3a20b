"""The study of pipelines' memory: the largest model, values computed from compiled steps, and tables."""

import dataclasses
from pathlib import Path

import pytest

from dhelix.benchmarks.pipeline import memory as pipeline_memory
from dhelix.benchmarks.pipeline.memory import (
    GIB,
    ONE,
    OWN_ENDS,
    PAPER,
    STEPS,
    Case,
    Largest,
    Need,
    W,
    both_ways,
    changes_of,
    largest_table,
    load,
    save,
    sharded,
    steps_table,
)

CASE = Case("4 GPUs", "llama-8b", 16, 4, 1, vocab=32_000, limit=100 * GIB)


def need(variant: str = W, layers: int = 16, gib_per_layer: float = 2.0, case: str = CASE.name) -> Need:
    """A need of 5 GiB and `gib_per_layer` for each layer, of which 0.75 is state, 0.25 gradients and 0.125 weights."""
    state, gradients, weights = (int(layers * part * GIB) for part in (0.75, 0.25, 0.125))
    peak = int((5 + gib_per_layer * layers) * GIB)
    rest = GIB
    residuals = peak - state - gradients - weights - rest
    return Need(case, variant, layers, layers / 4, peak, state, gradients, weights, residuals, rest, gradients)


def unchanged(given: Need) -> Need:
    return given


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The steps that `measure` was asked for. It returns a `need`."""
    asked: list[tuple[str, int]] = []

    def measure(case: Case, variant: str, layers: int) -> Need:
        asked.append((variant, layers))
        return need(variant, layers, 2.0 if variant == ONE else 2.02, case.name)

    monkeypatch.setattr(pipeline_memory, "measure", measure)
    return asked


def test_a_second_copy_takes_state_gradients_and_weights_of_the_layers() -> None:
    one, two = need(), both_ways(need())
    assert two.peak - one.peak == one.state + one.gradients + one.weights
    assert (two.state, two.gradients, two.weights) == (2 * one.state, 2 * one.gradients, 2 * one.weights)
    assert (two.residuals, two.rest) == (one.residuals, one.rest)


def test_state_that_is_split_over_data_parallelism_takes_its_share() -> None:
    one, four = need(), sharded(need(), 4)
    assert four.state == one.state // 4
    assert four.peak == one.peak - one.state + one.state // 4
    assert list(changes_of(CASE)) == [""]
    assert list(changes_of(PAPER)) == ["", "state split over DP 4"]


def test_the_largest_model_is_compiled(compiled: list[tuple[str, int]]) -> None:
    largest = Largest(CASE)
    largest.search(ONE, unchanged)
    assert largest.in_steps(ONE, unchanged).layers == 40  # 5 + 2 * 40 = 85 GiB; 48 layers need 101 GiB
    assert largest.on_line(ONE, unchanged) == pytest.approx(47.5)
    asked = len(compiled)
    Largest(CASE, largest.needs).search(ONE, unchanged)  # known sizes are not compiled again
    assert len(compiled) == asked


def test_sizes_between_layers_are_counted_in_parameters() -> None:
    largest = Largest(CASE)
    whole = CASE.config(40).parameter_count / 1e9
    assert largest.billions(40) == pytest.approx(whole)
    assert largest.billions(40.5) - whole == pytest.approx((CASE.config(41).parameter_count / 1e9 - whole) / 2)


def test_tables(compiled: list[tuple[str, int]]) -> None:
    largest = Largest(CASE)
    for variant, change in ((ONE, unchanged), (W, unchanged), (W, both_ways)):
        largest.search(variant, change)
    rows = largest_table([CASE], largest.needs).splitlines()[2:]
    assert [row.split(" | ")[1] for row in rows] == ["1F1B", "W", "bidirectional"]
    assert rows[0].endswith("| 47.5, 10.62 B | 100.0% |")
    assert "| 47.0, 10.5" in rows[1]
    table = steps_table([need(W, case=STEPS.name), need(ONE, gib_per_layer=1.9), need(OWN_ENDS)])
    assert "| W, xla | 37.00 | +4.5% | 12.00 | 4.00 | 2.00 |" in table


def test_results_survive_a_file(tmp_path: Path) -> None:
    some = [need(), dataclasses.replace(need(ONE), compile_s=3.5)]
    save(tmp_path / "a.json", some)
    assert load(tmp_path / "a.json") == some


@pytest.mark.slow
@pytest.mark.deviceless
def test_parts_of_a_compiled_step_add_up() -> None:
    small = Case("small", "llama-8b", 8, 2, 2, microbatches=4, vocab=1024, seq=1024)
    found = pipeline_memory.measure(small, W, 8)
    assert found.peak == found.state + found.gradients + found.weights + found.residuals + found.rest
    assert min(found.state, found.gradients, found.residuals, found.rest) > 0
    assert found.state == pytest.approx(3 * found.gradients, rel=0.01)
