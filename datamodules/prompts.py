"""Prompt files: one prompt a line (``.txt``) or one JSON object a line (``.jsonl``, GenEval's ``*_metadata.jsonl``).

A file is UTF-8, with or without a byte order mark, with Unix or Windows line ends. Blank lines are skipped. Text is
kept as it is written: no Unicode normalisation, no de-duplication, no re-ordering. Whatever is wrong with a file is a
``ValueError`` that names the file, the line and the remedy; a file is accepted as a whole or not at all.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE_ROOT = Path(__file__).resolve().parent.parent
"""Folder that holds the package ``datamodules``: the repository, or site-packages where it is installed."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One line of a prompt file."""

    text: str
    """The prompt, never blank."""
    metadata: dict[str, Any]
    """The whole row of a ``.jsonl`` file, ``prompt`` included; ``{"prompt": text}`` for a ``.txt`` file."""


def load_prompts(path: str | Path) -> list[Prompt]:
    """Every prompt of a ``.txt`` or ``.jsonl`` file, in the file's order, at least one.

    Prompts that occur several times are kept, with one warning that counts them. Errors: ``ValueError`` on a file that
    is missing, unreadable, empty, of another type, not UTF-8, or has a line that is no prompt.
    """
    file = find_prompt_file(path)
    prompts = [_parse(line, file, number) for number, line in _lines(file)]
    if not prompts:
        raise ValueError(f"{file} holds no prompt: write at least one, each on a line of its own")
    _warn_of_duplicates(prompts, file)
    return prompts


def find_prompt_file(path: str | Path) -> Path:
    """``path`` as it is or, where a relative path does not exist from the working directory, relative to the folder of
    the packages, so that a config works from anywhere. Errors: ``ValueError`` naming every place that was tried."""
    given = Path(path).expanduser()
    if given.suffix.lower() not in (".txt", ".jsonl"):
        raise ValueError(f"prompt file {str(path)!r}: give a .txt (a prompt a line) or .jsonl (an object a line) file")
    candidates = list(dict.fromkeys((given.absolute(), PACKAGE_ROOT / given)))
    for candidate in candidates:
        if candidate.is_file():
            return candidate
        if candidate.exists():
            raise ValueError(f"prompt file {candidate} is not a regular file: give the path of a file")
    raise ValueError(f"prompt file not found, looked for {' and '.join(map(str, candidates))}: correct the path")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """1-based number and text of every line that is not blank. Only a line feed, with or without a carriage return
    before it, ends a line: JSON strings may hold the other separators that ``str.splitlines`` splits at."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read prompt file {file}: {error.strerror}; check its permissions") from error
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file}, line {number}: byte {error.start} ({error.object[error.start]:#04x}) is not UTF-8; "
                "save the file as UTF-8"
            ) from error
        if line:
            yield number, line


def _parse(line: str, file: Path, number: int) -> Prompt:
    where = f"{file}, line {number}"
    row = _json_object(line, where) if file.suffix.lower() == ".jsonl" else {"prompt": line}
    if "prompt" not in row:
        raise ValueError(f"{where}: no field 'prompt' among {sorted(row)}; every row needs one")
    text = row["prompt"]
    if not isinstance(text, str):
        raise ValueError(f"{where}: 'prompt' is {_shorten(repr(text))}; write it as a string")
    if not text.strip():
        raise ValueError(f"{where}: 'prompt' is blank; write a prompt or delete the line")
    check_characters(text, where)
    return Prompt(text=text, metadata=row)


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # nested a thousand deep: RecursionError
        raise ValueError(f"{where}: not valid JSON ({error}); write one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: {_shorten(line)} is no JSON object; write {{"prompt": ...}}')
    return row


def check_characters(text: str, where: str) -> None:
    """A NUL (often: a file saved as UTF-16) or half a surrogate pair would only fail later, inside a tokenizer. Errors:
    ``ValueError`` that begins with ``where``."""
    for character in text:
        if character == "\0" or "\ud800" <= character <= "\udfff":
            raise ValueError(f"{where}: the prompt holds U+{ord(character):04X}, which is no text; save as UTF-8 text")


def _warn_of_duplicates(prompts: list[Prompt], file: Path) -> None:
    repeats = len(prompts) - len({prompt.text for prompt in prompts})
    if repeats:
        warnings.warn(
            f"{file}: {repeats} of {len(prompts)} prompts repeat an earlier one and are kept; delete them "
            "unless they are meant to be drawn more often",
            stacklevel=3,
        )


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
