"""Official prompt sets, fetched once, checked, and written in a form that ``datamodules.prompts`` reads.

``python -m datamodules.prepare geneval --to data`` (or ``hpdv2``, ``drawbench``); ``--from`` takes a local copy of the
official files, for a machine without network.

* ``geneval``: the 553 evaluation prompts of GenEval (Ghosh et al. 2023, arXiv:2310.11513), ``evaluation_metadata.jsonl``
  of the public repository djghosh13/geneval; written unchanged as ``geneval_metadata.jsonl``; checked by SHA-256.
* ``hpdv2``: the benchmark prompts of HPDv2 (Wu et al. 2023, arXiv:2306.09341), ``benchmark/{style}.json`` of the hub's data
  set zhwang/HPDv2; written as ``hpdv2.jsonl``, style after style, each row with its ``style``; 4 styles of 800 prompts.
* ``drawbench``: DrawBench (Saharia et al. 2022, arXiv:2205.11487), its authors' public spreadsheet as CSV; written as
  ``drawbench.jsonl``, each row with its ``category``; 200 prompts in 11 categories.

For HPDv2 and DrawBench no checksum is published. What was got is written beside the prompts (``<name>.source.json``) with
its SHA-256, and a later run into the same folder accepts no other files.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import http.client
import io
import json
import sys
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.prompts import check_characters
from datamodules.write_file import write_file

STYLES = ("anime", "concept-art", "paintings", "photo")
"""HPDv2's, in the order of the written file."""
CATEGORIES = (
    "Colors",
    "Conflicting",
    "Counting",
    "DALL-E",
    "Descriptions",
    "Gary Marcus et al.",
    "Misspellings",
    "Positional",
    "Rare Words",
    "Reddit",
    "Text",
)
"""DrawBench's."""

_TIMEOUT_S = 60.0
_MOST_BYTES = 16 * 2**20

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One official file."""

    name: str
    """Its name, also in a local copy."""
    url: str
    sha256: str | None = None
    """In hexadecimal, where it is known."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """A prompt set and how to read it."""

    sources: tuple[Source, ...]
    output: str
    """Name of the written file."""
    read: Callable[[dict[str, bytes]], list[Row]]
    """The official files by name -> rows, each with a ``prompt``; ``ValueError`` on anything unexpected."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What was written."""

    file: Path
    prompts: int
    sha256: dict[str, str]
    """Of every official file, by name."""
    verified: bool
    """Were all of them compared with a known checksum?"""


def prepare(name: str, folder: str | Path, local: str | Path | None = None) -> Prepared:
    """Get, check and write the prompt set ``name`` into ``folder``.

    Args:
        name: one of :data:`SETS`.
        folder: where to write; made if need be.
        local: a folder that holds the official files, or the file itself of a set that has one; ``None``: the network.

    Errors: ``ValueError`` on files that cannot be had, or are truncated or altered; nothing is written then.
    """
    if name not in SETS:
        raise ValueError(f"prompt set {name!r}: choose one of {', '.join(SETS)}")
    wanted = SETS[name]
    contents = {source.name: _obtain(source, name, local) for source in wanted.sources}
    digests = {source.name: _check(source, contents[source.name]) for source in wanted.sources}
    rows = wanted.read(contents)
    for number, row in enumerate(rows, start=1):
        check_characters(row["prompt"], f"{name}, prompt {number}")
    file = Path(folder) / wanted.output
    record = file.with_suffix(".source.json")
    _check_record(record, digests)
    described = {
        "set": name,
        "prompts": len(rows),
        "files": [
            {
                "name": source.name,
                "url": source.url,
                "sha256": digests[source.name],
                "known_sha256": bool(source.sha256),
            }
            for source in wanted.sources
        ],
    }
    write_file(file, b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
    write_file(record, json.dumps(described, indent=2).encode() + b"\n")
    verified = all(source.sha256 for source in wanted.sources)
    return Prepared(file=file, prompts=len(rows), sha256=digests, verified=verified)


def _obtain(source: Source, name: str, local: str | Path | None) -> bytes:
    if local is None:
        return _download(source, name)
    file = Path(local).expanduser()
    if file.is_dir():
        file = file / source.name
    elif len(SETS[name].sources) > 1:
        raise ValueError(f"{file} is no folder: give one that holds {', '.join(s.name for s in SETS[name].sources)}")
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file} ({error.strerror}): give a copy of {source.url}") from error


def _download(source: Source, name: str) -> bytes:
    remedy = f"download it elsewhere as {source.name} and give its folder: `python -m datamodules.prepare {name} --from FOLDER`"
    request = urllib.request.Request(source.url, headers={"User-Agent": "leangrpo"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            content = answer.read(_MOST_BYTES + 1)
            rest = answer.length  # bytes announced and not sent
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"cannot download {source.url} ({error}); {remedy}") from error
    if rest:
        raise ValueError(f"{source.url} broke off {rest} bytes before its end, or is too large; {remedy}")
    return content


def _check(source: Source, content: bytes) -> str:
    """The SHA-256 of ``content``, in hexadecimal. Errors: ``ValueError`` if it is known to be another."""
    digest = hashlib.sha256(content).hexdigest()
    if source.sha256 not in (None, digest):
        raise ValueError(
            f"{source.name} is truncated or altered: its SHA-256 is {digest} ({len(content)} bytes), the official file's "
            f"{source.sha256}; get it again from {source.url}"
        )
    return digest


def _check_record(record: Path, digests: dict[str, str]) -> None:
    """Errors: ``ValueError`` if an earlier run into this folder got other files."""
    if not record.exists():
        return
    try:
        earlier = {file["name"]: file["sha256"] for file in json.loads(record.read_bytes())["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{record} is unreadable ({error!r}): delete it to prepare the prompts anew") from error
    for name, digest in digests.items():
        if earlier.get(name, digest) != digest:
            raise ValueError(
                f"{name} has SHA-256 {digest}, but {record} says that an earlier run got {earlier[name]}: the official file "
                "changed, or one of the two is altered; delete the record to accept the new one"
            )


def _read_geneval(files: dict[str, bytes]) -> list[Row]:
    (content,) = files.values()
    return [json.loads(line) for line in content.decode().splitlines()]


def _read_hpdv2(files: dict[str, bytes]) -> list[Row]:
    rows = []
    for style, (name, content) in zip(STYLES, files.items(), strict=True):
        try:
            prompts = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is truncated or altered: no JSON ({error}); get it again") from error
        if not isinstance(prompts, list) or not all(isinstance(p, str) and p.strip() for p in prompts):
            raise ValueError(f"{name} is altered: expected a list of prompts; get it again")
        if len(prompts) != 800:
            raise ValueError(f"{name} holds {len(prompts)} prompts, the official file 800: get it again")
        rows += [{"prompt": prompt, "style": style} for prompt in prompts]
    return rows


def _read_drawbench(files: dict[str, bytes]) -> list[Row]:
    ((name, content),) = files.items()
    try:
        table = list(csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{name} is truncated or altered: no CSV ({error}); get it again") from error
    header = [field.strip().lower() for field in table[0]] if table else []
    if header.count("prompts") != 1 or header.count("category") != 1:
        raise ValueError(f"{name} has the columns {header}: expected Prompts and Category once each; get it again")
    rows = []
    for fields in table[1:]:
        row = dict(zip(header, fields, strict=False))
        if any(fields):  # spreadsheets may end in empty lines
            rows.append({"prompt": row.get("prompts", ""), "category": row.get("category", "")})
    blank = sum(not row["prompt"].strip() for row in rows)
    categories = {row["category"] for row in rows}
    if len(rows) != 200 or blank or categories != set(CATEGORIES):
        raise ValueError(
            f"{name} is truncated or altered: {len(rows)} prompts ({blank} blank) in the categories {sorted(categories)}; the "
            f"official file has 200 in {sorted(CATEGORIES)}; get it again"
        )
    return rows


SETS = {
    "geneval": PromptSet(
        sources=(
            Source(
                name="evaluation_metadata.jsonl",
                url="https://raw.githubusercontent.com/djghosh13/geneval/main/prompts/evaluation_metadata.jsonl",
                sha256="5c48e0813e812e3c373fa5c8ed07a8f0a483be30272b4427b0559c8048e67c13",
            ),
        ),
        output="geneval_metadata.jsonl",
        read=_read_geneval,
    ),
    "hpdv2": PromptSet(
        sources=tuple(
            Source(
                name=f"{style}.json",
                url=f"https://huggingface.co/datasets/zhwang/HPDv2/resolve/main/benchmark/{style}.json",
            )
            for style in STYLES
        ),
        output="hpdv2.jsonl",
        read=_read_hpdv2,
    ),
    "drawbench": PromptSet(
        sources=(
            Source(
                name="drawbench.csv",
                url="https://docs.google.com/spreadsheets/d/1y7nAbmR4FREi6npB1u-Bo3GFdwdOPYJc617rBOxIRHY/gviz/tq?tqx=out:csv",
            ),
        ),
        output="drawbench.jsonl",
        read=_read_drawbench,
    ),
}
"""By name."""


def main(args: Sequence[str] | None = None) -> int:
    """The command; returns its exit code, 1 with the reason if nothing was written."""
    parser = argparse.ArgumentParser(
        prog="python -m datamodules.prepare", description="Get an official prompt set and check it."
    )
    parser.add_argument("name", choices=SETS)
    parser.add_argument("--to", required=True, type=Path, metavar="FOLDER", help="where to write")
    parser.add_argument("--from", dest="local", type=Path, metavar="LOCAL", help="a local copy; default: the network")
    options = parser.parse_args(args)
    try:
        prepared = prepare(options.name, options.to, options.local)
    except ValueError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    print(f"{prepared.prompts} prompts, written to {prepared.file}")
    for name, digest in prepared.sha256.items():
        print(f"  {name}  SHA-256 {digest}")
    if prepared.verified:
        print("  equal to the official file's")
    else:
        print(
            "  no official checksum is known: the format and the number of prompts were checked, and the above recorded"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
