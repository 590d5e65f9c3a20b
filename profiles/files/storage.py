"""Profiles as files. There is one JSON file for each GPU and link, such as `profiles/data/h200-nvlink.json`.

    profile = storage.find("H200", "nvlink")           # the shipped file, overridden by files in the user's folders
    for line in storage.differences(profile, here):    # one line if the GPU, NCCL, CUDA or jax differs
        logging.warning(line)
    storage.save(profile.with_section(measured), path)

`profile_json` describes the format. Files may come from strangers, so they are checked when they are read. A file is
read when it is needed, and again only after it has changed. A file is written either completely or not at all.
"""

from __future__ import annotations

import functools
import os
import re
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dhelix.errors import DhelixError
from dhelix.profiles.estimates.alike import as_on, stand_in
from dhelix.profiles.files import codec
from dhelix.profiles.files.codec import ProfileFileError
from dhelix.profiles.files.profile_json import dumps, loads
from dhelix.profiles.hardware import LINKS, describe
from dhelix.profiles.keys import OperatorKey
from dhelix.profiles.profile import Profile, Provenance, Timing

__all__ = [
    "ProfileFileError",
    "differences",
    "dumps",
    "file_name",
    "find",
    "load",
    "loads",
    "of_hardware",
    "save",
    "shipped",
    "users_file",
]

SEARCH_PATH = "DHELIX_PROFILES"
"""Environment variable that names folders of profiles, separated as in PATH. Later folders override earlier folders."""
USERS_FOLDER = Path("~/.cache/dhelix/profiles")
"""The folder with the user's profiles if SEARCH_PATH is not set. `dhelix profile` writes into it; dhelix reads it."""

SHIPPED = Path(__file__).parents[1] / "data"


def file_name(hardware: str, link: str) -> str:
    return f"{hardware}-{link}.json".lower()


def shipped() -> tuple[str, ...]:
    """The names of the profiles that dhelix ships, such as `h200-nvlink`."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def find(hardware: str, link: str, extra: Sequence[Path] = ()) -> Profile | None:
    """All known times for this hardware and link, or None if there are none.

    The files are read in this order: the shipped file, the files with the same name in the user's folders
    (DHELIX_PROFILES) and in the folders of `extra`, and the files of `extra`. Later files override earlier files entry
    by entry (`Profile.merged`). `Profile.elsewhere` gets times of operators that were measured with other links. The
    profile of a similar GPU fills the remaining gaps, and `Profile.alike` names this GPU.

    Args:
      extra: paths of more folders and files.

    Raises:
      ProfileFileError: a file cannot be read, or it is for other hardware or another link.
      DhelixError: a folder or file that the user has named does not exist.
    """
    files = (path for place in (SHIPPED, *_search_path(), *extra) for path in _files_of(place))
    return _find(hardware, link, tuple(extra), tuple(map(_state, files)))


def _files_of(place: Path) -> list[Path]:
    return sorted(place.glob("*.json")) if place.is_dir() else [place]


def _state(path: Path) -> tuple[Path, int, int]:
    """A path, and the modification time (in ns) and size of its file. Both are 0 if the file cannot be accessed."""
    try:
        status = path.stat()
    except OSError:
        return path, 0, 0
    return path, status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=8)
def _find(hardware: str, link: str, extra: Sequence[Path], _states: object) -> Profile | None:
    """The result of `find`, cached. `_states` has the states of all files that may be read.

    If one of these files changes, `_states` differs, so the result is computed again.
    """
    profile = _over_one_link(hardware, link, extra)
    like = describe(hardware, link).like
    other = find(like, link) if like else None
    if profile is None and other is None:
        return None
    own = replace(profile or Profile(hardware, link), elsewhere=_operators_elsewhere(hardware, link))
    return own if other is None else stand_in(own, as_on(other, hardware))


def _operators_elsewhere(hardware: str, link: str) -> dict[OperatorKey, Timing]:
    """Times of operators that were measured on the same hardware with other links."""
    found: dict[OperatorKey, Timing] = {}
    for other in (other for other in LINKS if other != link.lower()):
        try:
            profile = _over_one_link(hardware, other, ())
        except DhelixError:  # the user sees this error only when the other link is used
            continue
        for section in profile.sections.values() if profile else ():
            found = {**section.operators, **found}
    return found


def _over_one_link(hardware: str, link: str, extra: Sequence[Path]) -> Profile | None:
    name = file_name(hardware, link)
    optional = [folder / name for folder in (SHIPPED, *_search_path())]
    optional += [folder / name for folder in extra if folder.is_dir()]
    wanted = [path for path in extra if not path.is_dir()]
    profile = None
    for path in (*(path for path in optional if path.exists()), *wanted):
        later = load(path)
        if (later.hardware.lower(), later.link.lower()) != (hardware.lower(), link.lower()):
            raise ProfileFileError(
                f"{path}: measured on {later.hardware} with link {later.link}, not on {hardware} with link {link}: "
                "remove this file, or name it after its own hardware and link"
            )
        profile = later if profile is None else profile.merged(later)
    return profile


def _search_path() -> list[Path]:
    folders = [Path(part) for part in os.environ.get(SEARCH_PATH, "").split(os.pathsep) if part]
    if not folders:
        return [USERS_FOLDER.expanduser()]
    for folder in folders:
        if not folder.is_dir():
            raise DhelixError(f"{SEARCH_PATH} names {folder}, which is not a folder: correct or unset it")
    return folders


def of_hardware(path: Path, hardware: str, link: str, name: str) -> Profile | None:
    """The profile in the file `path`; None if there is no such file.

    Args:
      name: name of the flag or option that gave the path, for error messages.

    Raises:
      ProfileFileError: the file cannot be read, or the profile is for other hardware or another link.
    """
    if not path.exists():
        return None
    found = load(path)
    if (found.hardware, found.link) != (hardware, link):
        raise ProfileFileError(
            f"{path} holds a profile of {found.hardware} with link {found.link}, but this one is for {hardware} with "
            f"link {link}; give another file as {name}"
        )
    return found


def users_file(hardware: str, link: str) -> Path:
    """The path of the user's own profile, in the last folder of DHELIX_PROFILES or in USERS_FOLDER."""
    return _search_path()[-1] / file_name(hardware, link)


def load(path: Path | str) -> Profile:
    """The profile in a file. The file is read again only if it has changed.

    Raises:
      ProfileFileError: the file does not exist, or cannot be read, or is no valid profile.
    """
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ProfileFileError(f"{path}: not a file: check the path")
        if status.st_size > codec.MAX_BYTES:
            raise ProfileFileError(f"{path}: {status.st_size >> 20} MiB are too large for a profile: check the path")
        return _read(path.absolute(), status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ProfileFileError(f"{path}: cannot be read ({error.strerror}): check the path") from None
    except UnicodeDecodeError:
        raise ProfileFileError(f"{path}: not text, so not a profile: check the path") from None


@functools.lru_cache(maxsize=64)
def _read(path: Path, _mtime_ns: int, _size: int) -> Profile:
    return loads(path.read_text(encoding="utf-8"), str(path))


def save(profile: Profile, path: Path | str) -> None:
    """Writes a profile to a file, either completely or not at all.

    Until the new file is complete, the old file stays in place. So an interruption does no harm, and other processes
    always read a complete file.

    Raises:
      ProfileFileError: `loads` would reject the profile.
      DhelixError: the file cannot be written.
    """
    path = Path(path)
    text = dumps(profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace_file(path, text)
    except OSError as error:
        raise DhelixError(f"{path}: cannot be written ({error.strerror}): choose another place") from error


def _replace_file(path: Path, text: str) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes a file that only the owner can read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def differences(profile: Profile, here: Provenance) -> tuple[str, ...]:
    """Warnings if this machine or its software differs from the profile's, one line for each difference.

    The name of the GPU, the major and minor version of NCCL, and the major versions of CUDA and jax are compared. For
    jax, 0.11 and 0.12 count as different major versions. An unknown value is no difference. A merged profile has
    several machines, and each of them is compared.

    Args:
      here: the machine and the software of this process.
    """
    compared = (
        ("GPU", "gpu", _gpu_kind, "all of its times may differ here"),
        ("NCCL", "nccl", lambda v: _version(v, 2), "times of collectives may differ here"),
        ("CUDA", "cuda", lambda v: _version(v, 1), "other kernels may be chosen here"),
        ("jax", "jax", _major, "XLA may compile other operators here"),
    )
    lines = []
    for name, attribute, essence, consequence in compared:
        ours = getattr(here, attribute)
        theirs = {getattr(p, attribute) for p in profile.measured_on}
        other = sorted(v for v in theirs if v and ours and essence(v) != essence(ours))
        if other:
            where = f"profile {profile.hardware} {profile.link}"
            lines.append(
                f"{where} was measured with {name} {', '.join(other)}, not {ours}: {consequence}; run `dhelix profile`"
            )
    return tuple(lines)


def _gpu_kind(name: str) -> str:
    return name.lower().removeprefix("nvidia").strip()


def _version(version: str, parts: int) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", version)[:parts])


def _major(version: str) -> tuple[str, ...]:
    return _version(version, 2 if version.startswith("0.") else 1)
