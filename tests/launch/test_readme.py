"""The README's example runs as it stands there, and does what it is there to show."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs_and_is_interleaved() -> None:
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(example, str(README), "exec"), names)
    report = names["train_step"].report(names["params"], names["opt_state"], names["batch"])
    assert report["strand-duplication"].changed and report["activation-sharing"].changed
