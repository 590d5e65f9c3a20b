"""`dhelix shard`: JSON, tables, chart, plan file, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from dhelix.launch import cli
from dhelix.launch.shard import chart
from dhelix.launch.shard.command import view_of
from dhelix.launch.shard.groups import groups_of
from dhelix.launch.shard.job import compute_of, model_sizes
from dhelix.launch.train import trainer
from dhelix.launch.train.meshes.sharded import ShardedTraining
from dhelix.models.presets import PRESETS
from dhelix.passes.plans import plan_files
from dhelix.passes.sharding.factors import Factor
from dhelix.passes.sharding.overlap import Overlap
from dhelix.passes.sharding.sizes import Batch
from dhelix.passes.sharding.step_times import Compute, Job
from dhelix.profiles.hardware import A800, B200, H200
from dhelix.runtime.sharding.state_plan import sharding_plan
from dhelix.runtime.step.options import StepOptions

Shard = Callable[..., tuple[int, str, str]]

DUMPS = Path(__file__).parents[2] / "testdata" / "topologies"
PAPER = ("--model=llama-7b", "--cluster=amsp-a800")
SMALL = ("--model=llama-7b", "--cluster=amsp-a800", "--nodes=4")


@pytest.fixture
def shard(capsys: pytest.CaptureFixture[str]) -> Shard:
    """Runs `dhelix shard`; returns status, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["shard", *map(str, arguments)])
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err  # type: ignore[return-value]

    return run


def test_json_of_the_papers_cluster(shard: Shard) -> None:
    status, text, _ = shard(*PAPER, "--nodes=128", "--gpus-per-node=8", "--json")
    found = json.loads(text)
    assert status == 0
    assert found["mesh"] == [8, 128] and found["parameters"] == 6_738_415_616
    assert found["p"] == [1, 1] and found["os"][0] * found["os"][1] > 1
    memory, time = found["memory"], found["time"]
    parts = {name: size for name, size in memory.items() if name not in ("limit", "total")}
    assert sum(parts.values()) == pytest.approx(memory["total"], abs=10) and memory["total"] <= memory["limit"] == 80e9
    assert sum(part["exposed"] for part in time["parts"]) == pytest.approx(time["exposed"], rel=1e-4)
    assert time["compute"] + time["update"] + time["exposed"] == pytest.approx(time["step"], rel=1e-4)
    assert found["guessed"] == 1.0 and found["gains"]["ZeRO-3"] > 1
    assert len(found["alternatives"]) == 8 and all(row["why"] for row in found["alternatives"] + found["refused"])
    assert shard(*PAPER, "--nodes=128", "--gpus_per_node=8", "--json")[1] == text


def test_the_objective_of_the_paper_counts_what_is_hidden(shard: Shard) -> None:
    totals = {}
    for objective in ("exposed", "total"):
        totals[objective] = json.loads(shard(*PAPER, f"--objective={objective}", "--json")[1])["time"]
    assert totals["total"]["total"] < totals["exposed"]["total"]
    assert totals["exposed"]["step"] <= totals["total"]["step"]


def test_tables(shard: Shard) -> None:
    status, text, _ = shard(*SMALL, "--factors=1x1,1x1,8x1")
    assert status == 0
    for words in (
        "llama-7b on 8x4 GPUs: parameters 1x1, gradients 1x1, optimizer 8x1", "x as fast as ZeRO-1", "100% guessed",
        "activations", "all-reduce", "broadcast", "ZeRO-3", "factors fit",
    ):  # fmt: skip
        assert words in " ".join(text.split())


def test_times_of_a_profile(shard: Shard) -> None:
    found = json.loads(shard("--model=llama-demo", "--hardware=H100", "--nodes=1", "--gpus_per_node=2", "--json")[1])
    assert found["guessed"] == 0.0 and "profile H100 nvlink" in found["times_from"]
    status, _, error = shard("--model=llama-8b", "--hardware=H100", "--nodes=2", "--strict")
    assert status == 1 and "--strict" in error and "the mesh 8x2" in error


def test_files(shard: Shard, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    topology = tmp_path / "topology.json"
    topology.write_text(json.dumps({"nodes": [{"name": f"n{n}", "leaf": "AB"[n % 2]} for n in range(4)]}))
    names = [tmp_path / name for name in ("plan.json", "chart.svg", "found.json")]
    arguments = (*SMALL, "--factors=8x1,8x1,8x2", f"--topology={topology}", f"--out={names[0]}", f"--chart={names[1]}")
    status, text, _ = shard(*arguments, "--json", names[2])
    assert status == 0 and all(f"wrote {name}" in text for name in names)
    assert "under several leaf switches: 0%; in the file's order 100%" in text
    section = plan_files.load(names[0]).sharding
    assert section and section.placement == ("n0", "n2", "n1", "n3") and str(section.factors.optimizer) == "8x2"
    assert json.loads(names[2].read_text())["placement"] == ["n0", "n2", "n1", "n3"]
    before = names[1].read_bytes()
    shard(*arguments)
    assert names[1].read_bytes() == before


def test_gpus_are_ordered_by_a_dump_of_nccl(shard: Shard, tmp_path: Path) -> None:
    leaves, plan = tmp_path / "leaves.json", tmp_path / "plan.json"
    leaves.write_text(json.dumps({"nodes": [{"name": f"n{n}", "leaf": "AB"[n % 2]} for n in range(4)]}))
    small = ("--model=llama-7b", "--hardware=A40", "--nodes=4", "--memory=100", "--factors=4x1,4x1,8x2")
    topology = f"--topology={leaves},{DUMPS / 'pcie-8.xml'}"
    status, text, _ = shard(*small, topology, f"--out={plan}", "--json")
    found, section = json.loads(text), plan_files.load(plan).sharding
    assert status == 0 and section and section.gpu_order == (0, 1, 4, 5, 2, 3, 6, 7)
    assert found["placement"] == ["n0", "n2", "n1", "n3"] and tuple(found["gpu_order"]) == section.gpu_order
    sent = found["slow_links"]
    assert all(
        sent[links]["placed"] < sent[links]["listed"] for links in ("over the spine", "between CPUs in each node")
    )
    text = shard(*small, topology)[1]
    assert (
        "Order of GPUs in each node: 0, 1, 4, 5, 2, 3, 6, 7" in text and "GB between CPUs in each node; in the" in text
    )
    assert "The file has 4 nodes; the first 2 of them" in shard(*PAPER, "--nodes=2", f"--topology={leaves}")[1]
    assert "NVLink joins all GPUs" in shard(*small, f"--topology={DUMPS / 'nvswitch-8.xml'}")[1]


def test_a_plan_file_names_the_mesh_axes(shard: Shard, tmp_path: Path) -> None:
    shard(*SMALL, "--factors=1x1,1x1,8x1", f"--out={tmp_path / 'plan.json'}", "--axes=replica,shard")
    section = plan_files.load(tmp_path / "plan.json").sharding
    assert section and section.axes == ("replica", "shard")


def test_every_candidate_is_in_the_chart() -> None:
    view = view_of(flag_values(*SMALL))
    kinds = [chart.kind(c) for c in (*view.planned.candidates, *view.planned.rejected)]
    assert len(set(kinds)) == 3
    assert chart.labels(view)[-1][1] is view.chosen


def test_names_in_the_chart_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[Any] = []
    write = chart.write_names
    monkeypatch.setattr(chart, "write_names", lambda *args: written.extend(write(*args)))
    for flags in (("--nodes=4",), ()):
        written.clear()
        chart.save(view_of(flag_values("--model=llama-8b", "--hardware=H200", *flags)), tmp_path / "chart.svg", "")
        boxes = [text.get_window_extent() for text in written]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert any(text.get_text() == "ZeRO-3, MiCS" for text in written)  # on one node, they are the same factors


def test_hidden_collectives_slow_a_gpu_as_its_pairs_or_else_its_description_say() -> None:
    gpus = (("--model=llama-7b", f"--hardware={name}") for name in ("B200", "H200"))
    of_cluster, described, measured = (view_of(flag_values(*flags)).task.overlap for flags in (SMALL, *gpus))
    assert of_cluster == Overlap()
    assert described.within == B200.rates(False) and described.between == B200.rates(True)
    compute, collective = measured.within  # a collective that starts first is slowed less than the description says
    assert collective > H200.communication_rate and compute > H200.compute_rate
    assert measured.between == H200.rates(True)


def flag_values(*arguments: str) -> dict[str, Any]:
    from absl import flags

    from dhelix.launch.shard.flags import define_flags

    values = flags.FlagValues()
    define_flags(values)
    values(["dhelix", *arguments])
    return values.flag_values_dict()


def test_groups_of_parameters(shard: Shard, tmp_path: Path) -> None:
    step = ("--model=llama-7b", "--hardware=H200", "--nodes=1", "--microbatches=4", "--bytes=single", "--memory=60")
    status, text, _ = shard(*step, "--groups=embedding,output", f"--out={tmp_path / 'plan.json'}")
    for words in ("embedding: parameters 1x1", "the others", "one for all", "for all, a step takes", "wrote"):
        assert status == 0 and words in " ".join(text.split())
    section = plan_files.load(tmp_path / "plan.json").sharding
    found = json.loads(shard(*step, "--groups=embedding,head", "--json")[1])
    assert section and [name for name, _ in section.groups] == ["embedding", "head"]
    assert list(found["groups"]) == ["embedding", "head", "the others"] and found["one_for_all"]["fits"]
    assert found["memory"]["total"] <= found["memory"]["limit"]
    assert found["time"]["step"] < found["one_for_all"]["step"] and "for all, a step takes" in found["gain_of_groups"]


def test_groups_are_placed_together(shard: Shard, tmp_path: Path) -> None:
    leaves, plan = tmp_path / "leaves.json", tmp_path / "plan.json"
    leaves.write_text(json.dumps({"nodes": [{"name": f"n{n}", "leaf": "AB"[n % 2]} for n in range(8)]}))
    step = ("--model=llama-7b", "--hardware=A40", "--nodes=8", "--microbatches=4", "--bytes=single", "--batch=2")
    topology, keys = f"--topology={leaves},{DUMPS / 'pcie-8.xml'}", ["embedding", "head", "attention_norm"]
    status, text, _ = shard(*step, "--memory=40", f"--groups={','.join(keys)}", topology, f"--out={plan}", "--json")
    found, section = json.loads(text), plan_files.load(plan).sharding
    assert status == 0 and section and [name for name, _ in section.groups] == keys
    assert section.placement == tuple(found["placement"]) == ("n0", "n2", "n4", "n6", "n1", "n3", "n5", "n7")
    assert found["slow_links"]["over the spine"]["placed"] < found["slow_links"]["over the spine"]["listed"]
    partial = any(1 < gpus < 8 for one in found["groups"].values() for gpus, _ in (one["p"], one["g"], one["os"]))
    assert partial and section.gpu_order == tuple(found["gpu_order"]) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert sharding_plan(plan).gpu_order == section.gpu_order and sharding_plan(plan).placement == section.placement


def test_groups_that_gain_nothing_are_one_choice(shard: Shard, tmp_path: Path) -> None:
    experts = ("--model=olmoe-1b-7b", "--groups=experts", f"--out={tmp_path / 'plan.json'}")
    text = shard(*experts)[1]
    assert "experts are the parameters w_*" in text and "Groups gain less than 2%" in text
    section = plan_files.load(tmp_path / "plan.json").sharding
    assert section and not section.groups


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_groups_of_every_preset_are_all_of_it(name: str) -> None:
    config = PRESETS[name]
    sizes = model_sizes(name, config, config.seq)
    job = Job(sizes, Batch(), Compute(1e12, 1e12), split="inside")
    embedding, layers, others = (each.job.sizes for each in groups_of(job, Factor(8), config, ["embedding", "layers"]))
    assert embedding.parameters == sizes.outside[0].parameters
    assert layers.layer_parameters == sizes.layer_parameters and layers.flops == sizes.flops
    assert embedding.parameters + layers.parameters + others.parameters == sizes.parameters


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "which model?"),
        (("--model=llama-7", "--nodes=1"), "llama-7b"),
        (("--model=llama-7b", "--cluster=a800"), "amsp-a800"),
        ((*SMALL, "--factors=3x1,8x1,8x1"), "the factor of parameters is 3x1, and does not divide"),
        ((*SMALL, "--factors=1x1,8x1"), "give three factors as GPUsxNODES"),
        ((*SMALL, "--factors=1x1,1x1,1x1"), "needs 47.6 GB more than there are"),
        ((*SMALL, "--memory=20"), "with recomputation it needs"),
        ((*SMALL, "--topology=none.json"), "none.json: cannot be read"),
        ((*SMALL, f"--topology={DUMPS / 'bridges-4.xml'}"), "the node has 4 GPUs, and those of the mesh have 8"),
        ((*SMALL, f"--topology={DUMPS / 'pcie-8.xml'},{DUMPS / 'nvswitch-8.xml'}"), "plan for nodes that are alike"),
        ((*SMALL, "--axes=dp", "--out=no/plan.json", "--factors=1x1,1x1,8x1"), "dp cannot carry out parameters 1x1"),
        ((*SMALL, "--chart=shard.pdf"), "charts are .png or .svg files"),
        ((*SMALL, "--profile=x.json"), "exclude each other"),
        ((*SMALL, "--memory=nan"), "--memory nan: give a finite number"),
        ((*SMALL, "more"), "'more' is not a flag"),
        ((*SMALL, "--groups=foo"), "group 'foo' matches no path of a parameter: embedding"),
        ((*SMALL, "--groups=experts"), "--groups experts: this model has none"),
        ((*SMALL, "--groups=head,head"), "'head' occurs twice"),
        ((*SMALL, "--groups=head", "--factors=1x1,1x1,8x1"), "--groups chooses factors for each group, and --factors"),
        ((*SMALL, "--groups=head", "--split=between"), "--groups needs --split inside"),
        ((*SMALL, "--groups=head", "--memory=10"), "with recomputation it needs"),
        (("--live",), "which step? give --live --preset NAME"),
        (("--live", "--preset=llama-demo", "--model=llama-7b"), "so --model has no effect"),
        (("--live", "--preset=llama-demo", "--states=zero1"), "leave out --states and --states_group"),
        ((*SMALL, "--axes=data"), "--axes names the mesh axes of a plan file; add --out"),
        ((*SMALL, "--mesh=dp=2"), "--mesh describes a step of `dhelix train`; add --live"),
    ],
)
def test_bad_input_is_one_line(shard: Shard, arguments: tuple[str, ...], said: str) -> None:
    status, out, error = shard(*arguments)
    assert status and not out and said in error
    assert len([line for line in error.splitlines() if line.startswith("dhelix shard: ")]) == 1


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_sizes_of_every_preset(name: str) -> None:
    config = PRESETS[name]
    sizes = model_sizes(name, config, config.seq)
    assert sizes.parameters == config.parameter_count
    assert all(module.parameters > 0 for module in sizes.modules)
    assert 3 * sizes.flops == pytest.approx(config.flops_per_token(config.seq), rel=0.01)
    flops = compute_of(A800, sizes).flops
    assert 0.4 * A800.peak_flops < flops < A800.peak_flops
    assert compute_of(A800, sizes, 0.5).flops == 0.5 * A800.peak_flops


@pytest.mark.slow
@pytest.mark.deviceless
def test_a_plan_for_the_step_of_train(shard: Shard, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    step = ("--live", "--preset=llama-demo", "--layers=2", "--seq=128", "--mesh=dp=4,tp=2", "--microbatches=2")
    status, text, _ = shard(*step, f"--out={plan}", "--json")
    found = json.loads(text)
    assert status == 0 and found["mesh"] == [4, 1] and found["model"] == "llama-demo with tp 2"
    assert found["batch"] == {"sequences": 1, "seq": 128, "microbatches": 2, "recompute": False}
    assert any("by memory_analysis(), compiled for H200" in note for note in found["notes"])
    assert found["memory"]["optimizer"] == 2 * 4 * found["parameters"] // found["os"][0], "AdamW's moments in float32"
    options = trainer.Options("llama-demo", 2, 128, mesh="dp=4,tp=2", step=StepOptions(plan=plan))
    training, _ = trainer.make_training(options, trainer.configuration(options), jax.devices("cpu"))
    assert isinstance(training, ShardedTraining) and training.states == sharding_plan(plan)


def test_automatic_sharding_may_exchange_rows_of_the_embedding() -> None:
    """Two GPUs read 1024 of 128256 rows. So little is sent that the embedding stays split."""
    few = ("--model=llama-8b", "--layers=4", "--gpus_per_node=2", "--seq=512", "--groups=embedding")
    views = (view_of(flag_values(*few, f"--bytes={kind}")) for kind in ("single", "bf16-sums"))
    by_hand, automatic = (view.groups.of_group["embedding"] for view in views if view.groups)
    assert by_hand.factors.parameters == Factor(1) and automatic.factors.parameters == Factor(2)
    assert automatic.times.total < 0.05 * by_hand.times.total
    config = PRESETS["llama-8b"]
    for tied, rows in ((False, config.vocab), (True, 0)):
        sizes = model_sizes("mine", dataclasses.replace(config, tie_embeddings=tied), 512, automatic=True)
        assert [module.rows for module in sizes.outside] == [rows, 0]
