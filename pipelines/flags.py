"""What the flags of several commands share, and how the command line says what is wrong with its words."""

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Refuses wrong words in one line, with the word that was probably meant; its subparsers do as well."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*arguments, **settings)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does, but refuses what is left over here, where it is known which options there are."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            hint = _suggestion(rest[0].partition("=")[0], options) if rest[0].startswith("-") else ""
            self.error(f"{' '.join(rest)}: is not understood{hint}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        """Ends the process with 2."""
        if match := re.fullmatch(r"argument (.+): invalid choice: '(.*)' \(choose from (.*)\)", message):
            what, word, choices = match[1], match[2], match[3].replace("'", "")
            message = f"{what} = {word}: must be one of {choices}{_suggestion(word, choices.split(', '))}"
        message = re.sub(r"^the following arguments are required: (.*)", r"\1: is missing", message)
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _suggestion(word: str, known: list[str]) -> str:
    from trainer.config.section import suggestion  # loads pydantic, which a word that is right does not wait for

    return suggestion(word, known)


def exit_codes(failed: str = "failed", blessed: bool = False, interrupted: str = "interrupted (Ctrl-C)") -> str:
    """The end of a command's help.

    Args:
        failed: What 1 means.
        blessed: Whether it has --fail-unless-blessed.
        interrupted: What 130 means.
    """
    three = "\n            3 not blessed (with --fail-unless-blessed)," if blessed else ""
    return f"exit codes: 0 done, 1 {failed}, 2 bad input,{three}\n            130 {interrupted}, 143 ended by SIGTERM"


def count(text: str) -> int:
    """A whole number of a flag, at least 1."""
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if not 1 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1 to 1,000,000")
    return number
