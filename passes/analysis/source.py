"""Finds the line of the user's program that made an instruction.

    source_of(loop)    # "model.py:31 (forward)"

JAX writes the call stack of each operation into the module, and XLA keeps it. Indices into the tables of the call
stacks start at 1; 0 means that there is no entry.
"""

from pathlib import Path, PurePath

from dhelix.passes.hlo import Instruction

# A program may come from another installation, and the folder of this one may have any name.
_ROOT = Path(__file__).parents[2]
_OURS = tuple(f"{root}/{part}/" for root in ("dhelix", _ROOT, _ROOT.resolve()) for part in ("runtime", "passes"))


def source_of(instruction: Instruction) -> str:
    """File, line and function of the innermost call outside site-packages and dhelix; "" if unknown."""
    index = instruction.computation.module.proto.stack_frame_index
    number = instruction.proto.metadata.stack_frame_id
    seen: set[int] = set()
    while 0 < number <= len(index.stack_frames) and number not in seen:
        seen.add(number)
        frame = index.stack_frames[number - 1]
        if 0 < frame.file_location_id <= len(index.file_locations):
            location = index.file_locations[frame.file_location_id - 1]
            if 0 < location.file_name_id <= len(index.file_names):
                path = PurePath(index.file_names[location.file_name_id - 1]).as_posix()
                if "/site-packages/" not in path and not any(part in path for part in _OURS):
                    return f"{path.rpartition('/')[2]}:{location.line}{_function(index, location)}"
        number = frame.parent_frame_id
    return ""


def _function(index: object, location: object) -> str:
    names, number = index.function_names, location.function_name_id  # type: ignore[attr-defined]
    name = names[number - 1].rpartition(".")[2] if 0 < number <= len(names) else ""
    return f" ({name})" if name.isidentifier() else ""
