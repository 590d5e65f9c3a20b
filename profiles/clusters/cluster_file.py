"""Reads a cluster from a JSON file.

    {
      "name": "our-cluster",
      "gpu": "H100",
      "nodes": 16,
      "gpus_per_node": 8,
      "inside": "NVLink 4",
      "between": "RoCE, 400 Gb/s per GPU",
      "nodes_per_leaf": 32,
      "oversubscription": 2,
      "constants": {
        "between_gb_per_second": {"value": 38, "source": "nccl-tests, all-reduce of 1 GiB over 16 nodes"},
        "gemm_efficiency": 0.72
      }
    }

Only `gpu` and `nodes` are needed. Missing constants are those of the GPU in `profiles/hardware.py`. `link` says which
profile has measured times: `nvlink`, `no-p2p`, `two-nodes`, or `none`. By default, it is `nvlink` for GPUs with such a
profile, unless the file sets a constant of the links inside a node.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhelix.profiles.clusters.cluster import Cluster
from dhelix.profiles.clusters.constants import ClusterError, constant
from dhelix.profiles.files import storage
from dhelix.profiles.hardware import GPUS, LINKS, describe

_TEXTS = ("name", "gpu", "inside", "between", "link")
_COUNTS = ("nodes", "gpus_per_node", "nodes_per_leaf")
_KEYS = (*_TEXTS, *_COUNTS, "oversubscription", "constants", "notes")
_NO_LINK = "none"


def read(path: str | Path) -> Cluster:
    """The cluster that a file describes.

    Raises:
      ClusterError: the file cannot be read, or describes no cluster.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        place = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ClusterError(f"{path} is not JSON ({place}); docs/guide/simulate.md shows a cluster file") from None
    return of_json(content, str(path), Path(path).stem)


def of_json(content: Any, where: str, name: str = "cluster") -> Cluster:
    """The cluster that JSON values describe.

    Args:
      where: where they come from, for errors.
      name: the cluster's name if they do not say it.

    Raises:
      ClusterError: they describe no cluster.
    """
    if not isinstance(content, dict):
        raise ClusterError(f"{where} is not a JSON object; docs/guide/simulate.md shows a cluster file")
    content = {**content, "gpu": _gpu(content["gpu"])} if "gpu" in content else content
    _check_keys(content, where)
    gpu, said = content["gpu"], content.get("link")
    described = describe(gpu, said if said in LINKS else LINKS[0])  # nodes without peer-to-peer have slow links inside
    fields: dict[str, Any] = {"gpus_per_node": content.get("gpus_per_node", described.gpus_per_node)}
    if "nodes_per_leaf" in content:
        fields |= {"nodes_per_leaf": content["nodes_per_leaf"], "oversubscription": _oversubscription(content, where)}
    elif "oversubscription" in content:
        raise ClusterError(f"{where}: oversubscription is that of leaf switches; also give nodes_per_leaf")
    values, sources = _constants(content.get("constants", {}), where)
    inside = any(key.startswith("inside_") for key in values)
    cluster = Cluster(
        content.get("name", name),
        gpu,
        content["nodes"],
        dataclasses.replace(described, **fields),
        _link(content, gpu, inside, where),
        content.get("inside", ""),
        content.get("between", ""),
        notes=tuple(content.get("notes", ())),
    ).with_constants(values, where)
    return dataclasses.replace(cluster, sources=sources)


def _check_keys(content: Mapping[str, Any], where: str) -> None:
    for key in content:
        if key not in _KEYS:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            advice = f"did you mean {close[0]!r}?" if close else f"use {', '.join(_KEYS)}"
            raise ClusterError(f"{where}: {key!r} is unknown; {advice}")
    for key in ("gpu", "nodes"):
        if key not in content:
            raise ClusterError(f"{where} does not say {key!r}; docs/guide/simulate.md shows a cluster file")
    for key in _TEXTS:
        if key in content and not isinstance(content[key], str):
            raise ClusterError(f"{where}: {key} is {content[key]!r}; give a text")
    for key in _COUNTS:
        value = content.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ClusterError(f"{where}: {key} is {value!r}; give a whole number of at least 1")
    if content["gpu"] not in GPUS:
        raise ClusterError(
            f"{where}: the GPU {content['gpu']!r} is unknown; use one of {', '.join(GPUS)}, and set its constants"
        )
    notes = content.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise ClusterError(f"{where}: notes is a list of texts")


def _oversubscription(content: Mapping[str, Any], where: str) -> float:
    value = content.get("oversubscription", 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= 100:
        raise ClusterError(
            f"{where}: oversubscription is {value!r}; give how many times more bandwidth a leaf has to its nodes than "
            "to its spines, at least 1"
        )
    return float(value)


def _constants(said: Any, where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The values and the sources of the constants of a file, by name."""
    if not isinstance(said, dict):
        raise ClusterError(f"{where}: constants is an object of names and values")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in said.items():
        constant(name, where)
        if isinstance(value, dict):
            if set(value) != {"value", "source"} or not isinstance(value["source"], str):
                raise ClusterError(f'{where}: {name} is a number, or {{"value": number, "source": text}}')
            values[name], sources[name] = value["value"], value["source"]
        else:
            values[name], sources[name] = value, where
    return values, sources


def _link(content: Mapping[str, Any], gpu: str, own_links: bool, where: str) -> str:
    said = content.get("link")
    if said is not None and said not in (*LINKS, _NO_LINK):
        raise ClusterError(f"{where}: link {said!r} is unknown; use {', '.join(LINKS)} or {_NO_LINK}")
    if said in (None, _NO_LINK):
        measured = said is None and not own_links and storage.find(gpu, "nvlink") is not None
        return "nvlink" if measured else ""
    if storage.find(gpu, said) is None:
        raise ClusterError(
            f"{where}: nothing was measured on {gpu} with link {said}; run `dhelix profile` there, or give link none"
        )
    return str(said)


def _gpu(name: Any) -> Any:
    """The GPU's name as profiles have it; a name that is unknown as it is."""
    return next((gpu for gpu in GPUS if isinstance(name, str) and gpu.lower() == name.lower()), name)
