"""What a bridge is told at its start: what cannot be is refused before anything is begun."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ipcsync.cli.output import Failed, WrongCall
from ipcsync_bridge.config import Settings, load

_ROOT = Path(__file__).parents[3] / "services" / "ipcsync_bridge"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"node": "no.body"}, "--node is 1 to 63 letters"),
        ({"fleet": ""}, "--fleet is 1 to 63 letters"),
        ({"link_ttl": 0.5}, "--link-ttl is from 1"),
        ({"link_ttl": float("nan")}, "--link-ttl is from 1"),
        ({"servers": ()}, "at least one server"),
        ({"servers": ("http://x:1",)}, "a server is nats://"),
        ({"servers": ("nats://127.0.0.1:0",)}, "a server is nats://"),
        ({"servers": ("nats://127.0.0.1:99999",)}, "a server is nats://"),
        ({"servers": ("nats://127.0.0.1:abc",)}, "a server is nats://"),
        ({"servers": ("nats://[::1",)}, "a server is nats://"),
        ({"servers": ("nats://10.0.0.1:4222",)}, "in the clear"),
        ({"servers": ("nats://nats.example:4222",)}, "in the clear"),
        ({"servers": ("tls://10.0.0.1:4222",)}, "needs --tls-ca"),
        ({"servers": ("nats://u:p@127.0.0.1:1",)}, "no password"),
        ({"tls_ca": "/nowhere"}, "there is no file"),
        ({"credentials": "/nowhere"}, "cannot read"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Settings(**{"node": "a", "servers": ("nats://127.0.0.1:4222",), **options})


def test_a_secret_that_others_can_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "node.creds"
    secret.write_text("x")
    secret.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others"):
        Settings("a", ("nats://127.0.0.1:4222",), credentials=str(secret))
    secret.chmod(0o600)
    Settings("a", ("nats://127.0.0.1:4222",), credentials=str(secret))


def test_a_key_without_its_certificate_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "node.key"
    key.touch(0o600)
    with pytest.raises(ValueError, match="--tls-key needs --tls-cert"):
        Settings("a", ("nats://127.0.0.1:4222",), tls_key=str(key))


def test_a_runtime_directory_below_one_that_was_removed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    with pytest.raises(WrongCall, match=r"^run is relative to a directory that was removed$"):
        load({"node": "a", "servers": ("nats://127.0.0.1:4222",), "runtime_dir": "run"})


def test_loopback_and_what_is_said_to_be_insecure_need_no_tls() -> None:
    for server in ("nats://127.0.0.1:4222", "nats://[::1]:4222", "nats://localhost:4222"):
        Settings("a", (server,))
    Settings("a", ("nats://10.0.0.1:4222",), insecure=True)


def test_exports_are_by_prefix_and_everything_without_one() -> None:
    assert Settings("a", ("nats://127.0.0.1:1",)).exports_name("")
    some = Settings("a", ("nats://127.0.0.1:1",), exports=("kv/", "w"))
    assert [some.exports_name(name) for name in ("kv/1", "w", "k", "")] == [True, True, False, False]


def test_wall_clock_is_not_read() -> None:
    """No decision of a bridge depends on what time it is, so nothing in it asks, but the doctor about certificates."""
    for path in {*_ROOT.glob("*.py")} - {_ROOT / "doctor.py"}:
        text = path.read_text()
        found = re.search(r"time\.time\b|datetime|gmtime|localtime|time_ns\(\)(?<!monotonic_ns\(\))", text)
        assert found is None, f"{path.name}: {found and found[0]}"


def test_credentials_without_nkeys_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nats", reason="nats-py is not installed: pip install -e '.[fleet]'")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(Failed, match=re.escape("pip install 'nats-py[nkeys]'")):
        load({"node": "a", "servers": ("nats://127.0.0.1:4222",), "credentials": "node.creds"})
