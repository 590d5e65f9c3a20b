"""The command line as a user sees it: what it prints on which stream, and its exit status."""

import importlib
import subprocess
import sys
from types import ModuleType

import pytest
from absl import flags

from dhelix.errors import DhelixError
from dhelix.launch import cli


@pytest.fixture
def greet(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A subcommand `greet`."""
    module = ModuleType("greet_command")
    module.USAGE = "usage: dhelix greet NAME [flags]\n\nGreets."  # type: ignore[attr-defined]
    module.calls = []  # type: ignore[attr-defined]

    def define_flags(values: flags.FlagValues) -> None:
        flags.DEFINE_integer("times", 1, "how often", lower_bound=1, flag_values=values)
        flags.DEFINE_float("share", 0.5, "of those present", flag_values=values)
        manners = "in which manners, of " + "good-natured, " * 8 + "bad-tempered"
        flags.DEFINE_list("manners", ["good", "bad"], manners, flag_values=values)
        flags.DEFINE_bool("loud", False, "in capitals", flag_values=values)

    def run(values: flags.FlagValues, arguments: list[str]) -> int | None:
        if not arguments:
            raise DhelixError("whom?\n  name somebody")
        module.calls.append((arguments, values["times"].value, values["loud"].value))  # type: ignore[attr-defined]
        return 3 if arguments == ["three"] else None

    module.define_flags, module.run = define_flags, run  # type: ignore[attr-defined]
    for name in ("greet", "greet.flags", "greet.command"):
        monkeypatch.setitem(sys.modules, f"dhelix.launch.{name}", module)
    monkeypatch.setitem(cli.COMMANDS, "greet", cli.Command("says hello"))
    return module


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    return stopped.value.code or 0  # type: ignore[return-value]


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    text = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert f"  {name}" in text and command.summary in text


def test_versions_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out.startswith("dhelix ")


def test_help_wrong_flags_and_wrong_paths_import_no_jax() -> None:
    """Importing jax is slow, so help and errors must not wait for it."""
    text = (
        "import sys\n"
        "from dhelix.launch import cli\n"
        "for name in cli.COMMANDS:\n"
        "    for flag in ('--help', '--nonsense'):\n"
        "        try:\n"
        "            cli.main([name, flag])\n"
        "        except SystemExit as stopped:\n"
        "            assert stopped.code == (0 if flag == '--help' else 2), (name, flag)\n"
        "for name in ('inspect', 'plan', 'profile'):\n"
        "    try:\n"
        "        cli.main([name, '/nonexistent'])\n"
        "    except SystemExit as stopped:\n"
        "        assert stopped.code == 1, name\n"
        "sys.exit('jax' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True, capture_output=True)


def test_no_command_shows_the_overview_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert status() == 2
    assert "usage: dhelix COMMAND" in capsys.readouterr().out


def test_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("inspct") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "no command 'inspct'" in shown.err and "inspect" in shown.err


def test_flags_and_arguments_in_any_order(greet: ModuleType) -> None:
    assert status("greet", "--times=2", "you", "--loud") == 0
    assert status("greet", "three") == 3
    assert greet.calls == [(["you"], 2, True), (["three"], 1, False)]


def test_help_of_a_command(greet: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("greet", "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: dhelix greet NAME")
    assert "--times=INT\n      how often (default: 1)" in text
    assert "--[no]loud" in text
    assert "--manners=A,B" in text and "(default: good,bad)" in text
    assert text.count("good-natured,") == 8  # lines do not break at hyphens, so names can be copied
    assert greet.calls == []
    assert status("help", "greet") == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--tims=2", "'tims'"),
        ("--times=0", "0 is not a positive integer"),
        ("--times=many", "flag --times=many: 'many' is not a whole number; see"),
        ("--share=half", "flag --share=half: 'half' is not a number; see"),
        ("--loud=very", "flag --loud=very: 'very' is neither true nor false; see"),
    ],
)
def test_bad_flags_are_one_line(greet: ModuleType, flag: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("greet", "you", flag) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and shown.startswith("dhelix greet: ") and says in shown
    assert "see `dhelix greet --help`" in shown


def test_an_error_of_dhelix_is_one_line_and_no_traceback(greet: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("greet") == 1
    assert capsys.readouterr().err == "dhelix greet: whom? name somebody\n"


def test_global_flags_stay_untouched(greet: ModuleType) -> None:
    assert status("greet", "you") == 0
    assert "times" not in flags.FLAGS


def test_help_needs_no_jax() -> None:
    code = (
        "import sys\nfrom dhelix.launch import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)


def test_help_may_be_read_in_part() -> None:
    help_ = [sys.executable, "-m", "dhelix", "shard", "--help"]
    with subprocess.Popen(help_, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_package_is_a_program() -> None:
    command = [sys.executable, "-m", "dhelix", "--help"]
    assert "usage: dhelix" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_missing_package_names_the_extra_that_brings_it(
    greet: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.import_module

    def without_flax(name: str) -> ModuleType:
        if name.endswith("greet.command"):
            raise ModuleNotFoundError("No module named 'flax.nnx'", name="flax.nnx")
        return find(name)

    monkeypatch.setattr(cli.importlib, "import_module", without_flax)
    assert status("greet", "me") == 1
    assert capsys.readouterr().err == "dhelix greet: needs the package flax: pip install 'dhelix[train]'\n"


def test_an_interrupted_command_ends_in_one_line(
    greet: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(greet, "run", interrupted)
    assert status("greet", "me") == 130
    assert capsys.readouterr().err == "dhelix greet: interrupted\n"
