"""Predicted time of a step when nothing overlaps."""

from collections.abc import Mapping

import pytest

from dhelix.errors import DhelixError
from dhelix.passes.evaluation.costs import Costs
from dhelix.passes.evaluation.operator_keys import key_of
from dhelix.passes.evaluation.step_time import StepTime, predict
from dhelix.passes.hlo import HloModule
from dhelix.profiles.estimates.estimator import Estimator, Source
from dhelix.profiles.hardware import H200
from dhelix.profiles.keys import CollectiveKey, OperatorKey
from dhelix.profiles.profile import Profile, Section, Timing
from dhelix.tests.passes import golden

STEP = """HloModule step, is_scheduled=true
sum {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT z = f32[] add(x, y)
}
double {
  x = f32[1024]{0} parameter(0)
  ROOT y = f32[1024]{0} add(x, x)
}
triple {
  x = f32[1024]{0} parameter(0)
  y = f32[1024]{0} add(x, x)
  ROOT z = f32[1024]{0} add(x, y)
}
long {
  x = f32[1024]{0} parameter(0)
  a = f32[1024]{0} fusion(x), kind=kLoop, calls=triple
  ROOT b = f32[1024]{0} copy(a)
}
short {
  x = f32[1024]{0} parameter(0)
  ROOT y = f32[1024]{0} copy(x)
}
body {
  state = (s32[], f32[1024]{0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  x = f32[1024]{0} get-tuple-element(state), index=1
  y = f32[1024]{0} fusion(x), kind=kLoop, calls=double
  begun = f32[1024]{0} all-reduce-start(y), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=sum
  summed = f32[1024]{0} all-reduce-done(begun)
  ROOT next = (s32[], f32[1024]{0}) tuple(i, summed)
}
condition {
  state = (s32[], f32[1024]{0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  n = s32[] constant(7)
  ROOT more = pred[] compare(i, n), direction=LT
}
ENTRY main {
  state = (s32[], f32[1024]{0}) parameter(0)
  which = s32[] parameter(1)
  loop = (s32[], f32[1024]{0}) while(state), condition=condition, body=body, backend_config=TRIPS
  x = f32[1024]{0} get-tuple-element(loop), index=1
  chosen = f32[1024]{0} conditional(which, x, x), branch_computations={short, long}
  ROOT y = f32[1024]{0} fusion(chosen), kind=kLoop, calls=double
}""".replace("TRIPS", '{"known_trip_count":{"n":"7"}}')


def step(edits: Mapping[str, str] | None = None) -> HloModule:
    text = STEP
    for old, new in (edits or {}).items():
        assert old in text
        text = text.replace(old, new)
    return HloModule.from_text(text)


def profiled(times: StepTime, factor: float = 1.0) -> Costs:
    """Costs from a profile that holds exactly the operators of `times`."""
    timings = {o.key: Timing(factor * o.seconds) for o in times.operators}
    section = Section(
        "default",
        {k: t for k, t in timings.items() if isinstance(k, OperatorKey)},
        {k: t for k, t in timings.items() if isinstance(k, CollectiveKey)},
    )
    return Costs(H200, Estimator(Profile("H200", "nvlink").with_section(section), H200))


def layer_loop(layers: int) -> HloModule:
    """The body of the layer loop of a compiled forward pass, which counts as one iteration."""
    text = golden.read("operator_keys/forward_layer.hlo")
    return HloModule.from_text(text.replace("[4,", f"[{layers},"))


def test_everything_counts_as_often_as_it_runs() -> None:
    time = predict(step(), Costs(H200))
    counts = {o.key.kind: o.count for o in time.operators if o.example != "a"}
    assert counts == {"fusion": 8, "all-reduce": 7, "copy": 1}, "7 + 1 of one fusion, and the longest branch"
    assert time.executions == 8 + 7 + 1 + 1
    assert time.busy == pytest.approx(sum(o.count * o.seconds for o in time.operators))
    assert time.communication == pytest.approx(time.by_kind["all-reduce"])


def test_a_pause_follows_every_operator() -> None:
    time = predict(step(), Costs(H200), gap_seconds=1e-6)
    assert time.gaps == pytest.approx(17e-6)
    assert time.seconds == pytest.approx(predict(step(), Costs(H200)).seconds + 17e-6)


def test_the_longest_stands_first_and_kinds_add_up() -> None:
    time = predict(step(), Costs(H200))
    totals = [o.total for o in time.operators]
    assert totals == sorted(totals, reverse=True)
    assert list(time.by_kind.values()) == sorted(time.by_kind.values(), reverse=True)
    assert sum(time.by_kind.values()) == pytest.approx(time.busy)


def test_shares_say_what_the_prediction_rests_on() -> None:
    roofline = predict(step(), Costs(H200))
    assert roofline.shares == {Source.MEASURED: 0.0, Source.INTERPOLATED: 0.0, Source.GUESS: pytest.approx(1.0)}
    measured = predict(step(), profiled(roofline, 2.0))
    assert measured.shares[Source.MEASURED] == pytest.approx(1.0)
    assert measured.busy == pytest.approx(2.0 * roofline.busy)


def test_more_iterations_need_no_other_measurements() -> None:
    known = profiled(predict(step(), Costs(H200)), 3.0)
    longer = predict(step({'"n":"7"': '"n":"14"'}), known)
    assert longer.shares[Source.MEASURED] == pytest.approx(1.0)
    assert longer.busy > 1.5 * predict(step(), known).busy


def test_a_profile_of_four_layers_knows_the_layers_of_eight() -> None:
    eight = predict(layer_loop(8), profiled(predict(layer_loop(4), Costs(H200))))
    assert eight.shares[Source.MEASURED] == pytest.approx(1.0)


def test_a_loop_of_unknown_length_counts_once_and_is_named() -> None:
    endless = {', backend_config={"known_trip_count":{"n":"7"}}': ""}
    time = predict(step(endless), Costs(H200))
    assert time.unknown_loops == ("loop",)
    assert time.unknown_text.endswith("the real step time differs: loop (1 in all).")
    assert predict(step(), Costs(H200)).unknown_text == ""
    assert {o.count for o in time.operators if o.key.kind == "all-reduce"} == {1}


def test_operators_name_an_instruction_that_has_their_key() -> None:
    module = step()
    by_name = {i.name: i for c in module.computations for i in c.instructions}
    for operator in predict(module, Costs(H200)).operators:
        assert key_of(by_name[operator.example]) == operator.key


def test_a_program_that_is_not_scheduled_is_refused() -> None:
    with pytest.raises(DhelixError, match="not scheduled"):
        predict(step({", is_scheduled=true": ""}), Costs(H200))
