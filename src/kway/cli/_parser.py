"""Arguments of a command: argparse, whose errors are ``UsageError`` in one line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kway.cli._synonyms import in_a_job, meant_by
from kway.errors import UsageError
from kway.registry import closest


class Parser(argparse.ArgumentParser):
    """A parser that raises ``UsageError`` where argparse prints its usage and exits.

    Flags are not abbreviated. ``type=int`` and ``type=float`` say which number is needed. Texts (no ``type``) and paths
    may not be blank: an unset variable of a shell would else mean the default, or the folder one is in.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, exit_on_error=False, **options)
        self.register("type", int, _whole)
        self.register("type", float, _number)
        self.register("type", None, _text)
        self.register("type", Path, _path)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments in ``words``. Raises ``UsageError``, and ``SystemExit`` after help and version."""
        try:
            args, left = self.parse_known_args(list(words))
        except argparse.ArgumentError as error:
            missing = error.message.partition("arguments are required: ")[2].split(", ")
            if missing == [""]:
                raise UsageError(
                    f"{error.argument_name or ''} {error.message}".strip(), "", self._see
                ) from None
            # A flag that was mistyped is missing under its right name.
            self._refuse(words)
            raise UsageError(f"{missing[0]} is missing", self._meaning(missing[0]), self._see) from None
        self._refuse(left)
        if left:
            raise UsageError(f"{left[0]!r} is one argument too many", "", self._see)
        return args

    def error(self, message: str) -> Any:
        """Raise what ``read`` turns into a ``UsageError``: older versions of argparse end the process here."""
        raise argparse.ArgumentError(None, message)

    @property
    def _see(self) -> str:
        return f"see {self.prog} --help"

    def _refuse(self, words: Sequence[str]) -> None:
        """Raise ``UsageError`` for the first of ``words`` that looks like a flag and is none."""
        known = [flag for action in self._actions for flag in action.option_strings]
        flags = (word.partition("=")[0] for word in words if word.startswith("-") and _is_text(word))
        for flag in flags:
            if flag not in known:
                meant = meant_by(flag, known)
                if meant is None and "--optimizer" in known and (why := in_a_job(flag)) is not None:
                    raise UsageError(
                        f"unknown flag {flag}",
                        why,
                        f"make a Job in a file of your own (docs/guide/your-own-model.md): {self.prog} file.py:name",
                    )
                near = meant if meant is not None else closest(flag, known)
                advice = f"did you mean {near}? " if near is not None else ""
                raise UsageError(f"unknown flag {flag}", "", advice + self._see)

    def _meaning(self, name: str) -> str:
        named = (a for a in self._actions if name in ("/".join(a.option_strings), a.metavar))
        return next((action.help or "" for action in named), "")


def _is_text(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return word not in ("-", "--")
    return False


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shown(text)}: it must be a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{_shown(text)}: it must be a number") from None


def _shown(text: str) -> str:
    return text if text.strip() else repr(text)  # of nothing, or of blanks, nothing would be seen


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(
            f"{text!r}: it must not be empty; leave the flag out, or name something"
        )
    return text


def _path(text: str) -> Path:
    return Path(_text(text))
