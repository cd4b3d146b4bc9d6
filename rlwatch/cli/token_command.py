"""``rlwatch token create | list | revoke``: a login of its own for each trainer and person on PostgreSQL."""

from __future__ import annotations

from typing import Annotated

import typer

from rlwatch.cli.console import print_json, print_table, say
from rlwatch.cli.database import server_of
from rlwatch.cli.options import ByOption, FormatOption, OutputFormat, StoreOption, examples, me
from rlwatch.clock import SystemClock
from rlwatch.wording import local_moment, plural

URL = "postgresql://owner@db.example.com/rlwatch"
group = typer.Typer(
    help="Create, list and revoke logins of trainers and people to a PostgreSQL store.",
    no_args_is_help=True,
    epilog=examples(f"rlwatch token create node7 --project math --store {URL}", f"rlwatch token list --store {URL}"),
)
CREATE_EPILOG = examples(
    f"rlwatch token create node7 --project math --store {URL}",
    f"rlwatch token create nightly --project math --project code --store {URL}",
    f"rlwatch token create ann --role operator --project '*' --store {URL}",
)
LIST_EPILOG = examples(f"rlwatch token list --store {URL}")
REVOKE_EPILOG = examples(f"rlwatch token revoke node7 --store {URL}")


@group.command("create", epilog=CREATE_EPILOG)
def create(
    name: Annotated[str, typer.Argument(help="Name of the login: small letters, digits, '_' and '-'.")],
    *,
    project: Annotated[list[str], typer.Option("--project", help="Project of the login; '*': all. Repeatable.")],
    role: Annotated[
        str, typer.Option("--role", help="writer: record runs; operator: command and acknowledge; reader: read only.")
    ] = "writer",
    by: ByOption = "",
    store: StoreOption = None,
) -> None:
    """Create a login and print its token once; the server stores only a verifier."""
    from rlwatch.store.postgres import logins

    token = logins.create(server_of(store), name, project, by=by or me(), now=SystemClock().now(), role=role)
    may = {"writer": "record runs of", "operator": "see and command runs of", "reader": "see runs of"}[role]
    say(f"{name} may {may} {', '.join(project)}. With {name}@ in the store's URL:")
    print(f"PGPASSWORD={token}")


@group.command("list", epilog=LIST_EPILOG)
def list_logins(store: StoreOption = None, output: FormatOption = OutputFormat.TEXT) -> None:
    """List logins with creator and open connections."""
    from rlwatch.store.postgres import logins

    found = logins.logins(server_of(store))
    if output is OutputFormat.JSON:
        print_json(found)
    elif found:
        rows = [(t.name, t.role, ", ".join(t.projects), t.by, local_moment(t.at), str(t.connected)) for t in found]
        print_table(("login", "role", "projects", "created by", "when", ">connections"), rows)
    else:
        say("no logins")


@group.command("revoke", epilog=REVOKE_EPILOG)
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the login.")],
    *,
    store: StoreOption = None,
) -> None:
    """Revoke a login and close its connections. Its records stay."""
    from rlwatch.store.postgres import logins

    cut = logins.revoke(server_of(store), name)
    say(f"{name} is revoked; {plural(cut, 'connection')} cut")
