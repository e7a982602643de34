"""The manifest of a folder: every file in it with its size and SHA-256, so that one changed byte is found and named.

    write_manifest(folder)            # after the last file has been written
    changed_files(folder)             # one sentence for each file that is not what it was; empty when all are

The raw files of a race, spools that are complete and the plans beside them, enter the manifest once and for good: a
later `write_manifest` keeps the digest that it finds, so writing a report anew never vouches for a spool that has
changed. The manifest itself is held to its canonical form and to the digest in it. A folder below that has a manifest
of its own, such as an export, speaks for itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from arena.load import spool as spools
from arena.load.spool import UNREADABLE

NAME = "manifest.json"
FORMAT = "goodgate-manifest/1"
SPOOL_FOLDER = "spool"


class FileDigest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    bytes: int
    sha256: str
    raw: bool = False  # of a cell that had ended: it stays as it is, for ever


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Paths are relative to the folder, with slashes. `digest` covers the rest in canonical JSON."""

    format: str = FORMAT
    files: dict[str, FileDigest]
    digest: str = ""

    def sealed(self) -> Manifest:
        body = msgspec.json.encode([self.format, self.files], order="sorted")
        return msgspec.structs.replace(self, digest=hashlib.sha256(body).hexdigest())

    def to_bytes(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n"


def write_manifest(folder: Path) -> None:
    """Vouch for the files as they are now, and for the raw ones as they were when they first were vouched for."""
    files = {name: digest_of(folder / name, raw=_is_raw(folder, name)) for name in _names(folder)}
    files.update({name: digest for name, digest in _already_vouched(folder).items() if digest.raw})
    put(folder, {NAME: Manifest(files=files).sealed().to_bytes()})


def put(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write these files, each whole or as it was: none is touched before there was room for all of them."""
    drafts = {folder / name: folder / f"{name}.{os.getpid()}.tmp" for name in contents}
    try:
        for (target, draft), content in zip(drafts.items(), contents.values(), strict=True):
            target.parent.mkdir(exist_ok=True)
            draft.write_bytes(content)
        for target, draft in drafts.items():
            draft.replace(target)
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


def changed_files(folder: Path) -> list[str]:
    try:
        content = (folder / NAME).read_bytes()
        manifest = msgspec.json.decode(content, type=Manifest)
    except FileNotFoundError:
        return [f"{NAME}: there is none, so nothing vouches for the files; `goodgate arena report` writes it."]
    except (OSError, *UNREADABLE) as error:
        return [f"{NAME} cannot be read: {error}"]
    if manifest.format != FORMAT:
        return [f"{NAME} has the format {manifest.format!r}, this program reads {FORMAT}."]
    complaints = []
    if content != manifest.sealed().to_bytes():
        complaints.append(f"{NAME} has changed since it was written: its own digest does not fit.")
    for name, vouched in sorted(manifest.files.items()):
        if not (folder / name).is_file():
            complaints.append(f"{name}: the file is gone.")
        elif digest_of(folder / name, raw=vouched.raw) != vouched:
            complaints.append(f"{name}: the file has changed since the manifest was written.")
    return complaints


def digest_of(path: Path, *, raw: bool = False) -> FileDigest:
    with path.open("rb") as file:
        return FileDigest(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest(), raw)


def _names(folder: Path) -> Iterator[str]:
    own = [path.parent for path in folder.rglob(NAME) if path.parent != folder]
    for path in sorted(folder.rglob("*")):
        speaks_for_itself = any(parent in own for parent in path.parents)
        if path.is_file() and path.suffix != ".tmp" and path.name != NAME and not speaks_for_itself:
            yield path.relative_to(folder).as_posix()


def _already_vouched(folder: Path) -> dict[str, FileDigest]:
    """What an earlier manifest says. One that was edited by hand vouches for nothing."""
    try:
        content = (folder / NAME).read_bytes()
        manifest = msgspec.json.decode(content, type=Manifest)
    except (FileNotFoundError, *UNREADABLE):
        return {}
    return manifest.files if content == manifest.sealed().to_bytes() else {}


def _is_raw(folder: Path, name: str) -> bool:
    """Whether it is the spool of a cell that has ended, or lies beside one."""
    place, _, file = name.partition("/")
    spool = folder / SPOOL_FOLDER / f"{file.partition('.jsonl')[0]}.jsonl"
    return place == SPOOL_FOLDER and spools.is_complete(spool)
