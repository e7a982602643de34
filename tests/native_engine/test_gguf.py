"""GGUF: what ggml's own Python package writes is read right, and what is broken is refused, never believed."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native_engine.block_formats import FORMATS
from native_engine.gguf import MAGIC, BadModelFile, GGUFFile

QUANTISED = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}


def write(path: Path, tensors: dict[str, tuple[np.ndarray[Any, Any], str]], **fields: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", fields.get("blocks", 2))
    writer.add_float32("llama.rope.freq_base", 1e5)
    writer.add_bool("flag", True)
    writer.add_string("text", "naïve 😀")
    writer.add_array("tokens", ["a", "b", ""])
    writer.add_array("types", [1, 3, -1])
    for name, (values, kind) in tensors.items():
        quantised = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def matrix(rows: int = 3, columns: int = 64) -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).normal(size=(rows, columns)).astype(np.float32)


def test_metadata_comes_back_as_plain_python_values(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "m.gguf", {"w": (matrix(), "F32")}))
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["llama.rope.freq_base"] == 1e5
    assert file.metadata["flag"] is True
    assert file.metadata["text"] == "naïve 😀"
    assert file.metadata["tokens"] == ["a", "b", ""]
    assert file.metadata["types"] == [1, 3, -1]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", *QUANTISED])
def test_each_format_dequantises_to_the_bits_that_ggml_gives(tmp_path: Path, kind: str) -> None:
    values = matrix()
    file = GGUFFile(write(tmp_path / "m.gguf", {"first": (matrix(5, 32), "Q8_0"), "w": (values, kind)}))
    number = gguf.GGMLQuantizationType[kind]
    expected = gguf.dequantize(gguf.quantize(values, number), number)
    result = file.tensor("w").numpy()
    assert result.shape == (3, 64)
    assert np.array_equal(result, expected)
    assert np.abs(result - values).max() < (0.5 if kind in QUANTISED else 0.02)


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"]
)
def test_blocks_of_any_bytes_dequantise_to_the_bits_that_ggml_gives(kind: str) -> None:
    """Every bit of a block takes part: random bytes, but for the fp16 scales, which are any finite number."""
    number = gguf.GGMLQuantizationType[kind]
    block_format = FORMATS[int(number)]
    assert (block_format.name, block_format[1:3]) == (kind, gguf.GGML_QUANT_SIZES[number])
    source = np.random.default_rng(len(kind) + int(number))
    blocks = source.integers(0, 256, (1000, block_format.block_bytes), dtype=np.uint8)
    for at in SCALES.get(kind, (0,)):
        scales = source.normal(scale=10.0 ** source.integers(-6, 3, (1000, 1))).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    result = block_format.dequantise(blocks)
    assert result.dtype == np.float32
    assert np.array_equal(result, gguf.dequantize(blocks, number))


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "m.gguf", {"w": (matrix(), "F32")}))
    with pytest.raises(BadModelFile, match="no tensor 'nope'"):
        file.tensor("nope")


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file of some kind"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(BadModelFile, match=r"m\.gguf"):
        GGUFFile(path)
    with pytest.raises(BadModelFile):
        GGUFFile(tmp_path / "missing.gguf")


def test_a_version_or_a_tensor_type_that_we_do_not_know_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", {"w": (matrix(), "F32")})
    content = bytearray(path.read_bytes())
    content[4:8] = (99).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(BadModelFile, match="version 99"):
        GGUFFile(path)
    values = np.random.default_rng(1).integers(0, 255, (2, 54), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", values, raw_dtype=gguf.GGMLQuantizationType.TQ1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BadModelFile, match="'w' has ggml type 34; the types we read are BF16, F16"):
        GGUFFile(path)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    """A download that broke off: no prefix of a model passes for a model."""
    content = write(tmp_path / "m.gguf", {"w": (matrix(), "Q4_1")}).read_bytes()
    cut = tmp_path / "cut.gguf"
    data_end = len(content.rstrip(b"\0"))
    for length in range(0, data_end, 7):
        cut.write_bytes(content[:length])
        with pytest.raises(BadModelFile):
            GGUFFile(cut)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_the_header_gets_past_the_bounds_checks(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "m.gguf"
    if not path.exists():
        write(path, {"w": (matrix(), "Q4_1"), "v": (matrix(1, 32), "F16")})
    content = bytearray(path.read_bytes())
    damaged = tmp_path / "damaged.gguf"
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 420))] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    damaged.write_bytes(content)
    try:
        file = GGUFFile(damaged)
    except BadModelFile:
        return
    for name, info in file.tensors.items():  # whatever was accepted lies inside the file
        assert file.tensor(name).shape == info.shape


def test_an_array_that_would_blow_up_in_memory_is_refused(tmp_path: Path) -> None:
    """A flipped bit in an array's type or length turns weights into a Python list of ten times their size."""
    path = tmp_path / "m.gguf"
    key = b"tokens"
    header = (
        MAGIC + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 0, 5_000_000)
    )
    path.write_bytes(header + bytes(6_000_000))
    with pytest.raises(BadModelFile, match="an array of 5000000 items"):
        GGUFFile(path)
