"""The command line's words: every option explains itself, and a wrong word is refused in one line."""

import argparse

import pytest

from pipelines.cli import _parser, main


def parsers(parser: argparse.ArgumentParser):
    """A parser and all below it."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


COMMANDS = {parser.prog: parser for parser in parsers(_parser())}
LEAVES = {
    name: parser
    for name, parser in COMMANDS.items()
    if not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions)
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text_with_its_default(name: str) -> None:
    for action in COMMANDS[name]._actions:
        if isinstance(action, argparse._SubParsersAction):
            assert all(choice.help for choice in action._choices_actions)
            continue
        assert action.help, action
        if action.option_strings and action.default not in (None, False, argparse.SUPPRESS, []):
            assert "%(default)s" in action.help, action


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_says_its_exit_codes_and_what_it_does(name: str) -> None:
    text = LEAVES[name].format_help()
    assert "exit codes: 0 done, 1 " in text
    assert LEAVES[name].description
    assert ("3 not blessed" in text) == ("--fail-unless-blessed" in text)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("subit x", "trireme: COMMAND = subit: must be one of run, check,"),
        (
            "runs shw x",
            "trireme runs: VERB = shw: must be one of list, show, cancel, retry, watch; did you mean show?;",
        ),
        ("models lst", "trireme models: ACTION = lst: must be one of"),
        ("schedule", "trireme schedule: VERB: is missing; see trireme schedule --help"),
        (
            "run x --runer docker",
            "trireme run: --runer docker: is not understood; did you mean --runner?; see trireme run",
        ),
        ("run x y", "trireme run: y: is not understood; see trireme run --help"),
        (
            "run x --runner dokcer",
            "trireme run: --runner = dokcer: must be one of subprocess, docker; did you mean docker?",
        ),
        ("runs list x -n 0", "trireme runs list: argument -n: '0': must be a whole number from 1 to 1,000,000"),
    ],
)
def test_a_wrong_word_is_refused_in_one_line(words: str, line: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(words.split())
    told = capsys.readouterr()
    assert leaving.value.code == 2
    assert told.out == ""
    assert told.err.startswith(line)
    assert told.err.count("\n") == 1
