"""What a race notes of its machine, and when two machines are of one kind."""

from __future__ import annotations

from pathlib import Path

from arena.race.config import fingerprint, gpu_facts


def card(folder: Path, slot: str, model: str) -> None:
    (folder / slot).mkdir(parents=True)
    (folder / slot / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 71\n")


def test_cards_are_named_as_their_driver_names_them_and_equal_ones_are_counted(tmp_path: Path) -> None:
    assert gpu_facts(tmp_path) == {}
    for slot, model in (("0000:01:00.0", "NVIDIA H200"), ("0000:02:00.0", "NVIDIA L4"), ("0000:03:00.0", "NVIDIA L4")):
        card(tmp_path, slot, model)
    assert gpu_facts(tmp_path) == {"gpu": "NVIDIA H200, 2 x NVIDIA L4"}


def test_a_card_makes_another_kind_of_machine_and_none_leaves_old_names_as_they_were() -> None:
    host = {"cpu": "EPYC", "cores": 2, "memory_gib": 15.3, "load_1m": 0.1}
    assert fingerprint(host) == "8cbee0ca8855"  # in evidence that is out there
    assert fingerprint({**host, "load_1m": 9.0}) == fingerprint(host)
    assert len({fingerprint(host), fingerprint({**host, "gpu": "L4"}), fingerprint({**host, "cores": 4})}) == 3
