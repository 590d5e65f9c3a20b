"""The worker: the process that measures. `python -m dhelix.launch.profile.worker REQUEST.json` runs it.

`dhelix profile` starts a worker for each launch setting, with the setting's environment and XLA flags, because both
hold for a whole process. `dhelix profile` itself does not use the GPUs. The worker writes the profile's file after
every batch of results. It reports its progress on stdout, one JSON object per line:

    {"done": 120, "total": 400, "what": "pairs"}     progress
    {"finished": true} or {"error": "..."}           the end

The file stays valid even if the worker is killed. When the process that started the worker ends, the worker's stdin
ends, and then the worker ends itself.

In a job of several workers, all know what any of them has in its file, and at the end every host has the same file.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dhelix.errors import DhelixError
from dhelix.launch.inspect.reading import dumps
from dhelix.launch.profile.step import build, gpus_of
from dhelix.launch.profile.workers import end_with_stdin, tell
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import Hardware, describe, gpu_name
from dhelix.profiles.profile import SETTINGS, Profile, Section
from dhelix.runtime.processes import agreement
from dhelix.runtime.processes.nodes import gpus_per_node
from dhelix.runtime.profiling import collective_tables, measure_tables
from dhelix.runtime.profiling import operator_bases as of_paper
from dhelix.runtime.profiling.in_process import gpu_measurer, measure_missing
from dhelix.runtime.profiling.measure import reason
from dhelix.runtime.profiling.observe import compiled_step, observe
from dhelix.runtime.profiling.provenance import provenance
from dhelix.runtime.profiling.session import Session, Step

_ANEW = 2  # the step is compiled and measured again at most this many times, with the costs that were measured before


@dataclass(frozen=True)
class Request:
    """The task of a worker.

    Attributes:
      setting: name of the launch setting that the worker was started with.
      out: the profile's file; it is read if it exists, then written.
      link: link between the GPUs, one of `hardware.LINKS`.
      preset: the fields of `trainer.Options` that describe the step, or None.
      module: file of a compiled module that replaces the preset, or None.
      bases: names of model sizes in `operator_bases.SIZES`. Their operators are measured, too.
      pairs: whether to measure pairs, too; False measures each operator only alone.
      again: whether to measure known entries again.
      collectives: whether to fill the tables of collectives.
      collective_seconds: approximate time to spend on these tables.
      keep: folder for the compiled module, or None.
      node: if several workers measure together, on several hosts or as emulated nodes, a mapping with the keywords of
        `jax.distributed.initialize`: coordinator, processes, process and local_device_ids; otherwise None.
    """

    setting: str
    out: str
    link: str = "nvlink"
    preset: Mapping[str, Any] | None = None
    module: str | None = None
    bases: tuple[str, ...] = ()
    pairs: bool = True
    again: bool = False
    collectives: bool = False
    collective_seconds: float = 60.0
    keep: str | None = None
    node: Mapping[str, Any] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The request in a text that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "bases": tuple(fields["bases"])})


def main(path: str) -> None:
    """Runs the request in the file `path` and reports the end on stdout. Exits with status 1 after an error."""
    request = Request.from_json(Path(path).read_text())
    try:
        with dumps.blaming(Path(request.module)) if request.module else contextlib.nullcontext():
            run(request)
        tell(finished=True)
    except DhelixError as error:
        tell(error=" ".join(str(error).split()))
        sys.exit(1)
    except jax.errors.JaxRuntimeError as error:
        tell(error=reason(error))
        sys.exit(1)


def run(request: Request) -> None:
    """Runs a request. Writes the profile after every batch of results. Raises DhelixError if it cannot measure."""
    # The file is read before the workers connect, because emulated nodes share it, and one of them writes it then.
    known = storage.load(request.out) if Path(request.out).is_file() else None
    if request.node:
        node = request.node
        jax.distributed.initialize(
            node["coordinator"], node["processes"], node["process"], local_device_ids=node["local_device_ids"]
        )
    if jax.devices()[0].platform != "gpu":
        raise DhelixError("measuring needs GPUs, and JAX finds none; see `nvidia-smi` and pip install 'dhelix[gpu]'")
    here = provenance()
    name = gpu_name(here.gpu)
    hardware = describe(name, request.link)
    profile = Profile(name, request.link, (here,))
    if known is not None:
        profile = known.merged(profile)
    profile = _shared(request, profile)
    if request.node:
        tell(gpus_per_node=_per_node())
    if request.preset or request.module:
        profile = _measure_step(request, profile, hardware)
    if request.preset and not request.preset.get("plain"):
        # With the new costs the passes may produce another program. Some of its operators may not be measured yet.
        for _ in range(_ANEW):
            profile = _shared(request, profile)
            before, profile = profile, _measure_step(replace(request, again=False, bases=()), profile, hardware)
            if profile == before:
                break
    if request.collectives:
        profile = _measure_collectives(request, profile, hardware)
    _shared(request, profile)


def _per_node() -> int:
    """GPUs that take part on each node."""
    return gpus_per_node(jax.devices()) or len(jax.devices())


def _shared(request: Request, profile: Profile) -> Profile:
    """What the workers of all hosts know. Every host then has it in its file. The first worker's times take precedence.

    Hosts may share their folders or not, so a worker writes only what its file lacks.
    """
    if not request.node:
        return profile
    told = agreement.gathered("compare the profiles", storage.dumps(profile))
    # All merge in one order, so that all write the same bytes.
    profile = functools.reduce(Profile.merged, (storage.loads(text, "a worker's profile") for text in reversed(told)))

    def write() -> None:
        out = Path(request.out)
        if not out.is_file() or out.read_text() != storage.dumps(profile):
            storage.save(profile, out)

    agreement.together("write the profile", write, (DhelixError, OSError))
    return profile


def _measure_step(request: Request, profile: Profile, hardware: Hardware) -> Profile:
    setting = SETTINGS[request.setting]
    lowered, make_arguments = None, None
    if request.module:
        step = Step(dumps.read(request.module).module)
    else:
        assert request.preset is not None
        tell(done=0, total=0, what="compiles the step")
        lowered, make_arguments = build(request.preset, _costs(request, profile.hardware))
        step = compiled_step(lowered)
    if request.keep and jax.process_index() == 0:
        Path(request.keep, "step.hlo.pb").write_bytes(step.module.to_bytes())
    step = _with_bases(step, request.bases)
    # A dump's module may need more GPUs than this machine has.
    per_node = _per_node() if request.node else max(len(jax.devices()), gpus_of(step.module))
    measurer = gpu_measurer(setting)
    count = len(jax.devices())
    session = Session(profile, setting.name, measurer, hardware, per_node, request.pairs, request.again, count)

    def trace(step: Step) -> Step:
        assert lowered is not None

        def make() -> tuple[Any, ...]:
            assert make_arguments is not None
            try:
                return make_arguments()
            except jax.errors.JaxRuntimeError as error:
                why = reason(error)
                progress(0, 0, f"runs all operators alone, because the step itself does not run ({why})")
                raise

        return observe(step, lowered, make, per_node, setting.implementation)

    def progress(done: int, total: int, what: str) -> None:
        tell(done=done, total=total, what=what)

    def save(grown: Profile) -> None:  # every process reads the file later, so every process waits for this write
        agreement.together("write the profile", lambda: _save(request, grown), (DhelixError, OSError))

    return measure_missing(session, step, trace if lowered else None, progress, save)


def _costs(request: Request, gpu: str) -> Profile | None:
    """The profile with which strands are interleaved. Entries of the request's file override entries of other files.

    The result is None if no profile has times for the setting. The step then chooses its own costs.
    """
    out = Path(request.out)
    found = storage.find(gpu, request.link, [out] if out.is_file() else [])
    return found if found is not None and request.setting in found.sections else None


def _with_bases(step: Step, names: tuple[str, ...]) -> Step:
    """The step, together with the operator bases of the DHelix paper for the model sizes `names`."""
    if not names:
        return step
    devices = np.array(jax.devices())
    chosen = [base for name in names for base in of_paper.bases(of_paper.SIZES[name])]
    modules = dict(of_paper.compile_bases(chosen, Mesh(devices, ("tp",)), local_axis="tp").modules)
    bases = [of_paper.main_operator(base, modules[str(base)]) for base in chosen if str(base) in modules]
    further = [*modules.values()]
    if len(devices) >= 4 and len(devices) % 2 == 0:
        mesh = Mesh(devices.reshape(-1, 2), ("ep", "tp"))  # the paper's figure 4 pairs collectives of two axes
        figure4 = of_paper.figure4_bases().values()
        further += of_paper.compile_bases(figure4, mesh, local_axis="tp", cross_axis="ep").modules.values()
    return replace(step, further=tuple(further), bases=tuple(bases))


def _measure_collectives(request: Request, profile: Profile, hardware: Hardware) -> Profile:
    implementation = SETTINGS[request.setting].implementation
    keys = collective_tables.tables(jax.devices(), _per_node(), implementation=implementation)
    known = profile.section(request.setting)
    missing = [k for k in keys if request.again or not (k in known.collectives or str(k) in known.failures)]
    done = 0
    budget = request.collective_seconds
    for program in collective_tables.programs(missing, jax.devices(), hardware, _per_node(), budget):
        tell(done=done, total=len(missing), what=f"collectives of {program.grouping}")
        if program.takes_part:
            timings, failures = measure_tables.run(program)
            profile = profile.with_section(Section(request.setting, {}, timings, {}, None, failures))
            _save(request, profile)
        done += len(program.keys)
    tell(done=done, total=done, what="done")
    return profile


def _save(request: Request, profile: Profile) -> None:
    """Writes the profile's file. Only the first process writes."""
    if jax.process_index() == 0:
        storage.save(profile, request.out)


if __name__ == "__main__":
    end_with_stdin()
    main(sys.argv[1])
