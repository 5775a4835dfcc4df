"""Mutual TLS and permissions by subject, with the configuration that is shipped."""

from __future__ import annotations

import asyncio
import gc
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ipcsync
from ipcsync_bridge.config import Settings
from tests.fleet.nodes import Node, Server, why_not
from tests.fleet.test_commands import examine
from tests.kit.until import DEADLINE_S

pytestmark = [pytest.mark.process, pytest.mark.thorough]

_CONFIG = Path(__file__).parents[2] / "deploy" / "nats" / "nats-server.conf"

_AUTHORITY = "keyUsage=critical,keyCertSign"  # without it Python takes no authority's certificate, from 3.13 on


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)


class Authority:
    """A certificate authority of the test's own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        _openssl(directory, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem",
                 "-days", "2", "-subj", "/CN=a fleet's authority", "-addext", _AUTHORITY)  # fmt: skip
        self.issue("server", "subjectAltName=IP:127.0.0.1")

    def issue(self, name: str, extension: str = "extendedKeyUsage=clientAuth") -> None:
        """A key, and a certificate for it whose name is `name`."""
        (self.directory / f"{name}.ext").write_text(f"{extension}\nauthorityKeyIdentifier=keyid\n")
        _openssl(self.directory, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out",
                 f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        _openssl(self.directory, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                 "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", f"{name}.ext")  # fmt: skip
        (self.directory / f"{name}.key").chmod(0o600)

    def flags(self, name: str) -> list[str]:
        """What a bridge is told to be `name`."""
        path = self.directory
        return ["--tls-ca", f"{path}/ca.pem", "--tls-cert", f"{path}/{name}.pem", "--tls-key", f"{path}/{name}.key"]

    def context(self, name: str | None) -> ssl.SSLContext:
        """For a client that is no bridge; without a certificate if `name` is None."""
        context = ssl.create_default_context(cafile=self.directory / "ca.pem")
        if name is not None:
            context.load_cert_chain(self.directory / f"{name}.pem", self.directory / f"{name}.key")
        return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    reason = why_not() or (None if shutil.which("openssl") else "there is no openssl: apt-get install openssl")
    if reason:
        pytest.skip(reason)
    one = Authority(tmp_path / "tls")
    for name in ("prefill-0", "decode-0", "stranger"):
        one.issue(name)
    return one


@pytest.fixture
def server(authority: Authority, tmp_path: Path) -> Iterator[Server]:
    text = _CONFIG.read_text().replace("port: 4222", "")
    for name in ("server.pem", "server.key", "ca.pem"):
        text = text.replace(f'"{name}"', f'"{authority.directory / name}"')
    text = text.replace('store_dir: "/var/lib/nats"', "")  # which the command line says
    (tmp_path / "nats.conf").write_text(text)
    one = Server(tmp_path, "-c", str(tmp_path / "nats.conf"))
    yield one
    one.kill()


@pytest.fixture
def new_node(server: Server, authority: Authority) -> Iterator[Callable[[str], Node]]:
    made: list[Node] = []

    def start(name: str) -> Node:
        made.append(Node(name, [server.url.replace("nats://", "tls://")], *authority.flags(name)))
        made[-1].start_bridge()
        return made[-1]

    yield start
    for node in made:
        node.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_permissions(server: Server, authority: Authority, new_node: Callable[[str], Node]) -> None:
    nodes = [new_node("prefill-0"), new_node("decode-0")]
    for node in nodes:
        node.await_bridge()
    prefill, decode = (node.client() for node in nodes)
    event = prefill.event("kv", recorder=True, fleet=True)
    event.record(ipcsync.Stream())
    decode.event("kv", node="prefill-0").at(1).synchronize(DEADLINE_S)
    decode.event("kv", fleet=True).at(1).synchronize(DEADLINE_S)
    assert {row.name for row in decode.nodes()} == {"prefill-0", "decode-0"}
    asyncio.run(_try_what_is_forbidden(server, authority))
    gc.collect()  # nats-py leaves the sockets of what was refused to the collector, and so to a later test


async def _try_what_is_forbidden(server: Server, authority: Authority) -> None:
    import nats

    errors: asyncio.Queue[str] = asyncio.Queue()

    async def failed(error: Exception) -> None:
        errors.put_nowait(str(error).lower())

    async def ignore(_message: object) -> None:
        raise AssertionError("it heard what is another node's")

    url = server.url.replace("nats://", "tls://")
    client = await nats.connect(
        url, tls=authority.context("decode-0"), error_cb=failed, inbox_prefix=b"_INBOX_decode-0", allow_reconnect=False
    )
    for subject in (
        "ipcsync.main.decode-0.ask.prefill-0",  # as another node
        "$KV.ipcsync_main.nodes.prefill-0",  # another node's key
        "$JS.API.STREAM.DELETE.KV_ipcsync_main",
        "$JS.API.STREAM.PURGE.KV_ipcsync_main",
        "$JS.API.CONSUMER.CREATE.KV_ipcsync_main",  # by which a server would send to any subject
        "$JS.API.CONSUMER.DURABLE.CREATE.KV_ipcsync_main.x",
    ):
        await client.publish(subject, b"x")
        assert subject.lower() in await asyncio.wait_for(errors.get(), DEADLINE_S)
    for subject in ("ipcsync.main.prefill-0.>", "_INBOX_prefill-0.>", "ipcsync.>"):
        await client.subscribe(subject, cb=ignore)
        assert subject.lower() in await asyncio.wait_for(errors.get(), DEADLINE_S)
    heard = await client.subscribe("ipcsync.main.decode-0.ask.decode-0")
    for subject in ("ipcsync.main.prefill-0.ask.decode-1", "ipcsync.main.prefill-0.answer.decode-1.0"):
        # What it sends to itself may name any subject for the response.
        await client.publish("ipcsync.main.decode-0.ask.decode-0", b"x", reply=subject)
        await (await heard.next_msg(timeout=DEADLINE_S)).respond(b"as another node")
        assert subject.lower() in await asyncio.wait_for(errors.get(), DEADLINE_S)
    await client.close()
    for name in (None, "stranger"):
        with pytest.raises(Exception, match=r"(?i)authorization|tls|ssl|certificate|eof|connection|pipe|no servers"):
            await nats.connect(url, tls=authority.context(name), allow_reconnect=False, connect_timeout=int(DEADLINE_S))


def test_a_bridge_that_the_servers_do_not_take_says_why_and_ends(
    server: Server, authority: Authority, tmp_path: Path
) -> None:
    node = Node("prefill-0", [server.url.replace("nats://", "tls://")], *authority.flags("stranger"))
    try:
        node.start_bridge()
        assert node.bridge is not None
        assert node.bridge.wait(DEADLINE_S) == 1
        assert "authorization" in node.text().lower()
    finally:
        node.close()


def test_a_node_whose_name_is_not_its_certificates_gets_no_name(server: Server, authority: Authority) -> None:
    node = Node("prefill-0", [server.url.replace("nats://", "tls://")], *authority.flags("decode-0"))
    try:
        node.start_bridge()
        assert node.bridge is not None
        assert node.bridge.wait(DEADLINE_S) == 1
        assert "permissions violation" in node.text().lower()
    finally:
        node.close()


def test_a_server_that_does_not_ask_for_tls_any_more_is_not_gone_on_with(
    server: Server, authority: Authority, tmp_path: Path
) -> None:
    """As one that is started again with another configuration, or whoever is in the middle."""
    from ipcsync_bridge.transport import Transport

    conf = tmp_path / "nats.conf"
    with_tls = conf.read_text()
    ca, certificate, key = authority.flags("prefill-0")[1::2]
    settings = Settings("prefill-0", (server.url,), tls_ca=ca, tls_cert=certificate, tls_key=key)

    async def begin_again(text: str) -> None:
        server.kill()
        conf.write_text(text)
        await asyncio.to_thread(server.start)

    async def scenario() -> None:
        transport = Transport(settings)
        await transport.connect(DEADLINE_S)
        await begin_again("")
        while "does not ask for TLS" not in transport.last_error:
            assert transport.client.stats["reconnects"] == 0
            await asyncio.sleep(0.01)
        await begin_again(with_tls)
        while transport.client.stats["reconnects"] == 0:
            await asyncio.sleep(0.01)
        assert transport.certificate
        await transport.close()

    asyncio.run(asyncio.wait_for(scenario(), 2 * DEADLINE_S))


def test_the_doctor_takes_a_certificate_that_is_its_own_authority(authority: Authority, tmp_path: Path) -> None:
    path = authority.directory
    _openssl(path, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=a")
    (path / "own.ext").write_text("basicConstraints=CA:FALSE\n")
    _openssl(path, "x509", "-req", "-in", "own.csr", "-signkey", "own.key", "-out", "own.pem", "-days", "2",
             "-extfile", "own.ext")  # fmt: skip
    (path / "own.key").chmod(0o600)
    flags = ["--tls-ca", f"{path}/own.pem", *authority.flags("own")[2:]]
    where = ["--nats", "tls://127.0.0.1:1", "--runtime-dir", str(tmp_path / "none")]
    _, found = examine("--node", "a", *where, *flags)
    assert "this node's ends in 2 days, the authority's ends in 2 days" in found["certificates"]["detail"]


def test_the_doctor_tries_certificates_and_permissions(server: Server, authority: Authority, tmp_path: Path) -> None:
    where = ["--nats", server.url.replace("nats://", "tls://"), "--runtime-dir", str(tmp_path / "none")]
    status, found = examine("--node", "prefill-0", *where, *authority.flags("prefill-0"))
    assert status == 0, found
    assert found["certificates"]["result"] == "warn"  # they are made for two days
    assert "this node's ends in 2 days, the authority's ends in 2 days" in found["certificates"]["detail"]
    assert "its certificate ends in 2 days" in found["server"]["detail"]
    assert "not to speak as another node" in found["permissions"]["detail"]
    status, found = examine("--node", "prefill-0", *where, *authority.flags("decode-0"))
    assert status == 1
    assert "the certificate is 'decode-0'" in found["certificates"]["detail"]
    assert "to speak on ipcsync.main._.ask.prefill-0" in found["permissions"]["detail"]
    status, found = examine("--node", "prefill-0", *where, *authority.flags("stranger"))
    assert (status, found["server"]["result"]) == (1, "fail")
    assert "authorization" in found["server"]["detail"].lower()
