"""Keys in their file, in a gateway's memory, and on the command line of a gateway that goes on running."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adapters.launching.recipes.native import gateway_config
from gateway.config import parse_config
from gateway.tenants.auth import check_exposure
from gateway.tenants.keys import KeyRing, KeysError, KeyStore, NewKey, digest
from gateway.tenants.limits import Limits
from tests.gateway.commands.test_commands import await_ready, goodgate, running, write_config
from tests.gateway.rig import HELLO, Start, fake_model, free_port, until

NOTICED_WITHIN_S = 1.0


def test_a_key_comes_back_as_it_was_made(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    limits = Limits(requests_per_min=1, tokens_per_min=2, concurrent=3)
    made = NewKey(name="a", tenant="t", role="admin", models=("x*", "y"), limits=limits, expires=time.time() + 60)
    secret = store.create(made)
    [key] = store.all()
    assert {name: getattr(key, name) for name in NewKey.__struct_fields__} == {
        name: getattr(made, name) for name in NewKey.__struct_fields__
    }
    ring = KeyRing(store)
    assert ring.find(secret, time.time()) == key
    assert ring.find(secret, time.time() + 61) is None
    ring.close()


def test_256_random_bits_of_a_key_are_never_twice_the_same(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    secrets = {store.create(NewKey(name=f"k{n}")) for n in range(50)}
    assert len({secret[:12] for secret in secrets}) == 50
    assert all(len(secret) == 46 and secret.startswith("gg-") for secret in secrets)


def test_only_the_owner_can_read_the_file_and_what_sqlite_puts_beside_it(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        store = KeyStore(tmp_path)
        store.create(NewKey(name="a"))
        ring = KeyRing(store)
        store.create(NewKey(name="b"))
        files = list(store.path.parent.iterdir())
        assert {file.name for file in files} >= {"keys.db", "keys.db-wal"}
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        ring.close()
    finally:
        os.umask(previous)


def test_a_name_is_one_live_key(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    first = store.create(NewKey(name="a"))
    with pytest.raises(KeysError, match="'a' already; choose another name, or rotate it"):
        store.create(NewKey(name="a"))
    store.revoke("a")
    for change in (store.revoke, store.rotate):
        with pytest.raises(KeysError, match="no key 'a'; `goodgate keys list`"):
            change("a")
    second = store.create(NewKey(name="a"))
    ring = KeyRing(store)
    assert [ring.find(secret, 0) is not None for secret in (first, second)] == [False, True]
    ring.close()


@pytest.mark.parametrize(
    "key",
    [
        NewKey(name=""),
        NewKey(name="a b"),
        NewKey(name="a\n"),
        NewKey(name="-a"),
        NewKey(name="x" * 65),
        NewKey(name="a", tenant="\x1b[31m"),
        NewKey(name="a", models=()),
        NewKey(name="a", models=("",)),
        NewKey(name="a", limits=Limits(concurrent=0)),
        NewKey(name="a", limits=Limits(tokens_per_min=2**40)),
    ],
)
def test_a_key_that_makes_no_sense_is_not_made(tmp_path: Path, key: NewKey) -> None:
    store = KeyStore(tmp_path)
    with pytest.raises(KeysError):
        store.create(key)
    assert store.all() == []


def test_a_quote_in_a_name_is_refused_and_none_is_ever_put_into_a_query(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.create(NewKey(name="a"))
    for change in (store.revoke, store.rotate):
        with pytest.raises(KeysError, match="no key"):
            change("a' OR '1'='1")
    assert [key.revoked for key in store.all()] == [None]


def test_a_file_that_is_no_database_shuts_the_gateway_and_says_so(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.path.parent.mkdir()
    store.path.write_bytes(b"not a database, and long enough to see that" * 100)
    for act in (store.all, lambda: KeyRing(store), lambda: store.create(NewKey(name="a"))):
        with pytest.raises(KeysError, match=r"keys\.db cannot be used: .*; restore the file"):
            act()
    result = goodgate("serve", "--config", str(write_config(tmp_path, fake_model())), home=tmp_path)
    assert (result.returncode, "cannot be used" in result.stderr, result.stderr.count("\n")) == (1, True, 1)


def test_a_file_of_a_newer_goodgate_is_left_alone(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.create(NewKey(name="a"))
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(KeysError, match="newer Goodgate"):
        store.all()


def test_keys_made_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        secrets = list(pool.map(lambda n: KeyStore(tmp_path).create(NewKey(name=f"k{n}")), range(24)))
    ring = KeyRing(KeyStore(tmp_path))
    keys = [ring.find(secret, 0) for secret in secrets]
    assert [key and key.name for key in keys] == [f"k{n}" for n in range(24)]
    ring.close()


async def test_a_running_gateway_follows_within_a_second(start: Start, tmp_path: Path) -> None:
    gateway = await start(fake_model())
    store = KeyStore(tmp_path)

    async def statuses(*secrets: str) -> list[int]:
        answers = [await gateway.post("/v1/chat/completions", HELLO, **{"x-api-key": each}) for each in secrets]
        return [status for status, _, _ in answers]

    async def becomes(expected: list[int], *secrets: str) -> None:
        deadline = time.monotonic() + NOTICED_WITHIN_S
        while (seen := await statuses(*secrets)) != expected:
            assert time.monotonic() < deadline, seen

    await becomes([200], "anything")
    first = store.create(NewKey(name="a"))
    await becomes([200, 401], first, "anything")
    second = store.create(NewKey(name="b"))
    await becomes([200, 200], first, second)
    renewed = store.rotate("a")
    await becomes([401, 200, 200], first, second, renewed)
    store.revoke("b")
    await becomes([401, 401, 200], first, second, renewed)
    store.revoke("a")
    await becomes([401, 401, 401], first, renewed, "anything")


async def test_a_gateway_whose_keys_are_all_revoked_or_whose_file_is_gone_stays_shut(
    start: Start, tmp_path: Path
) -> None:
    store = KeyStore(tmp_path)
    store.create(NewKey(name="a"))
    store.revoke("a")
    gateway = await start(fake_model())
    assert (await gateway.chat())[0] == 401
    for file in store.path.parent.iterdir():
        file.unlink()
    await until_noticed()
    assert (await gateway.chat())[0] == 401
    secret = store.create(NewKey(name="a"))
    await until_noticed()
    assert (await gateway.post("/v1/chat/completions", HELLO, **{"x-api-key": secret}))[0] == 200


async def test_a_file_that_breaks_while_serving_is_logged_once_and_known_keys_hold(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = KeyStore(tmp_path)
    secret = store.create(NewKey(name="a"))
    gateway = await start(fake_model())
    broken = tmp_path / "broken"
    broken.write_bytes(b"garbage" * 1000)
    broken.replace(store.path)
    await until(lambda: "the keys cannot be read" in caplog.text)
    await until_noticed()
    assert caplog.text.count("the keys cannot be read") == 1
    assert (await gateway.post("/v1/chat/completions", HELLO, **{"x-api-key": secret}))[0] == 200
    assert (await gateway.chat())[0] == 401


async def until_noticed() -> None:
    started = time.monotonic()
    await until(lambda: time.monotonic() - started > NOTICED_WITHIN_S)


@pytest.mark.slow
def test_the_commands_make_show_rotate_and_revoke_a_key_under_a_gateway_of_two_workers(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_model(), server={"port": free_port()}, health={"interval_s": 60})
    with running(config, "--workers", "2", home=tmp_path) as (_, url):
        await_ready(url)
        assert "goodgate keys create NAME" in goodgate("keys", "list", home=tmp_path).stderr
        words = ("--models", "m*,x", "--requests-per-min", "600", "--expires", "30d", "--tenant", "acme")
        made = goodgate("keys", "create", "alice", *words, home=tmp_path)
        assert made.returncode == 0
        first = made.stdout.strip()
        assert seen_by_all(url, {first: 200, "gg-x": 401})
        shown = goodgate("keys", "list", home=tmp_path).stdout
        assert "alice" in shown
        assert "acme" in shown
        assert first[3:12] not in shown
        assert digest(first).hex() not in shown
        second = goodgate("keys", "rotate", "alice", home=tmp_path).stdout.strip()
        assert seen_by_all(url, {first: 401, second: 200})
        asked = subprocess.run(
            [sys.executable, "-m", "goodgate", "chat", "--url", url, "Hello"],
            env={**os.environ, "GOODGATE_API_KEY": second}, capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        assert (asked.returncode, asked.stderr) == (0, "")
        assert goodgate("keys", "revoke", "alice", home=tmp_path).returncode == 0
        assert seen_by_all(url, {second: 401})
        assert "alice" not in goodgate("keys", "list", home=tmp_path).stdout
        assert "revoked" in goodgate("keys", "list", "--all", home=tmp_path).stdout


def seen_by_all(url: str, expected: dict[str, int]) -> bool:
    """Within a second every worker answers so: new connections reach them at random, and 30 of them all of them."""
    time.sleep(NOTICED_WITHIN_S)
    return all(status_of(url, secret) == status for secret, status in expected.items() for _ in range(15))


def status_of(url: str, secret: str) -> int:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(HELLO).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["create", "a b"], "is no name for a key"),
        (["create", "a", "--expires", "soon"], "'soon' is no time; write 90s, 15m, 12h or 30d."),
        (["create", "a", "--models", ""], "needs patterns"),
        (["revoke", "a"], "`goodgate keys create NAME` makes one"),
        (["rotate", "a"], "`goodgate keys create NAME` makes one"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_sentence_and_exit_1(
    tmp_path: Path, words: list[str], sentence: str
) -> None:
    result = goodgate("keys", *words, home=tmp_path)
    assert (result.returncode, result.stderr.count("\n"), result.stdout) == (1, 1, ""), result.stderr
    assert sentence in result.stderr


def test_every_command_of_keys_has_an_example(tmp_path: Path) -> None:
    for command in ("create", "list", "revoke", "rotate"):
        assert f"Example: goodgate keys {command}" in goodgate("keys", command, "--help", home=tmp_path).stdout


def test_a_launched_native_engine_asks_nobody_for_the_keys_of_the_gateway_in_front() -> None:
    config = parse_config(gateway_config("m", 1, {}))
    assert config.auth.required is False
    check_exposure(config, has_keys=False)


def test_serving_others_without_a_key_has_to_be_asked_for_by_name(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_model())
    refused = goodgate("serve", "--config", str(config), "--host", "0.0.0.0", home=tmp_path)
    assert (refused.returncode, "--open" in refused.stderr, refused.stderr.count("\n")) == (2, True, 1)
    with running(config, "--host", "0.0.0.0", "--open", home=tmp_path) as (_, url):
        await_ready(url)
    KeyStore(tmp_path).create(NewKey(name="a"))
    with running(config, "--host", "0.0.0.0", home=tmp_path) as (_, url):
        await_ready(url)
        assert status_of(url, "none") == 401
