"""Tokens, the secret of the sessions, and the addresses the dashboard answers to."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from rlwatch.cli.app_login import (
    DashboardAddress,
    Login,
    LoginToken,
    forget_sessions,
    is_loopback,
    people_of,
    place,
    session_secret,
    tokens,
)
from rlwatch.errors import ConfigError

LONG = "a token of many letters"


def test_tokens_are_made_anew_for_every_start() -> None:
    """256 random bits each; nothing prints them by accident."""
    first, second = tokens({}), tokens({})

    values = {token.value for made in (first, second) for token in made.values()}
    assert len(values) == 4
    assert all(len(value) == 43 for value in values)
    assert not any(value in repr(first) + repr(second) for value in values)


def test_a_token_can_be_set_by_a_variable_or_by_a_file(tmp_path: Path) -> None:
    """Where it came from is told instead of it."""
    file = tmp_path / "token"
    file.write_text(f"{LONG}\n")
    file.chmod(0o600)

    found = tokens({"RLWATCH_UI_TOKEN": "another of many letters", "RLWATCH_UI_VIEWER_TOKEN_FILE": str(file)})

    assert found["operator"] == LoginToken("another of many letters", "RLWATCH_UI_TOKEN")
    assert found["viewer"] == LoginToken(LONG, f"{file} (RLWATCH_UI_VIEWER_TOKEN_FILE)")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RLWATCH_UI_TOKEN": "short"}, "RLWATCH_UI_TOKEN has 5 characters"),
        ({"RLWATCH_UI_TOKEN": "ein Schlüssel mit Umlaut"}, "ASCII"),
        ({"RLWATCH_UI_TOKEN": LONG, "RLWATCH_UI_VIEWER_TOKEN": LONG}, "are the same"),
        ({"RLWATCH_UI_TOKEN_FILE": "/no/such/file"}, "cannot read /no/such/file"),
    ],
)
def test_a_token_that_is_none_is_refused(env: dict[str, str], words: str) -> None:
    """Before anything starts; a file that is named and missing is no reason to fall back to something else."""
    with pytest.raises(ConfigError, match=words) as error:
        tokens(env)
    assert LONG not in str(error.value)


def test_a_file_that_others_can_read_is_no_secret(tmp_path: Path) -> None:
    """Neither the token's nor the sessions'; the answer says what to type."""
    file = tmp_path / "token"
    file.write_text(LONG * 2)
    file.chmod(0o640)

    with pytest.raises(ConfigError, match=r"mode 640.*chmod 600"):
        tokens({"RLWATCH_UI_TOKEN_FILE": str(file)})
    with pytest.raises(ConfigError, match=r"mode 640.*chmod 600"):
        session_secret(file)


def test_the_secret_of_the_sessions_is_kept_and_is_the_users_alone(tmp_path: Path) -> None:
    """So that a restart, and another dashboard of the same user, know the sessions there are."""
    path = tmp_path / "state" / "ui-secret"

    secret = session_secret(path)

    assert len(secret) == 64
    assert session_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["ui-secret"]
    forget_sessions(path)
    assert session_secret(path) != secret


def test_a_home_that_cannot_be_written_costs_the_sessions_and_nothing_else(tmp_path: Path) -> None:
    """They end with the server."""
    (tmp_path / "file").touch()

    login = Login.of_user({"RLWATCH_STATE_DIR": str(tmp_path / "file" / "below")})

    assert not login.kept
    assert len(login.secret) == 64


def test_sessions_are_worth_nothing_at_another_store_or_after_another_token(tmp_path: Path) -> None:
    """A viewer of one store is nobody at the next; a token set anew ends what the old one began. Made ones come and go."""
    made = {"operator": LoginToken("o"), "viewer": LoginToken("v")}
    login = Login(made, "secret")

    assert login.signing_key("/a") == Login({**made, "viewer": LoginToken("w")}, "secret").signing_key("/a")
    keys = {
        login.signing_key("/a"),
        login.signing_key("/b"),
        Login(made, "other").signing_key("/a"),
        Login({**made, "viewer": LoginToken("v", "FILE")}, "secret").signing_key("/a"),
        Login({**made, "viewer": LoginToken("w", "FILE")}, "secret").signing_key("/a"),
    }
    assert len(keys) == 5


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_what_only_this_machine_reaches(host: str) -> None:
    """All of 127/8, by its own name only."""
    assert is_loopback(host)
    assert not place(host, 8501).plain_beyond_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "example.org", "127.0.0.1.example.org"])
def test_what_others_reach_is_plain_until_a_proxy_has_tls(host: str) -> None:
    """A tunnel to loopback, and TLS in front, are not."""
    assert place(host, 8501).plain_beyond_loopback
    assert not place(host, 8501, public_urls=["https://gpu.example.org"]).plain_beyond_loopback
    assert place(host, 8501, public_urls=["http://gpu.example.org"]).plain_beyond_loopback
    assert not place("127.0.0.1", 8501, public_urls=["http://localhost:9000"]).plain_beyond_loopback


@pytest.mark.parametrize(
    ("host", "origins"),
    [
        ("127.0.0.1", ["http://localhost:8501", "http://127.0.0.1:8501", "http://[::1]:8501"]),
        ("10.1.2.3", ["http://10.1.2.3:8501"]),
        ("0.0.0.0", ["http://localhost:8501", "http://127.0.0.1:8501", "http://[::1]:8501"]),
    ],
)
def test_it_answers_to_its_own_origins_only(host: str, origins: list[str]) -> None:
    """Beyond loopback to the machine's names as well; behind a proxy to the proxy's instead."""
    here = [f"http://{name.lower()}:8501" for name in dict.fromkeys((socket.gethostname(), socket.getfqdn()))]

    beyond = [] if is_loopback(host) else [name for name in here if name not in origins]
    assert list(place(host, 8501).origins) == [*origins, *beyond]
    public = place(host, 8501, public_urls=["https://GPU.example.org:443/rl/"])
    assert list(public.origins) == [*origins, "https://gpu.example.org"]
    assert (public.base_path, public.address) == ("/rl", "https://gpu.example.org/rl/")


def test_what_a_person_opens_and_what_this_machine_asks() -> None:
    """IPv6 in brackets, the default port left out."""
    assert place("[::1]", 80).address == "http://[::1]/"
    assert place("0.0.0.0", 8501).address == f"http://{socket.gethostname().lower()}:8501/"
    assert place("0.0.0.0", 8501, base_path="x").local == "http://127.0.0.1:8501"
    assert place("::", 8501).local == "http://[::1]:8501"
    assert place("::1", 81).link(LoginToken("a+b&c")) == "http://[::1]:81/login?token=a%2Bb%26c"


def test_a_proxy_is_believed_by_its_address() -> None:
    """One or a network."""
    behind = place(
        "127.0.0.1", 1, public_urls=["https://a.b"], proxies=["127.0.0.1", "10.0.0.7/24"], user_header="X-Remote-User"
    )

    assert behind == DashboardAddress(
        "127.0.0.1", 1, "", ("https://a.b",), ("127.0.0.1/32", "10.0.0.0/24"), user_header="x-remote-user"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"public_urls": ["gpu.example.org"]}, "wants an address like"),
        ({"public_urls": ["https://ann:pw@gpu.example.org"]}, "wants an address like"),
        ({"public_urls": ["https://gpu.example.org?x=1"]}, "wants an address like"),
        ({"public_urls": ["https://gpu.example.org:port"]}, "Port could not be cast"),
        ({"public_urls": ["https://a/x"], "base_path": "/y"}, "must name the same path.*/x, /y"),
        ({"public_urls": ["https://a/x", "https://b"]}, "must name the same path.*/, /x"),
        ({"base_path": "/../x"}, "wants a path like"),
        ({"base_path": "/a b"}, "wants a path like"),
        ({"proxies": ["127.0.0.1"]}, "needs --public-url"),
        ({"proxies": ["nginx"], "public_urls": ["https://a"]}, "address or network.*'nginx'"),
        ({"user_header": "X-Remote-User"}, "needs --behind-proxy"),
        ({"user_header": "a b", "proxies": ["::1"], "public_urls": ["https://a"]}, "no header's name"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, object], words: str) -> None:
    """With the value got and the form wanted."""
    with pytest.raises(ConfigError, match=words):
        place("127.0.0.1", 8501, **given)  # type: ignore[arg-type]


OIDC = """
[auth]
redirect_uri = "http://localhost:8501/oauth2callback"
cookie_secret = "0123456789abcdef0123456789abcdef"
client_id = "rlwatch"
client_secret = "s"
server_metadata_url = "https://id.example.org/.well-known/openid-configuration"
[rlwatch]
operators = ["ann@example.org"]
viewers = ["*@example.org"]
"""


def test_an_openid_provider_and_its_people_come_from_one_file(tmp_path: Path) -> None:
    """In Streamlit's own form, with lists of addresses beside it."""
    file = tmp_path / "oidc.toml"
    file.write_text(OIDC)

    at = place("127.0.0.1", 8501, oidc=file)
    assert at.oidc == file
    assert people_of(file, at) == {"operator": ["ann@example.org"], "viewer": ["*@example.org"]}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[auth]", "[auth", "oidc.toml"),
        ('client_id = "rlwatch"', "", "lacks client_id"),
        ('client_secret = "s"', "client_secret = 5", "lacks client_secret"),
        ("0123456789abcdef0123456789abcdef", "short", "can be guessed"),
        ("localhost:8501", "localhost:8502", "'http://localhost:8502/oauth2callback' is not of this dashboard"),
        ("/oauth2callback", "/elsewhere", "is not of this dashboard"),
        ('["ann@example.org"]', '"ann"', "lists of addresses"),
        ('["*@example.org"]', '["*"]', "lists of addresses"),
        ('operators = ["ann@example.org"]\nviewers = ["*@example.org"]', "", "lists of addresses"),
    ],
)
def test_a_provider_that_would_let_in_nobody_or_everybody_is_refused(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    """Before anything is started, by what is wrong with the file."""
    file = tmp_path / "oidc.toml"
    assert old in OIDC
    file.write_text(OIDC.replace(old, new))

    with pytest.raises(ConfigError, match=words):
        place("127.0.0.1", 8501, oidc=file)
    with pytest.raises(ConfigError, match="No such file"):
        place("127.0.0.1", 8501, oidc=tmp_path / "none.toml")
