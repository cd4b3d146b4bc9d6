"""A login of its own for each trainer: its token alone opens, for its project only, until it is revoked."""

import json
import re

import pytest
from postgres_server import new_schema, sql
from typer.testing import CliRunner

from rlwatch.cli.app import app
from rlwatch.errors import ConfigError, StoreError
from rlwatch.records import RunInfo, Silence
from rlwatch.store.postgres import logins, migrations
from rlwatch.store.url import open_store
from rlwatch.testing.store_run_contract import command, steps


@pytest.fixture(scope="module")
def owner(postgres_server):
    """URL of the owner of a store with roles; whoever is in the role ``asked`` is asked for a password."""
    url = postgres_server.url(schema := new_schema())
    open_store(url).put_silence(Silence("s", "ann", "", 0.0, 0.0))
    with sql(url) as db:
        db.execute(migrations.script("roles", schema))
        db.execute("DROP ROLE IF EXISTS asked")
        db.execute("CREATE ROLE asked NOLOGIN")
    return url


def test_a_token_opens_for_its_project_until_it_is_revoked(owner, postgres_server, tmp_path, monkeypatch):
    """Made, listed and revoked in the shell; the server knows a verifier, not the token; a live connection is cut."""
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path))
    shell = lambda *args: CliRunner().invoke(app, ["token", *args, "--store", owner])  # noqa: E731
    made = shell("create", "node7", "--project", "math", "--by", "ann")
    assert made.exit_code == 0, made.output
    token = re.search(r"^PGPASSWORD=(\S{40,})$", made.output, re.MULTILINE)[1]
    with sql(owner) as db:
        db.execute("GRANT asked TO node7")
        kept = db.execute("SELECT rolpassword FROM pg_authid WHERE rolname = 'node7'").fetchone()[0]
    assert kept.startswith("SCRAM-SHA-256$")
    assert token not in kept

    schema = re.search(r"schema=(\w+)", owner)[1]
    url = postgres_server.url(schema, user="node7")
    for wrong in ("", "not-the-token"):
        monkeypatch.setenv("PGPASSWORD", wrong) if wrong else monkeypatch.delenv("PGPASSWORD", raising=False)
        with pytest.raises(StoreError, match="PGPASSWORD"):
            open_store(url).runs()
    monkeypatch.setenv("PGPASSWORD", token)
    store = open_store(url)
    writer = store.open_run(RunInfo("mine", project="math"))
    writer.write(steps(1))
    with pytest.raises(StoreError, match="refuses"):
        store.open_run(RunInfo("theirs", project="code"))
    with pytest.raises(StoreError, match="permission denied"):
        store.submit(command("c1", "mine"))
    [listed] = json.loads(shell("list", "--format", "json").output)
    assert (listed["name"], listed["projects"], listed["by"]) == ("node7", ["math"], "ann")
    assert listed["role"] == "writer"
    assert listed["connected"] >= 1

    assert "cut" in shell("revoke", "node7").output
    with pytest.raises(StoreError):
        writer.write(steps(2))
    with pytest.raises(StoreError, match=r"PGPASSWORD|node7"):
        open_store(url).runs()
    monkeypatch.delenv("PGPASSWORD")
    assert shell("list").output.strip() == "no logins"
    assert [record.step for record in open_store(owner).records("mine")] == [1]


def test_people_have_logins_of_their_role(owner, postgres_server, tmp_path, monkeypatch):
    """An operator commands in their own project and records nothing; a reader looks."""
    monkeypatch.setenv("RLWATCH_LOCAL_DIR", str(tmp_path))
    shell = lambda *args: CliRunner().invoke(app, ["token", *args, "--store", owner])  # noqa: E731
    open_store(owner).open_run(RunInfo("watched", project="code")).close()
    schema = re.search(r"schema=(\w+)", owner)[1]
    stores = {}
    for name, role in (("ann", "operator"), ("bob", "reader")):
        made = shell("create", name, "--role", role, "--project", "code")
        assert made.exit_code == 0, made.output
        stores[role] = open_store(postgres_server.url(schema, user=name))

    assert stores["operator"].submit(command("c1", "watched")).command_id == "c1"
    for role, store in stores.items():
        assert [run.run_id for run in store.runs()] == ["watched"], role
        with pytest.raises(StoreError):
            store.open_run(RunInfo("new", project="code")).write(steps(1))
    with pytest.raises(StoreError, match="permission denied"):
        stores["reader"].submit(command("c2", "watched"))
    listed = json.loads(shell("list", "--format", "json").output)
    assert [(login["name"], login["role"]) for login in listed] == [("ann", "operator"), ("bob", "reader")]
    assert "got 'king'" in shell("create", "eve", "--role", "king", "--project", "code").output
    assert [shell("revoke", name).exit_code for name in ("ann", "bob")] == [0, 0]


def test_what_is_no_login_of_ours_is_left_alone(owner):
    """Names that are none, roles of others, stores without roles: one clear error, and nothing changed."""
    server = open_store(owner).server
    with pytest.raises(ConfigError, match="small letters"):
        logins.create(server, "x; DROP", ["math"], by="ann", now=1.0)
    with pytest.raises(ConfigError, match="--project"):
        logins.create(server, "fine", [" "], by="ann", now=1.0)
    with pytest.raises(StoreError, match="already"):
        logins.create(server, "asked", ["math"], by="ann", now=1.0)
    with pytest.raises(StoreError, match="no login 'asked'"):
        logins.revoke(server, "asked")
    bare = open_store(re.sub(r"schema=\w+", f"schema={new_schema()}", owner))
    bare.put_silence(Silence("s", "ann", "", 0.0, 0.0))
    with pytest.raises(StoreError, match="db sql roles"):
        logins.create(bare.server, "fine", ["math"], by="ann", now=1.0)
    refused = CliRunner().invoke(app, ["token", "list", "--store", "memory://x"])
    assert "not a PostgreSQL store" in refused.output
