"""`dhelix plan` for a dump of two strands, and for a preset that is compiled without a GPU."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console

from dhelix.launch import cli
from dhelix.launch.inspect.reading.dumps import Memory
from dhelix.launch.plan import command as plan_command
from dhelix.launch.plan import picture as plan_picture
from dhelix.launch.plan import program as plan_program
from dhelix.launch.plan import tables as plan_tables
from dhelix.launch.plan.program import Program
from dhelix.launch.plan.search import Candidate, MemoryLimit, OverLimitError, search, with_room
from dhelix.launch.plan.tables import PlanView
from dhelix.launch.profile import step as profile_step
from dhelix.launch.train import trainer
from dhelix.passes.analysis.buffers import Memory as LiveMemory
from dhelix.passes.evaluation.costs import CostModel
from dhelix.passes.evaluation.step_parts import step_parts
from dhelix.passes.framework.gain import Gain
from dhelix.passes.hlo import HloModule
from dhelix.passes.ordering.order_rules import most_in_flight
from dhelix.passes.plans import plan_files
from dhelix.profiles.profile import Profile, Section
from dhelix.runtime.compiler import deviceless, scheduled_only
from dhelix.runtime.step.options import StepOptions
from dhelix.tests.passes import strand_module
from dhelix.tests.passes.two_strands import TOGETHER

RunPlan = Callable[..., Any]

# The profile is empty, so times are the roofline's and rates are the hardware's. With these, overlap gains time on a
# link without peer-to-peer.
DP = StepOptions()
MODEL = CostModel(Profile("H200", "no-p2p").with_section(Section("default")))


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    path = tmp_path / "module_0001.jit_step.sm_9.0a_gpu_after_optimizations.txt"
    path.write_text(strand_module.text())
    return path


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunPlan:
    """Runs `dhelix plan`; returns status, stdout and stderr."""
    monkeypatch.setenv("DHELIX_PROFILES", str(tmp_path))

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["plan", *map(str, arguments)])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err  # type: ignore[return-value]

    return run


def test_a_gpu_like_the_one_that_was_profiled(dump: Path, plan: RunPlan) -> None:
    flags = dump, "--settings=connections1", "--json"
    profiled, like = (json.loads(plan(*flags, f"--hardware={gpu}")[1]) for gpu in ("H200", "H100"))
    assert (profiled["hardware"], like["hardware"]) == ("H200", "H100")
    assert like["guessed_fraction"] == pytest.approx(profiled["guessed_fraction"], abs=0.05)
    assert "are taken from the H200" in " ".join(plan(*flags, "--hardware=H100")[2].split())


def test_a_preset_for_a_gpu_that_nobody_described(plan: RunPlan) -> None:
    status, _, error = plan("--preset=llama-8b", "--hardware=A100")
    assert status == 1 and "no profile of A100" in error


def test_json_of_a_dump(dump: Path, plan: RunPlan, tmp_path: Path) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    status, text, progress = plan(
        dump,
        "--link=no-p2p",
        "--settings=default,connections1",
        "--json",
        "--bound",
        f"--out={out}",
        f"--picture={picture}",
    )
    found = json.loads(text)
    assert status == 0 and "connections1 is planned" in progress
    for name in ("makespan_us", "compute_us", "communication_us", "solve_seconds"):
        assert found[name] > 0.0
    for name in ("hidden_fraction", "guessed_fraction"):
        assert 0.0 <= found[name] <= 1.0
    assert [c["setting"] for c in found["candidates"]] == ["default", "connections1"]
    assert found["makespan_us"] == pytest.approx(min(c["makespan_us"] for c in found["candidates"]), abs=0.01)
    assert set(found["memory"]) >= {"plain", "interleaved", "limit"} and found["unknown_loops"] == []
    gathers = [(c["kind"], c["lane"], c["bytes"], c["runs"]) for c in found["collectives"]]
    assert gathers == [("all-gather", "comm", 32 << 20, 1)] * 2
    for row in found["collectives"]:
        assert row["time_us"] == pytest.approx(row["hidden_us"] + row["exposed_us"], abs=0.1)
        assert sum(b["us"] for b in row["beneath"]) == pytest.approx(row["hidden_us"], abs=0.1)
    (bound,) = found["bounds"]
    assert (
        0.5 * bound["order_us"]
        < bound["bound_us"]
        <= bound["order_us"]
        == pytest.approx(found["makespan_us"], rel=0.01)
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = plan_files.load(out)
    assert written.target.setting == found["setting"] and written.target.link == "no-p2p"
    assert written.bodies[0].name == "both strands: 2 collectives, 5 products"


def test_tables_of_a_dump(dump: Path, plan: RunPlan) -> None:
    status, text, _ = plan(dump, "--link=no-p2p", "--settings=connections1", "--top=1", "--bound")
    assert status == 0
    for words in (
        "One step under each launch setting",
        "Collectives under launch setting connections1",
        "and 1 more",
        "beta gemm",
    ):
        assert words in text
    assert "Operators that run together: both strands" in text and "could save at most" in text
    assert "Start the process with CUDA_DEVICE_MAX_CONNECTIONS=1" in text


def test_a_plan_knows_which_collectives_leave_a_node(dump: Path, plan: RunPlan, tmp_path: Path) -> None:
    """The dump's collectives span four GPUs."""
    out = tmp_path / "plan.json"
    for flags, gpus_per_node, leave in (
        ((), 8, {False}),
        (("--gpus_per_node=2",), 2, {True}),
        (("--link=two-nodes",), 2, {True}),
        (("--link=two-nodes", "--gpus_per_node=4"), 4, {False}),
    ):
        status, text, _ = plan(dump, "--settings=default", "--json", f"--out={out}", *flags)
        assert status == 0 and {c["between_nodes"] for c in json.loads(text)["collectives"]} == leave
        assert plan_files.load(out).target.gpus_per_node == gpus_per_node


def test_what_nobody_measured_between_nodes_is_said_and_can_be_set(dump: Path, plan: RunPlan) -> None:
    flags = dump, "--settings=default", "--gpus_per_node=2"
    usual, slow = (plan(*flags, *more)[1] for more in ((), ("--inter_bandwidth=5",)))
    assert "assumed: 45 GB/s per GPU between nodes of 2 GPUs (--inter_bandwidth, --gpus_per_node)" in usual
    assert "assumed: 5 GB/s per GPU between nodes of 2 GPUs" in slow
    status, text, _ = plan(dump, "--settings=default", "--inter_bandwidth=5")
    assert status == 0 and "assumed" not in text and "--inter_bandwidth has no effect" in text


def test_a_profile_of_another_jax_is_said(dump: Path, plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "measured with jax" not in plan(dump, "--settings=default")[1]
    monkeypatch.setattr(jax, "__version__", "0.13.1")
    assert "was measured with jax 0.11.2, not 0.13.1: XLA may compile" in plan(dump, "--settings=default")[1]


def test_where_results_cannot_be_written_nothing_is_planned(dump: Path, plan: RunPlan, tmp_path: Path) -> None:
    for flag, said in (
        (f"--out={tmp_path / 'no' / 'a.json'}", "a folder that exists"),
        ("--picture=a.jpg", "are PNG files"),
    ):
        status, _, error = plan(dump, flag)
        assert status != 0 and said in error and "is planned" not in error


def test_a_step_that_no_card_holds(capsys: pytest.CaptureFixture[str]) -> None:
    step = program(Memory(150 << 30, 0, 0, 0, "a test"))
    found = search(step, MODEL, DP, MemoryLimit(200 << 30))
    parts = step_parts(found.module, found.costs)
    view = PlanView(found, (found,), Gain(parts, parts), None, None, step.memory, MemoryLimit(200 << 30))
    plan_tables.print_view(view, Console(width=200), top=1)
    text = " ".join(capsys.readouterr().out.split())
    assert "GiB of one H200: use more GPUs" in text
    assert "skew" not in text and "decomposed" not in text


def program(memory: Memory | None = None) -> Program:
    return Program("two strands", HloModule.from_text(strand_module.text()).to_bytes(), 4, "H200", memory)


def test_what_is_predicted_is_what_the_plan_gives() -> None:
    found = search(program(), MODEL, DP, MemoryLimit(None))
    assert found.seconds < found.seconds_xla
    assert found.plan.predicted.makespan_us == pytest.approx(1e6 * found.seconds)
    assert sum(s.predicted_us for s in found.plan.bodies[0].segments) == pytest.approx(1e6 * found.seconds, rel=1e-4)


def test_a_plan_keeps_to_how_many_collectives_may_be_in_flight() -> None:
    """The limit also holds when the plan is carried out. XLA's order has two collectives in flight and is faster."""
    step = replace(program(), module=HloModule.from_text(TOGETHER).to_bytes())
    found = search(step, MODEL, StepOptions(max_in_flight=1), MemoryLimit(None))
    assert most_in_flight(found.module.schedule[found.module.entry], found.costs) == 1
    assert found.plan.order.max_in_flight == 1
    assert found.seconds > found.seconds_xla == search(step, MODEL, DP, MemoryLimit(None)).seconds


def test_the_picture_has_both_strands_and_what_they_send() -> None:
    found = search(program(), MODEL, DP, MemoryLimit(None))
    drawn = plan_picture.picture(found)
    assert "predicted, not run" in drawn.title
    before, after = drawn.panels
    assert "in the order of the dump: one of 1 iterations" in before.heading and "After: one of 1 " in after.heading
    assert before.end == pytest.approx(1e6 * found.seconds_xla, rel=1e-4)
    assert {after.row(b) for b in after.blocks} == {"alpha compute", "alpha send", "beta compute", "beta send"}
    assert {b.shape for b in after.blocks} >= {"4096×4096×4096", "32 MiB"}
    assert len(after.marks) == len(found.plan.bodies[0].segments)
    assert after.end == pytest.approx(1e6 * found.seconds, rel=1e-4)
    compute = sorted((b.start, b.end) for b in after.blocks if not b.sends)
    assert all(end <= start + 1e-6 for (_, end), (start, _) in zip(compute, compute[1:], strict=False))
    assert any(b.end - b.start > 1.05 * b.alone for b in after.blocks)  # the picture shows the slow-down


def test_a_plan_keeps_within_the_users_limit_or_the_plain_steps_memory_and_3_percent() -> None:
    step = program(Memory(1 << 30, 0, 0, 1 << 28, "test"))
    assert MemoryLimit.of(None, None).of_program(step) is None
    assert MemoryLimit.of(None, step).bytes == int(1.03 * (1.25 * 2**30))
    frugal = program(Memory(1 << 30, 0, 0, 1 << 20, "test"))
    for limit, words in (
        (MemoryLimit.of(1 << 30, None), "at most --memory_limit=1GiB; "),
        (MemoryLimit.of(None, frugal), r"at most 1\.03 GiB \(the plain step's memory plus 3%\); "),
    ):
        said = f"{words}the smallest sufficient limit is --memory_limit="
        with pytest.raises(OverLimitError, match=said) as refused:
            search(step, MODEL, DP, limit)
        assert search(step, MODEL, DP, MemoryLimit.of(refused.value.needed, None)).plan.bodies


def test_where_the_gpu_has_room_the_usual_limit_makes_way() -> None:
    step, said = program(Memory(1 << 30, 0, 0, 1 << 28, "test")), list[str]()
    frugal = program(Memory(1 << 30, 0, 0, 1 << 20, "test"))
    usual = MemoryLimit.of(None, frugal)

    def planned(limit: MemoryLimit) -> Candidate:
        return search(step, MODEL, DP, limit)

    found, limit = with_room(planned, usual, 1 << 40, said.append)
    assert found.plan.bodies and limit.bytes is not None and limit.bytes > (usual.bytes or 0)
    assert len(said) == 1 and "the GPU has room" in said[0]
    for refused, room in ((usual, 1 << 20), (replace(usual, given=True), 1 << 40)):
        with pytest.raises(OverLimitError):
            with_room(planned, refused, room, said.append)


def test_gaps_between_buffers_are_kept_free() -> None:
    """In XLA's order, the compiler counts more than the live ranges. In any order, this difference stays free."""
    estimate = search(program(), MODEL, DP, MemoryLimit(None)).bytes_xla
    step = program(Memory(1 << 30, 0, 0, estimate + 5000, "test"))
    arguments = LiveMemory(HloModule.from_bytes(step.module)).arguments
    assert MemoryLimit((1 << 31) + 5000).of_program(step) == (1 << 30) + arguments


def test_the_compiler_has_the_last_word_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest plan that fits by the compiler's count is chosen."""
    fast = search(program(), MODEL, DP, MemoryLimit(None))
    slow = search(program(), MODEL, DP, MemoryLimit(None))
    slow = replace(slow, timeline=replace(slow.timeline, seconds=1.0))
    counted = {id(fast.plan): 1 << 31, id(slow.plan): 1 << 30}
    monkeypatch.setattr(
        plan_command.plan_step, "confirmed", lambda _, plan, target: Memory(counted[id(plan)], 0, 0, 0, "test")
    )
    options, console = trainer.Options(), Console(file=io.StringIO(), width=400)

    def again(candidate: Candidate, limit: MemoryLimit) -> Candidate:
        raise OverLimitError(candidate.program, limit, 1 << 31)

    def confirmed(gib: float) -> tuple[Candidate, Memory]:
        with plan_command._Work(console, 2) as work:
            return plan_command._confirmed(
                [slow, fast], again, options, MemoryLimit.of(int(gib * 2**30), None), work, console
            )[1:]

    assert fast.seconds < slow.seconds
    assert confirmed(2.0)[0] is fast
    assert confirmed(1.5) == (slow, Memory(1 << 30, 0, 0, 0, "test"))
    assert "the smallest sufficient limit is --memory_limit=2GiB " in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(OverLimitError, match="--memory_limit=1GiB "):
        confirmed(0.5)


def test_what_the_compiler_says_to_be_over_the_limit_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan over the limit is made again, at most twice, with as much memory left free as the compiler's gaps take."""
    step = program(Memory(1 << 30, 0, 0, 1 << 28, "test"))
    first = search(step, MODEL, DP, MemoryLimit(None))
    allowed: list[int | None] = []

    def confirmed(gaps: Sequence[int]) -> Candidate:
        counted = iter(Memory(1 << 30, 0, 0, first.bytes + one, "test") for one in gaps)
        monkeypatch.setattr(plan_command.plan_step, "confirmed", lambda *_: next(counted))

        def again(candidate: Candidate, limit: MemoryLimit) -> Candidate:
            allowed.append(limit.of_program(step))
            return replace(first, solve_seconds=float(len(allowed)))

        console, limit = Console(file=io.StringIO()), MemoryLimit((1 << 30) + first.bytes + 1000)
        with plan_command._Work(console, 2) as work:
            candidates, best, _ = plan_command._confirmed([first], again, trainer.Options(), limit, work, console)
        assert candidates == [best]
        return best

    assert confirmed([1001, 5000, 1000]).solve_seconds == 2.0
    arguments = LiveMemory(HloModule.from_bytes(step.module)).arguments
    assert allowed == [arguments + first.bytes + 1000 - gap for gap in (1001, 5000)]
    with pytest.raises(OverLimitError):
        confirmed([1001, 5000, 1001, 1000])


def test_a_candidate_over_the_limit_does_not_hide_another() -> None:
    """All-to-alls take additional memory. A step that fits only without them is planned without them."""
    small, large = (program(Memory(arguments, 0, 0, 1 << 28, "test")) for arguments in (1 << 30, 1 << 31))
    console = Console(file=io.StringIO(), width=400)
    find = functools.partial(search, options=DP, limit=MemoryLimit.of(3 << 29, None))

    def candidates(*programs: Program) -> list[Candidate]:
        with plan_command._Work(console, 2) as work:
            return plan_command._candidates([(MODEL, p) for p in programs], find, work, console)

    (one,) = candidates(large, small)
    assert one.program is small
    assert "Left out: found no order of two strands" in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(OverLimitError, match="the smallest sufficient limit is --memory_limit=2."):
        candidates(large)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one step"),
        (("a", "--preset=llama-8b"), "give one step"),
        (("missing",), "missing: no such file or folder; give a dump that exists, or --preset"),
        (("plan.json",), "plan.json: no such file or folder"),
        (("DUMP", "--memory_limit=1GiB", "--settings=default"), "does not tell the size of its arguments"),
        (("DUMP", "--memory_limit=1"), "memory_limit='1': give bytes as a number, or with a unit"),
        (("DUMP", "--schedule=xla"), "--schedule xla makes no plan; use one of dp, list"),
        (("DUMP", "--settings=fast"), "--settings fast is unknown; choose from default"),
        (("DUMP", "--link=two-nodes", "--settings=user-buffers"), "no measurements under launch setting"),
        (("DUMP", "--profile=missing.json"), "cannot be read"),
        (("DUMP", "--gpus_per_node=3"), "4 GPUs do not fill nodes of 3: change --gpus_per_node or --mesh"),
        (("DUMP", "--skew=1"), "a dump is already compiled, so its strands cannot be shifted; leave out --skew"),
        (("--preset=llama-8b", "--skew=one"), "--skew one: give numbers of layers"),
        (("--preset=llama-8b", "--pp=2", "--skew=0,1"), "leave out --pp or --skew"),
        (("DUMP", "--link=no-p2p", "--settings=default", "--out=missing/plan.json"), "cannot write missing"),
    ],
)
def test_errors_are_one_line(dump: Path, plan: RunPlan, arguments: tuple[str, ...], said: str) -> None:
    status, _, errors = plan(*(str(dump) if a == "DUMP" else a for a in arguments))
    assert status == 1 and said in errors.splitlines()[-1]


def carried_out(options: trainer.Options, plan: str, memory_limit: str | None = None) -> None:
    """The step runs in the plan's order, although it has more layers and micro-batches than the planned step."""
    training, batch = profile_step.deviceless_training(options)
    step = trainer.make_step(training, plain=False, options=StepOptions(plan=plan, memory_limit=memory_limit))
    example = training.abstract_state(), training.abstract_batch(batch)
    # Without tuning, fusions differ from those of the planned step. XLA calls passes for the order last, so the
    # compilation can stop there.
    scheduled_only.at_schedule(step.lower(*example), {**deviceless.COMPILER_OPTIONS, **deviceless.results_option()})
    done = step.report(*example)["planned-order"]
    assert done.changed and any(note.message == "ordered as planned" for note in done.notes)


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_preset_is_planned_and_the_plan_is_what_a_step_runs(plan: RunPlan, tmp_path: Path) -> None:
    """The plan is made without a GPU, from the shipped profile. Its limit leaves room for gaps between buffers, because
    a plan that exceeds the limit is made and compiled again, which takes minutes.
    """
    out = tmp_path / "plan.json"
    status, text, _ = plan(
        "--preset=llama-8b", "--layers=4", "--mesh=tp=4", "--microbatches=3", "--skew=1", "--link=no-p2p",
        "--settings=small-buffers", "--memory_limit=11.5GiB", "--json", f"--out={out}",
    )  # fmt: skip
    found = json.loads(text)
    assert status == 0 and found["guessed_fraction"] < 0.05
    assert found["makespan_us"] < min(found["xla_order_us"], found["plain_us"])
    assert found["memory"]["interleaved"] <= found["memory"]["limit"]
    made = plan_files.load(out)
    assert (made.order.skew, made.collectives.row_parts) == (1, 2) == (found["skew"], found["row_parts"])
    assert len([name for name in made.bodies[0].order if name.startswith("beta ")]) >= 11
    assert len({body.fingerprint for body in made.bodies}) == len(made.bodies)
    carried_out(trainer.Options("llama-8b", layers=8, mesh="tp=4", microbatches=4), str(out))


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_pipeline_is_planned_and_runs_its_plan(tmp_path: Path) -> None:
    options = trainer.Options("llama-demo", layers=8, seq=128, pp=2, mesh="tp=2", microbatches=3)
    step = plan_program.of_preset(options, like=program(Memory(1 << 30, 0, 0, 0, "test")))  # only scheduled
    found = search(step, CostModel.find("H200", "nvlink", "connections1"), DP, MemoryLimit(None))
    plan_files.save(found.plan, tmp_path / "plan.json")
    # The plan was made without a memory limit.
    carried_out(replace(options, layers=16, microbatches=6), str(tmp_path / "plan.json"), "1024GiB")
