"""Checkpoints of a training run. A checkpoint holds the state, and the run's configuration as JSON.

Orbax writes a checkpoint to a temporary folder and renames the folder when it is complete. So a run that resumes never
mistakes an interrupted save for a checkpoint. `restore` first compares the checkpoint's configuration, array shapes and
array types with those of the run, and then reads the arrays.
"""

import contextlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dhelix.errors import DhelixError

Config = Mapping[str, Any]
"""JSON values by name. Two configurations are compared entry by entry, also in nested mappings."""


class CheckpointError(DhelixError):
    """A checkpoint cannot be written or read, or belongs to another model."""


class Checkpoints:
    """The checkpoints of one run in one folder. This is a context manager, whose exit waits for pending writes.

    Args:
      folder: the folder; created if it does not exist.
      config: configuration of the run. `restore` refuses a checkpoint with another configuration.
      keep: how many of the newest checkpoints to keep.
      notes: JSON values that are stored with the configuration and not compared.
    """

    def __init__(self, folder: str | os.PathLike[str], config: Config, keep: int = 3, notes: Config | None = None):
        self.folder = Path(folder).absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file; give --checkpoint_dir a folder")
        self._config = _plain({"config": config, "notes": notes or {}})
        logging.getLogger("absl").addFilter(_is_not_orbax)  # Orbax logs errors of its threads and also raises them
        sys.unraisablehook = _unraisable
        try:
            self._manager = ocp.CheckpointManager(
                self.folder,
                item_handlers={"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()},
                options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
            )
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint can be written to {self.folder} ({_first_line(error)}); give another --checkpoint_dir"
            ) from None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for pending writes. If the block ended with a CheckpointError, errors of these writes are ignored."""
        failed = kind is not None and issubclass(kind, CheckpointError)
        with contextlib.suppress(Exception) if failed else self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns an error of a write into a CheckpointError. The write may be an earlier one in the background."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:  # Orbax raises the errors of its storage library
            full = "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error)
            why = "no space is left on the disk; free some" if full else _first_line(error)[:200]
            raise CheckpointError(f"no checkpoint can be written to {self.folder} ({why}); {self.newest()}") from None

    def newest(self) -> str:
        """A sentence that names the newest complete checkpoint. The name of a complete checkpoint is a number."""
        whole = [int(path.name) for path in self.folder.glob("*") if path.name.isdecimal()]
        if not whole:
            return f"there is no complete checkpoint in {self.folder}"
        return f"--resume continues from step {max(whole)}, the newest checkpoint there"

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, notes: Config | None = None) -> None:
        """Copies `state` to the host, then writes the copy in the background.

        Args:
          notes: notes of this checkpoint, in addition to those of the run.
        """
        run = self._config | {"notes": self._config["notes"] | _plain(notes or {})}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        with self._writing():
            self._manager.save(step, args=items, force=True)

    def wait(self) -> None:
        """Waits until all saves are on disk."""
        with self._writing():
            self._manager.wait_until_finished()

    def name(self, step: int) -> str:
        """What messages call a checkpoint."""
        return f"the checkpoint of step {step} in {self.folder}"

    def notes(self, step: int) -> Config:
        """The notes that were stored with the checkpoint of `step`."""
        return self._run(step)["notes"]

    def chosen(self, step: int | None = None) -> int:
        """The step of the checkpoint to read: `step`, or the newest one. Raises CheckpointError if there is none."""
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise CheckpointError(f"no checkpoint in {self.folder}; leave out --resume to start a new run")
        if step is not None and step not in steps:
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.folder}; give --resume_step one of {', '.join(map(str, steps))}"
            )
        return steps[-1] if step is None else step

    def set_aside(self, after: int) -> str | None:
        """Moves the checkpoints of later steps than `after` to a new folder beside them. All processes call this.

        The newest is moved first, so a process that is killed in between leaves checkpoints of one run.

        Returns:
          A sentence that says where they are; None if there are none.
        """
        newer = sorted((step for step in self._manager.all_steps() if step > after), reverse=True)
        if not newer:
            return None
        number = next(n for n in itertools.count(1) if not (self.folder / f"set_aside_{n}").exists())
        aside, failed = self.folder / f"set_aside_{number}", ""
        if jax.process_index() == 0:
            try:
                aside.mkdir()
                for step in newer:
                    (self.folder / str(step)).rename(aside / str(step))
            except OSError as error:
                failed = f"checkpoints cannot be moved to {aside} ({error.strerror or error})"
        if jax.process_count() > 1:  # the others wait for it
            lost = multihost_utils.broadcast_one_to_all(np.int32(bool(failed)))
            failed = failed or ("process 0 cannot move checkpoints" if lost else "")
        if failed:
            raise CheckpointError(f"{failed}; give another --checkpoint_dir, and copy step {after} there")
        self._manager.reload()
        steps = ", ".join(map(str, reversed(newer)))
        return f"set aside in {aside}: the checkpoints of step{'s' * (len(newer) > 1)} {steps}"

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[int, Any]:
        """Reads a checkpoint.

        Args:
          abstract_state: the state as `jax.ShapeDtypeStruct`s. Their shardings may differ from the saved ones.
          step: the step of the checkpoint; None: the newest.

        Returns:
          The checkpoint's step, and its state with the shardings of `abstract_state`.

        Raises:
          CheckpointError: there is no checkpoint, it is damaged, its configuration differs, or its arrays have other
            names, shapes or types. The message names the first entry that differs.
        """
        step = self.chosen(step)
        where = self.name(step)
        _compare(where, self._run(step)["config"], self._config["config"])
        try:
            metadata = self._manager.item_metadata(step)["state"]
            stored = {} if metadata is None else _arrays(getattr(metadata, "tree", metadata))
            _compare(where, stored, _arrays(abstract_state))
            state = ocp.args.StandardRestore(abstract_state)
            return step, self._manager.restore(step, args=ocp.args.Composite(state=state))["state"]
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:
            older = [other for other in self._manager.all_steps() if other < step]
            others = f", the newest of which is of step {max(older)}" if older else ""
            raise CheckpointError(
                f"{where} is damaged ({_first_line(error)[:200]}); delete its folder to continue from an earlier "
                f"one{others}"
            ) from error

    def _run(self, step: int) -> dict[str, Any]:
        restore = ocp.args.Composite(run=ocp.args.JsonRestore())
        try:
            return self._manager.restore(step, args=restore)["run"]
        except (FileNotFoundError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder / str(step)} was not written by `dhelix train` ({_first_line(error)}); "
                "give another --checkpoint_dir"
            ) from error


def _unraisable(error: Any) -> None:
    """Python's hook, but silent if Orbax's storage library answers to an event loop that a failed write has closed."""
    if not (isinstance(error.exc_value, RuntimeError) and "Event loop is closed" in str(error.exc_value)):
        sys.__unraisablehook__(error)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _arrays(tree: Any) -> dict[str, str]:
    """The type and shape of each array, by the array's path: `params.layers.wq` -> `float32[4,128,8,16]`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {_path(path): _describe(leaf) for path, leaf in leaves if hasattr(leaf, "shape")}


def _path(path: tuple[Any, ...]) -> str:
    names = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))) for key in path)
    return ".".join(str(name) for name in names)


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _compare(where: str, stored: Config, expected: Config) -> None:
    stored, expected = _flat(stored), _flat(expected)
    for name in [*expected, *(name for name in stored if name not in expected)]:
        there, here = stored.get(name, "absent"), expected.get(name, "absent")
        if there != here and name.startswith("opt_state"):
            raise CheckpointError(
                f"{where} has the state of another optimizer: its {name} is {there}, and this run's is {here}; give "
                "--optimizer, --optimizer_options and --clip as it was written, or another --checkpoint_dir"
            )
        if there != here:
            raise CheckpointError(
                f"{where} belongs to another model: its {name} is {there}, and this run's is {here}; give the options "
                "it was written with, or another --checkpoint_dir"
            )


def _flat(config: Config, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _plain(config: Config) -> dict[str, Any]:
    """The configuration as it is after JSON has stored it: tuples become lists."""
    return json.loads(json.dumps(config))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
